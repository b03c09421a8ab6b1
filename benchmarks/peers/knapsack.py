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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import partitioners

from benchmarks.common.rows import Row, cell, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.common.timing import add_up, distance, median_ratio, seconds_in_turn
from benchmarks.networks import Case, images, language_model, tokens
from benchmarks.networks.convolutional import resnet50
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.linear import ViT
from checkmate.backends.tensor_state import same_bits
from checkmate.errors import InfeasibleBudget
from checkmate.integrations.inductor import SMALLEST_SHARE, KnapsackSolver
from checkmate.memory import measure_peak

OURS, AT_ITS_BYTES, DEFAULT = "checkmate", "checkmate, dp's bytes", "no budget"
SOLVERS = ("dp", "greedy", "ilp", OURS, AT_ITS_BYTES)
Run = Callable[[], Tensor]


def _reused() -> nn.Module:
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    return nn.Sequential(*layers, *layers, *layers)


_CASES = (
    Case("gpt2", lambda: GPT2(512, 128, 128, 4, 4, "sdpa"), partial(tokens, 8, 128, 512), language_model),
    Case("resnet50", lambda: resnet50(10, base=16), partial(images, 8, 64, 10)),
    Case("vit", lambda: ViT(32, 4, width=128, layers=4, heads=4, classes=10), partial(images, 32, 32, 10)),
    Case(  # each weight three times
        "reused", _reused, lambda: (torch.randn(512, 64),), lambda module: lambda x: module(x).square().mean()
    ),
)
NETWORKS = {case.name: case for case in _CASES}


def rows(name: str, backend: str, share: list[float], rounds: int) -> Iterator[Row]:
    """Measure one network by all solvers."""
    torch.set_num_threads(1)
    module, step, batch = NETWORKS[name].make(0)
    resident = sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *batch))
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    clear = partial(module.zero_grad, set_to_none=True)
    expected: list[Tensor] = []
    compiled: list[tuple[Row, Run]] = []
    budget = None  # the bytes at which dp was measured
    for of, solver in [(1.0, DEFAULT), *((of, solver) for of in share for solver in SOLVERS)]:
        row: Row = {"network": name, "backend": backend, "solver": solver, "share": of}
        ours = {OURS: KnapsackSolver(), AT_ITS_BYTES: KnapsackSolver(budget)}
        chooses: Any = ours.get(solver, "dp" if solver == DEFAULT else solver)
        module.load_state_dict(state)
        clear()
        run = _compiled(lambda: step(*batch), backend, SMALLEST_SHARE if solver == AT_ITS_BYTES else of, chooses, row)
        if run is None:
            yield {**row, "measured_peak": None}
            continue
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        expected = expected or gradients
        for _ in range(2):  # the second is measured
            clear()
            use = measure_peak(partial(_step, run))
        clear()
        held = measure_peak(run).final
        gc.collect()
        row |= {"resident": resident, "measured_peak": resident + use.peak, "held_bytes": held}
        row |= {"budget": budget if solver == AT_ITS_BYTES else None}
        row["simulated"] = getattr(getattr(chooses, "choice", None), "peak", None)
        row["same_bits"] = all(same_bits(a, b) for a, b in zip(gradients, expected, strict=True))
        row["difference"] = distance(gradients, expected)
        if solver == "dp":
            budget = row["measured_peak"]
        compiled.append((row, run))
    steps = {str(i): partial(_step, run) for i, (_, run) in enumerate(compiled)}
    taken = [*seconds_in_turn(steps, rounds, clear).values()]
    for (row, _), seconds in zip(compiled, taken, strict=True):
        ratio, middle = median_ratio(seconds, taken[0]), sorted(seconds)[len(seconds) // 2]
        yield {**row, "time_ratio": ratio, "seconds": middle, "rounds": rounds}


def _compiled(loss: Run, backend: str, share: float, chooses: Any, row: Row) -> Run | None:
    """A step that is compiled, and has run once from one random state; None where no plan stays within the budget."""
    own = types.FunctionType(loss.__code__.replace(), loss.__globals__, closure=loss.__closure__)
    run: Run = torch.compile(own, backend=backend, dynamic=False)
    config: Any = torch._functorch.config
    torch.manual_seed(0)
    row["planning_seconds"] = 0.0
    began = time.perf_counter()
    try:
        with (
            config.patch(activation_memory_budget=share, activation_memory_budget_solver=chooses),
            config.patch(enable_autograd_cache=False),  # it does not tell dp, greedy and ilp apart
            add_up(partitioners, "_optimize_runtime_with_given_memory", row, "planning_seconds"),
        ):
            result = run()
        result.backward()
    except Exception as error:
        if not isinstance(getattr(error, "inner_exception", error), InfeasibleBudget):
            raise
        return None
    finally:
        row["was_asked"] = row["planning_seconds"] > 0
    row["compile_seconds"] = time.perf_counter() - began
    return run


def _step(run: Run) -> None:
    run().backward()


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    last = latest(rows, "network", "backend", "share", "solver")
    return document(
        "PyTorch's memory budget by the peak",
        f"Made by `python -m benchmarks.peers.knapsack` at {where_from(last)}, one thread, small versions of the "
        "networks (see the script). Peaks are measured, with parameters, buffers and batch; held: bytes between the "
        "forward and the backward; times are relative to the step without a budget, and so are gradients: bit by bit, "
        "or else by their largest difference in each tensor, in proportion to its largest element.",
        BENCHMARK.table(last),
    )


BENCHMARK = Benchmark(
    __doc__,
    "knapsack.jsonl",
    rows,
    {
        "network": "{network}",
        "backend": "{backend}",
        "share": "{share:g}",
        "solver": "{solver}",
        "peak": "{measured_peak:MB}|none",
        "held": "{held_bytes:MB}|–",
        "time": "{time_ratio:.2f}|–",
        "gradients": lambda row: cell(row, "same bits" if row.get("same_bits") else "off by {difference:.0e}|–"),
        "asked": lambda row: "–" if "was_asked" not in row else "yes" if row["was_asked"] else "no",
        "planned in": "{planning_seconds:.1f} s|–",
        "simulated": "{simulated:MB}|–",
    },
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
