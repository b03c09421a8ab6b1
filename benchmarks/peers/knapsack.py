"""PyTorch's memory budget on Inductor, by its own solvers and by ours: peak, time of a step, and equality of bits.

    python -m benchmarks.peers.knapsack [NETWORK ...] [--backend aot_eager inductor] [--share 0.3 0.1] [--rounds 7]

Each network is compiled by `torch.compile` once without a budget, and for each share of ``activation_memory_budget`` by
each solver; ours also at the bytes at which PyTorch's default solver, dp, was measured. Networks are smaller than in
their papers, as Inductor compiles for minutes. All runs on the CPU, one thread: by Inductor's code, and by PyTorch's
kernels (``aot_eager``) in the halves that the same partitioner makes. Peaks are measured over a
forward and a backward from no gradients, parameters, buffers and batch added; ``held`` is what is there between the
two. Times are relative to the step without a budget, all taking turns. Gradients are compared, bit by bit and by their
largest difference, with those of the step without a budget from the same random state: no solver changes what is
computed, so that others are wrong. ``asked``: whether PyTorch asked the solver; else its own cut saved less already.
"""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.common.rows import Row, latest, shown
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.common.timing import distance, median_ratio, seconds_in_turn
from benchmarks.networks import Case, classifier, images, language_model, tokens
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.vit import ViT
from checkmate.backends.tensor_state import same_bits
from checkmate.core.answer import Table
from checkmate.errors import InfeasibleBudget
from checkmate.integrations.inductor import SMALLEST_SHARE, KnapsackSolver
from checkmate.memory import measure_peak

PEERS = ("dp", "greedy", "ilp")
OURS, AT_ITS_BYTES, DEFAULT = "checkmate", "checkmate, dp's bytes", "no budget"
HEADER = (
    "network",
    "backend",
    "share",
    "solver",
    "peak",
    "held",
    "time",
    "gradients",
    "asked",
    "planned in",
    "simulated",
)


def _gpt2() -> nn.Module:
    from benchmarks.networks.gpt2 import GPT2  # its library takes ten seconds

    return GPT2(vocabulary=512, positions=128, width=128, layers=4, heads=4, attention="sdpa")


def _reused() -> nn.Module:
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return nn.Sequential(*layers, *layers, *layers)


def _mean_square(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).square().mean()


_CASES = (
    Case("gpt2", _gpt2, partial(tokens, 8, 128, 512), language_model),
    Case("resnet50", lambda: resnet50(10, base=16), partial(images, 8, 64, 10)),
    Case("vit", lambda: ViT(32, 4, width=128, layers=4, heads=4, classes=10), partial(images, 32, 32, 10), classifier),
    Case("reused", _reused, lambda: (torch.randn(512, 64),), _mean_square),  # each weight three times
)
NETWORKS = {case.name: case for case in _CASES}


@dataclass
class Compiled:
    """A step compiled by one solver, what it made, and what it took."""

    solver: str
    share: float
    run: Callable[[], Tensor] = field(repr=False)
    row: Row = field(default_factory=dict)


