"""A training step of Llama-3 8B on one of 64 ranks that share its parameters, as others captured it: a `Problem`.

The graph is of meta-pytorch/autoparallel (BSD-3-Clause, `data/LICENSE`): the repro graphs of its overlap simulator for
the forward and the backward, joined and given shapes. It holds two sequences of 8,192 tokens for each rank, in bfloat16
by parameters in float32; each parameter is cast, gathered and waited for in the forward, and its gradient, cast back,
is reduced and scattered in the backward. It has 8,186 nodes that compute. The problem that is made of it has fewer ops:

- **Views** are no ops, as everywhere here: what shares a storage is one value. By what they compute, not by the
  file's storages: those of the two halves were counted apart, so that a transposed view of the backward has a new one.
- **A collective and its wait** are one op, which takes the time of both. Nothing overlaps.
- **An all-gather may run again** where its wait is that of a parameter: where all that it is made of, back to the
  parameter, are ops of one input. Other collectives run once, so that all reductions are as captured.
- **The loss** is not in the graph, which ends with logits and begins its backward with their gradient. It is one op
  here, first of the backward, which reads the one and makes the other; so the gradient is not at hand in the forward,
  and the logits are let go of after it, as trainers do.
- **Resident** are the parameters' shards, the tokens and the table of rotations. Results are the gradients' shards.

Seconds are by the roofline of an H100 (`checkmate.profiling.data_sheets`), products in bfloat16; collectives by a
latency and a rate, fitted to the all-gathers of a table that comes with the graph (`LINKS`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkmate.core.graph import Graph, Op, Role, Value
from checkmate.core.problem import Problem, Profile
from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.profiling.mesh import ALL_GATHER, COLLECTIVES, Link, Point, traffic

DATA = Path(__file__).parent / "data"
GRAPH = DATA / "joint_llama3_8b_64_1d.json.gz"
LINKS = {  # name: the table and the ranks of its all-gathers
    "NVLink": ("colls64_1", 64),  # 64 ranks on one fabric
    "network": ("colls8_8", 8),  # ranks of which each is on a node of its own
}
LOSS = "loss"
PARAMETER = "placeholder"
VIEWS = {
    "aten.view.default",
    "aten.permute.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.expand.default",
    "aten.view_as_complex.default",
    "aten.view_as_real.default",
    "aten._conj.default",
    "_c10d_functional.wait_tensor.default",
    "<built-in function getitem>",
}
LOOKUP = "aten.embedding.default"
PRODUCTS = ("aten.mm.default", "aten._scaled_dot_product_cudnn_attention.default")
RESIDUAL = "aten.add.Tensor"  # in the forward: two for each layer, the second of which is what the layer makes
Node = Mapping[str, Any]


def table(name: str) -> dict[tuple[str, int], dict[str, tuple[Point, ...]]]:
    """A table of collectives, by group and ranks: bytes of the whole, and seconds.

    Its columns are MiB of what each rank hands in; so an all-gather's whole is as many times that as there are ranks.

    >>> sorted(table("colls64_1")["0", 64])
    ['all_gather_into_tensor', 'all_reduce', 'reduce_scatter_tensor']
    """
    head, _, *lines = (DATA / f"{name}.table").read_text().splitlines()
    sizes = [int(word.removesuffix("MB")) * 2**20 for word in head.split() if word.endswith("MB")]
    found: dict[tuple[str, int], dict[str, tuple[Point, ...]]] = {}
    for line in lines:
        group, ranks, collective, *milliseconds = line.split()
        if collective in COLLECTIVES:
            times = int(ranks) if collective == ALL_GATHER else 1
            points = zip(sizes, milliseconds, strict=True)
            of_group = found.setdefault((group, int(ranks)), {})
            of_group[collective] = tuple((float(times * size), float(ms) / 1e3) for size, ms in points)
    return found


def fitted(collective: str, points: Sequence[Point], ranks: int) -> Link:
    """The latency and rate of which the squared errors, as shares of what was measured, are least.

    Raises:
        ValueError: if there are not two sizes, or larger ones do not take longer.

    >>> link = fitted(ALL_GATHER, [(2e6, 2e-3), (4e6, 3e-3), (8e6, 5e-3)], ranks=2)
    >>> round(link.latency, 6), round(link.rate)
    (0.001, 1000000000)
    """
    moved = np.array([traffic(collective, whole, ranks) for whole, _ in points])
    seconds = np.array([took for _, took in points])
    if len(set(moved)) < 2:
        raise ValueError(f"A latency and a rate follow from two sizes or more, not from {len(set(moved))}.")
    found = np.linalg.lstsq(np.stack([1 / seconds, moved / seconds], axis=1), np.ones(len(points)), rcond=None)[0]
    if found[0] < 0:  # a rate alone is nearest
        found = np.array([0.0, (moved / seconds).sum() / (moved**2 / seconds**2).sum()])
    if found[1] <= 0:
        raise ValueError("No rate explains collectives of which larger ones do not take longer.")
    return Link(float(found[0]), float(1 / found[1]))


def link(name: str) -> Link:
    """The latency and rate of a name of `LINKS`.

    Reduce-scatters are taken to reach what all-gathers do: those of ``colls64_1`` are copies of its all-gathers by what
    is handed in, and so 64 times slower for the same traffic.
    """
    file, ranks = LINKS[name]
    return fitted(ALL_GATHER, table(file)["0", ranks][ALL_GATHER], ranks)


def read(path: Path = GRAPH, *, reach: Link | None = None, device: Device = DEVICES["h100"]) -> Problem:
    """The problem of a file.

    Args:
        path: of this form, packed.
        reach: what ranks reach of each other; by default over NVLink.
        device: that each rank has.
    """
    with gzip.open(path, "rt") as file:
        return _Reader(json.load(file), link("NVLink") if reach is None else reach, device).problem()


def layers(problem: Problem) -> tuple[list[int], range]:
    """The values that the layers make, each the next one's input, and the forward's ops that are of a layer."""
    forward = range(problem.graph.forward_length)
    residuals = [k for k in forward if problem.graph.ops[k].target == RESIDUAL]
    first = next(k for k in forward if problem.graph.ops[k].target == LOOKUP)
    return [problem.graph.ops[k].outputs[0] for k in residuals[1::2]], range(first + 1, residuals[-1] + 1)


class _Reader:
    """The ops and values so far."""

    def __init__(self, document: Mapping[str, Any], reach: Link, device: Device) -> None:
        self.document, self.reach, self.device = document, reach, device
        self.sizes: Sequence[int] = document["storage_bytes"]
        self.ranks = {group: about["size"] for group, about in document["groups"].items()}
        self.nodes: dict[str, Node] = {node["name"]: node for node in document["nodes"]}
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.seconds: list[float] = []
        self.of: dict[str, list[int]] = {}  # the values of a node's storages, in their order

    def problem(self) -> Problem:
        """All nodes in turn."""
        logits, *gradients = self.document["outputs"]
        inputs = [node["name"] for node in self.nodes.values() if node["op"] == PARAMETER and node["phase"] == "fwd"]
        trained = {name for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}
        for name, node in self.nodes.items():
            if node["op"] == PARAMETER and node["phase"] == "fwd":
                self.of[name] = [self._value(node, 0, None, "parameter" if name in trained else "input")]
            elif node["op"] == PARAMETER:
                self._add(node, LOSS, tuple(self.of[logits]), "stands for what is not in the graph")
            elif node["op"] in VIEWS:
                self.of[name] = self._seen(node)
            else:
                read = tuple(dict.fromkeys(v for source in node["inputs"] for v in self.of[source]))
                self._add(node, node["op"], read, self._pinned(node, trained))
        results = tuple(self.of[name][0] for name in gradients if name is not None)
        resident = sum(value.size_bytes for value in self.values if value.producer is None)
        source = f"roofline estimate for {self.device.name}, collectives at {self.reach.rate / 1e9:.0f} GB/s"
        count = len(self.ops)
        workspace, estimated = np.zeros(count, dtype=np.int64), tuple(range(count))
        profile = Profile(np.array(self.seconds), workspace, resident, source, estimated=estimated)
        return Problem(Graph(tuple(self.ops), tuple(self.values), results), profile)

    def _value(self, node: Node, position: int, producer: int | None, role: Role = "intermediate") -> int:
        storages = node["storages"]
        name = node["name"] if len(storages) == 1 else f"{node['name']}.{position}"
        self.values.append(Value(name, self.sizes[storages[position]], producer, role))
        return len(self.values) - 1

    def _seen(self, node: Node) -> list[int]:
        """The values behind a view; of an op of several, the one that is picked."""
        source = node["inputs"][0]
        whole = self.of[source]
        if len(whole) == 1:
            return whole
        picked: int = self.nodes[source]["storages"].index(node["storages"][0])
        return [whole[picked]]

    def _add(self, node: Node, target: str, read: tuple[int, ...], pinned: str | None) -> None:
        k = len(self.ops)
        made = tuple(self._value(node, i, k) for i in range(len(node["storages"])))
        self.of[node["name"]] = list(made)
        phase = "forward" if node["phase"] == "fwd" else "backward"
        self.ops.append(Op(node["name"], target, read, made, phase, pinned))  # type: ignore[arg-type]
        self.seconds.append(self._seconds(node, read, made))

    def _seconds(self, node: Node, read: tuple[int, ...], made: tuple[int, ...]) -> float:
        came, went = (sum(self.values[v].size_bytes for v in of) for of in (read, made))
        if (collective := collective_of(node)) is not None:
            whole = went if collective == ALL_GATHER else came
            return self.reach.seconds(collective, whole, self.ranks[node["group"][0]])
        if node["op"] == LOOKUP:  # it reads what it picks, as much as it makes
            came = went
        return self.device.seconds(node["flop"], "bfloat16", came + went)

    def _pinned(self, node: Node, trained: set[str]) -> str | None:
        collective = collective_of(node)
        if collective is None or (collective == ALL_GATHER and self._is_of_parameter(node, trained)):
            return None
        return "speaks with other ranks"

    def _is_of_parameter(self, node: Node, trained: set[str]) -> bool:
        """Whether all that it is made of are ops of one input, back to a parameter."""
        while node["op"] != PARAMETER:
            if len(node["inputs"]) != 1:
                return False
            node = self.nodes[node["inputs"][0]]
        return node["name"] in trained


def is_collective(op: Op) -> bool:
    """Whether ranks speak with each other in an op."""
    return any(name in op.target for name in COLLECTIVES)


def collective_of(node: Node) -> str | None:
    """Which collective a node is; None: none of those that have costs."""
    room, _, rest = node["op"].partition(".")
    name = rest.removesuffix(".default")
    return name if room == "_c10d_functional" and name in COLLECTIVES else None
