"""A file as the second memory, measured: a network at the smallest budget of recomputation alone, with and without it.

    python -m benchmarks.second_memory.measured [NETWORK ...] [--where file:/dev/shm file:] [--rounds N]
    python -m benchmarks.second_memory.measured --report     # from the rows: results/second_memory_measured.md

Networks are those of `make bench`, on one thread. Steps of all ways and a plain one are run in turn, and the time of
each is divided by the plain one's of the same round; the median counts. Bits and peak are compared with plain PyTorch
by `checkmate.verify`. One row for each network and way goes to `benchmarks/results/second_memory_measured.jsonl`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import checkmate
from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.common.timing import seconds_in_turn, step_and_back
from benchmarks.peers.subjects import NETWORKS, Subject
from checkmate.core.timing import timing
from checkmate.solvers.search.min_budget import ends_of

ALONE = "recomputation"
WHERE = ("file:/dev/shm", "file:")
HOST_BUDGET = 2 * 10**9  # bytes
TIME_LIMIT = 20.0  # seconds to plan


def rows_of(name: str, where: Sequence[str], rounds: int) -> Iterator[Row]:
    """Measure a network without a second memory, and with each."""
    torch.set_num_threads(1)
    subject = Subject.of(NETWORKS[name], torch.device("cpu"))
    budget = ends_of(checkmate.trace(subject.plain, *subject.batch)).peak
    with_host = {way: {"host": way, "host_budget": HOST_BUDGET} for way in where}
    asked: dict[str, dict[str, Any]] = {ALONE: {}, **with_host}
    options: dict[str, Any] = {"budget": budget, "time_limit": TIME_LIMIT}
    steps = {way: checkmate.compile(subject.plain, wait="best", **options, **about) for way, about in asked.items()}
    timed: dict[str, Any] = {"plain": subject.plain, **steps}
    runs = {way: partial(step_and_back, subject.module, step, subject.batch) for way, step in timed.items()}
    seconds_in_turn(runs, 0)  # plans
    times = seconds_in_turn(runs, rounds, subject.module.zero_grad)
    for way, about in asked.items():
        report = checkmate.verify(subject.plain, *subject.batch, **options, **about)
        plan = steps[way].plans[0]
        assert plan.plan is not None
        there = [t for t in timing(plan.plan, plan.problem).transfers if not t.back]
        ratios = [ours / plain for ours, plain in zip(times[way], times["plain"], strict=True)]
        row: Row = {"network": name, "budget": budget, "way": way, "time_ratio": statistics.median(ratios)}
        row |= {"planned_ratio": plan.cost / plan.problem.keep_all_cost, "predicted_peak": plan.peak}
        row |= {"peak": report.measured_peak, "same_bits": report.repeats, "ratios": ratios}
        row |= {"sent": sum(int(plan.problem.sizes[t.value]) for t in there), "values": len(there)}
        row |= {"rates": None if plan.problem.host is None else str(plan.problem.host), "rounds": rounds}
        yield row


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    last = latest(rows, "network", "way")
    return document(
        "A file as the second memory",
        f"Made by `python -m benchmarks.second_memory.measured` at {where_from(rows)}, one thread: each network "
        "at the smallest budget for which a plan of recomputation alone is known. Times are medians of interleaved "
        "steps.",
        BENCHMARK.table(last),
    )


BENCHMARK = Benchmark(
    __doc__,
    "second_memory_measured.jsonl",
    rows_of,
    {
        "network": "{network}",
        "budget": "{budget:bytes}",
        "way": "{way}",
        "step / plain": "{time_ratio:.2f}",
        "planned": "{planned_ratio:.2f}",
        "peak": "{peak:bytes}",
        "there": "{rates}",
        "sent": "{sent:bytes}",
        "numbers": lambda row: "same bits" if row["same_bits"] else "other bits",
    },
    names=tuple(NETWORKS),
    default=("gpt2",),
    options={
        "where": ([*WHERE], "second memories, as compile(host=) takes them"),
        "rounds": (15, "of timed steps"),
    },
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