def rows(name: str, backend: str, share: list[float], rounds: int) -> Iterator[Row]:
    """Measure one network by all solvers."""
    torch.set_num_threads(1)
    module, step, batch = NETWORKS[name].make(0)
    resident = sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *batch))
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}

    def loss() -> Tensor:
        return step(*batch)

    def compiled(solver: str, of: float, chooses: Any, expected: Sequence[Tensor] | None) -> Compiled | None:
        found = _compile(loss, backend, solver, of, chooses)
        module.load_state_dict(state)
        if (gradients := _first_step(module, found)) is None:
            return None
        _measure(module, found, resident)
        simulated = getattr(getattr(chooses, "choice", None), "peak", None)
        known = gradients if expected is None else expected
        same = all(same_bits(a, b) for a, b in zip(gradients, known, strict=True))
        found.row |= {"simulated": simulated, "same_bits": same, "difference": distance(gradients, known)}
        found.row["gradients"] = gradients
        return found

    plain = compiled(DEFAULT, 1.0, "dp", None)
    assert plain is not None
    expected = plain.row.pop("gradients")
    steps = [plain]
    for of in share:
        budget = 0
        for solver in (*PEERS, OURS, AT_ITS_BYTES):
            ours = {OURS: KnapsackSolver(), AT_ITS_BYTES: KnapsackSolver(budget or None)}
            at = SMALLEST_SHARE if solver == AT_ITS_BYTES else of
            found = compiled(solver, at, ours.get(solver, solver), expected)
            if found is None:
                yield {"network": name, "backend": backend, "solver": solver, "share": of, "measured_peak": None}
                continue
            found.share = of
            found.row |= {"budget": budget if solver == AT_ITS_BYTES else None}
            del found.row["gradients"]
            steps.append(found)
            budget = found.row["measured_peak"] if solver == "dp" else budget
    names = {f"{i}": found for i, found in enumerate(steps)}
    taken = seconds_in_turn(
        {key: partial(_step, found) for key, found in names.items()}, rounds, partial(_clear, module)
    )
    for key, found in names.items():
        yield {
            "network": name,
            "backend": backend,
            "solver": found.solver,
            "share": found.share,
            "resident": resident,
            **found.row,
            "time_ratio": median_ratio(taken[key], taken["0"]),
            "seconds": sorted(taken[key])[len(taken[key]) // 2],
            "rounds": rounds,
        }


def _compile(loss: Callable[[], Tensor], backend: str, solver: str, share: float, chooses: Any) -> Compiled:
    own = types.FunctionType(loss.__code__.replace(), loss.__globals__, closure=loss.__closure__)
    run = torch.compile(own, backend=backend, dynamic=False)
    config: Any = torch._functorch.config
    row: Row = {"was_asked": False, "planning_seconds": 0.0}

    def first() -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(config.patch(activation_memory_budget=share, activation_memory_budget_solver=chooses))
            stack.enter_context(config.patch(enable_autograd_cache=False))  # it does not tell dp, greedy and ilp apart
            stack.enter_context(_timed(row))
            return run()

    row["first"] = first
    return Compiled(solver, share, run, row)


def _timed(row: Row) -> Any:
    """Note what PyTorch's call of a solver takes."""
    from torch._functorch import partitioners

    call = partitioners._optimize_runtime_with_given_memory

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            row["was_asked"] = True
            row["planning_seconds"] += time.perf_counter() - began

    return patch.object(partitioners, "_optimize_runtime_with_given_memory", timed)


def _first_step(module: nn.Module, found: Compiled) -> list[Tensor] | None:
    """The gradients of a step; None where no plan stays within the budget."""
    _clear(module)
    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        found.row.pop("first")().backward()
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), InfeasibleBudget):
            raise
        return None
    found.row["compile_seconds"] = time.perf_counter() - began
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    _clear(module)
    return gradients


def _measure(module: nn.Module, found: Compiled, resident: int) -> None:
    _step(found)
    _clear(module)
    use = measure_peak(partial(_step, found))
    _clear(module)
    forward = measure_peak(found.run)
    found.row |= {"measured_peak": resident + use.peak, "held_bytes": forward.final}
    del forward
    gc.collect()


def _step(found: Compiled) -> None:
    found.run().backward()


def _clear(module: nn.Module) -> None:
    module.zero_grad(set_to_none=True)


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    rows = [{"backend": "inductor", **row} for row in rows]  # the first ones do not say
    last = latest(rows, "network", "backend", "share", "solver")
    return document(
        "PyTorch's memory budget by the peak",
        f"Made by `python -m benchmarks.peers.knapsack` at {where_from(last)}, one thread, small versions of the "
        "networks (see the script). Peaks are measured, with parameters, buffers and batch; held: bytes between the "
        "forward and the backward; times are relative to the step without a budget, and so are gradients: bit by bit, "
        "or else by their largest difference in each tensor, in proportion to its largest element.",
        Table(HEADER, [_cells(row) for row in last], HEADER),
    )


def _cells(row: Row) -> list[str]:
    if row["measured_peak"] is None:
        return [row["network"], row["backend"], f"{row['share']:g}", row["solver"], "none", *["–"] * 6]
    return [
        row["network"],
        row["backend"],
        f"{row['share']:g}",
        row["solver"],
        f"{row['measured_peak'] / 1e6:.1f} MB",
        f"{row['held_bytes'] / 1e6:.1f} MB",
        f"{row['time_ratio']:.2f}",
        "same bits" if row["same_bits"] else f"off by {row['difference']:.0e}",
        "yes" if row["was_asked"] else "no",
        f"{row['planning_seconds']:.1f} s",
        "–" if row["simulated"] is None else shown(row["simulated"] / 1e6, ".1f", " MB"),
    ]


BENCHMARK = Benchmark(
    __doc__,
    "knapsack.jsonl",
    rows,
    HEADER,
    _cells,
    names=NETWORKS,
    options={
        "backend": (("aot_eager", "inductor"), "of torch.compile"),
        "share": ([0.3, 0.1], "of activation_memory_budget"),
        "rounds": (7, "of each step, timed"),
    },
    packages=("torch", "numpy", "scipy", "transformers"),
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
