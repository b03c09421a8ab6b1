"""The choice of ml_dataflow for a call of a Llama-3 8B, as a plan of ours, and its rows as they were measured.

Of each layer it sends one of three sets to the host's memory, by the bytes that there are in it:

    input      the layer's input, its keys and values, and the scales of its norms
    attention  likewise, and what attention gives
    whole      likewise, its queries, the sum behind attention and the two products of the MLP

The last layers keep the whole set at hand. In its backward a layer makes again what is missing. Of the layers,
parameters, sums of gradients and states are at home in the host's memory; parameters are fetched for the forward of
each layer and for its backward. Those of embedding and head are at hand all the time, with their sums and states.

`data/measured.csv` is an extract of github.com/als244/ml_dataflow (commit d6f941d0), from the rows of 8B and sequences
up to 16,384 tokens in bench/reproduce_results/recorded_data. Its license, the LGPL 2.1, is in `data/LICENSE`. What the
sets have is as in libdataflowmodels/src/transformer there. The first layers send the least, as theirs do; the whole set
is sent by layers at equal distances, where theirs go by windows of as many layers as stay at hand.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from checkmate.core import simulator
from checkmate.core.graph import Op
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.solvers.common.fetches import place_transfers, plain_events, sendable, with_fetches
from checkmate.solvers.common.schedules import lowered, on_demand

DATA = Path(__file__).parent / "data" / "measured.csv"


@dataclass(frozen=True)
class Measured:
    """A row: a machine, the choice for it, and the tokens a second that were measured."""

    device: str
    host_gib: int
    gib: int  # of the device
    length: int  # tokens of a sequence
    inputs: int  # layers of which the first set is sent
    attentions: int  # of which the second
    whole: int  # of which the third
    here: int  # of which the third stays at hand
    calls: int  # for each update, of 16,384 tokens each
    tokens_per_second: float


def measured() -> list[Measured]:
    """All rows."""
    with DATA.open() as file:
        rows = csv.DictReader(file)
        return [
            Measured(row.pop("device"), tokens_per_second=float(row.pop("tokens_per_second")), **_ints(row))
            for row in rows
        ]


def _ints(row: dict[str, str]) -> dict[str, int]:
    return {key: int(text) for key, text in row.items()}


def sets_of(row: Measured, layers: int) -> list[str]:
    """The set that is sent of each layer but those at the end that stay at hand; of a smaller model, the first ones.

    >>> row = Measured("h100", 70, 40, 8192, 0, 4, 3, here=3, calls=34, tokens_per_second=1.0)
    >>> "".join(kind[0] for kind in sets_of(row, 10))
    'aawawaw'
    """
    first, count = ["input"] * row.inputs, row.attentions + row.whole
    spread = [(i + 1) * row.whole // count > i * row.whole // count for i in range(count)]
    return [*first, *("whole" if whole else "attention" for whole in spread)][: layers - row.here]


@dataclass(frozen=True)
class Layer:
    """A layer's values: what each set has, and its last op of the forward."""

    sets: dict[str, list[int]]
    last: int


def layer_of(op: Op) -> int | None:
    """The number of the layer that an op is of, if any."""
    found = re.search(r"layers\.(\d+)", op.where or "")
    return int(found[1]) if found else None


def layers_of(problem: Problem) -> list[Layer]:
    """The layers of a Llama."""
    graph, ops = problem.graph, dict[int, list[int]]()
    for k in range(graph.forward_length):
        if (number := layer_of(graph.ops[k])) is not None:
            ops.setdefault(number, []).append(k)

    def first(of: list[int], module: str, target: str) -> Op:
        return next(op for k in of if module in ((op := graph.ops[k]).where or "") and target in op.target)

    found = []
    for of in ops.values():
        attention = first(of, "self_attn", "scaled_dot_product")
        queries, keys, values = attention.inputs[:3]
        scales = [graph.ops[k].outputs[0] for k in of if "rsqrt" in graph.ops[k].target]
        inside = first(of, "post_attention_layernorm", "_to_copy").inputs[0]
        products = [first(of, name, "mm").outputs[0] for name in ("gate_proj", "up_proj")]
        sets = {"input": [graph.ops[of[0]].inputs[0], keys, values, *scales]}
        sets["attention"] = [*sets["input"], *attention.outputs]
        sets["whole"] = [*sets["attention"], queries, inside, *products]
        found.append(Layer(sets, of[-1]))
    return found


def of_layers(problem: Problem, values: list[int]) -> list[int]:
    """Those values that layers read."""
    graph = problem.graph
    return [v for v in values if any(layer_of(graph.ops[k]) is not None for k in graph.users[v])]


def plan_of(problem: Problem, row: Measured) -> Plan:
    """The plan of a row's choice, with its transfers placed by us.

    Where it takes more than the device has, transfers are placed within what it takes without them.

    Args:
        problem: whose homes are those of the layers.
        row: whose choice it is.

    Raises:
        ValueError: if there is no room for its transfers even so.
    """
    graph, layers = problem.graph, layers_of(problem)
    away = layers[: len(layers) - row.here]
    chosen = {v for layer, kind in zip(away, sets_of(row, len(layers)), strict=True) for v in layer.sets[kind]}
    fetching = with_fetches(problem, sorted(chosen.intersection(sendable(problem))))
    place = {op: k for k, op in enumerate(fetching.op) if op is not None}
    # Behind each layer's forward all goes but what the backward keeps, what all layers read, and the next one's input.
    here = {v for layer in layers[len(away) :] for v in layer.sets["whole"]}
    for_all = [v for op in graph.ops[: layers[0].last] if layer_of(op) is None for v in op.outputs]
    here.update(v for v in for_all if len({layer_of(graph.ops[k]) for k in graph.users[v]} - {None}) == len(layers))
    kept = {place[layer.last]: {*here, *graph.ops[layer.last].outputs} for layer in layers}
    runs = lowered(fetching.problem, on_demand(fetching.problem, kept))
    least = simulator.simulate(runs, fetching.problem).peak
    plan = place_transfers(problem, max(row.gib * 2**30, least), *plain_events(fetching, runs))
    if plan is None:
        raise ValueError(f"The choice takes {least} bytes, and there is no room beside them for its transfers.")
    return plan
