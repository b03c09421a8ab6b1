"""Compiled against plain steps, in pairs: one row for each network, number of threads and budget.

    python -m benchmarks.step [NETWORK ...] [--threads 1 2] [--quick]

Budgets lie between the smallest that works (share 0) and keeping everything (share 1); a share of 2 is a budget that
leaves nothing to do, where the step should take no longer than a plain one. Peaks are in bytes at equal footing:
parameters, buffers and batch included, gradients too, optimizer state not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

import checkmate
from benchmarks.common.rows import Row, plan_facts
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import budget_at, nothing_on_disk, paired_times
from benchmarks.networks import CASES
from checkmate.backends.tensor_state import differing
from checkmate.demo.training import peak_of_step, train


def rows(name: str, threads: int, shares: list[float], pairs: int, time_limit: float) -> Iterator[Row]:
    """Measure one network at each share."""
    case = CASES[name]
    torch.set_num_threads(threads)
    module, plain, batch = case.make(0)
    problem = checkmate.trace(plain, *batch)
    lowest, keep_all = checkmate.min_budget(problem).peak, problem.keep_all_peak
    plain_peak = problem.resident + peak_of_step(module, plain, batch)
    expected = train(*case.make(0)[:2], [batch] * 3)
    for share in shares:
        module, plain, batch = case.make(0)
        budget = budget_at(share, lowest, keep_all)
        compiled = checkmate.compile(plain, budget=budget, time_limit=time_limit, wait="best")
        row: Row = {"model": name, "ops": len(problem.graph.ops), "threads": threads, "share": share, "budget": budget}
        row |= {"min_budget": lowest, "keep_all_peak": keep_all, "plain_peak": plain_peak}
        began = time.perf_counter()
        with nothing_on_disk():
            found = train(module, compiled, [batch] * 3)
        row |= {"first_three_steps_seconds": time.perf_counter() - began, "bitwise": not differing(found, expected)}
        solution = compiled.plans[0]
        measured = solution.problem.resident + peak_of_step(module, compiled, batch)
        row |= {"predicted_peak": solution.peak, "measured_peak": measured, "resident": problem.resident}
        row |= plan_facts(solution)
        theirs, ours, ratio = paired_times(module, plain, compiled, batch, pairs)
        yield {**row, "plain_seconds": theirs, "compiled_seconds": ours, "time_ratio": ratio, "pairs": pairs}


BENCHMARK = Benchmark(
    __doc__,
    "step.jsonl",
    rows,
    {
        "network": "{model}",
        "threads": "{threads}",
        "share": "{share:g}",
        "budget": "{budget:_}",
        "predicted": "{predicted_peak:_}",
        "measured": "{measured_peak:_}",
        "recomputed": "{overhead:.1%}",
        "gap": "{gap:.1%}",
        "of plain": "{time_ratio:.3f}x",
        "plan": "{plan_seconds:.1f} s",
        "bits": lambda row: "same" if row["bitwise"] else "DIFFER",
    },
    names=CASES,
    options={
        "threads": ((1, 2), "of PyTorch"),
        "shares": ([0.0, 0.25, 0.5, 0.75, 1.0, 2.0], "of the way from the smallest budget to keeping everything"),
        "pairs": (30, "of timed steps"),
        "time_limit": (60.0, "seconds to plan for one budget"),
    },
    quick={
        "names": ["mlp", "resnet18", "gpt2-sdpa"],
        "threads": [1],
        "shares": [0.25, 0.75, 2.0],
        "pairs": 6,
        "time_limit": 5.0,
    },
)

if __name__ == "__main__":
    BENCHMARK.run()
