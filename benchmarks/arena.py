"""Memory that the machine gives a step, in an arena and by PyTorch's allocator: one row for each network and budget.

    python -m benchmarks.arena [NETWORK ...] [--share 0.9 0.6] [--threads 1]

Growth is that of the peak resident set over ten steps, in proportion to what the plan takes beyond what is resident.
So are the bytes of the arena: those that its first step touched, which finds its addresses as it goes, and its height
from then on; and what the first steps made the machine give beside it.
Before these steps no gradient is alive, garbage is collected, and malloc has given back what it keeps; so has the
arena, as another step has run. Plain PyTorch, the planned step by the allocator and that in the arena
take turns when they are timed. A share is of the bytes of keeping everything; below the smallest budget it is that.
The networks are those of the comparison with other ways to save memory, the demo's two, and one of few large values.
Linux only: it reads and resets what /proc says of this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import checkmate
from benchmarks.common.resident import growth
from benchmarks.common.rows import Column, Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import median_ratio, seconds_in_turn, step_and_back
from benchmarks.networks.batches import Made
from benchmarks.peers.subjects import NETWORKS, Subject
from checkmate.demo.training import Task, patterns_task, text_task
from checkmate.memory import native


def _compared(name: str) -> Made:
    subject = Subject.of(NETWORKS[name], torch.device("cpu"))
    return subject.module, subject.plain, subject.batch


def _of_the_demo(make: Callable[[int], Task]) -> Made:
    task = make(1)
    return *task.make(), task.batches[0]


def _wide() -> Made:
    """Each value has 67 MB, which malloc maps and faults anew at each step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    module = nn.Sequential(*layers)
    return module, lambda x: module(x).square().mean(), (torch.randn(65_536, 256),)


CASES: dict[str, Callable[[], Made]] = {
    **{name: partial(_compared, name) for name in NETWORKS},
    "demo-patterns": partial(_of_the_demo, patterns_task),
    "demo-text": partial(_of_the_demo, text_task),
    "wide": _wide,
}


def small_step() -> Callable[[], None]:
    """A step with an arena of its own: when it runs, that of another gives back its pages."""
    linear, x = nn.Linear(64, 64), torch.ones(64, 64)
    step = checkmate.compile(lambda x: linear(x).sum(), budget="10 MB", memory="arena")
    return lambda: step(x).backward()


def rows(name: str, threads: int, share: float, time_limit: float, rounds: int) -> Iterator[Row]:
    """Measure one network at one budget."""
    torch.set_num_threads(threads)
    module, plain, batch = CASES[name]()
    problem = checkmate.trace(plain, *batch)
    budget = max(checkmate.min_budget(problem).peak, int(share * problem.keep_all_peak))
    steps: dict[str, Any] = {"plain": plain}
    for memory in ("allocator", "arena"):
        steps[memory] = checkmate.compile(plain, budget=budget, time_limit=time_limit, memory=memory, wait="best")
    if (failure := native.wait()) is not None:
        raise SystemExit(f"No arena: {failure}.")
    runs = {kind: partial(step_and_back, module, step, batch) for kind, step in steps.items()}
    runs["arena"]()
    (first,) = steps["arena"].memory().rows
    runs["arena"]()
    while not steps["arena"].memory().rows[0].settled:  # lower addresses are looked for beside the training
        time.sleep(0.5)
        runs["arena"]()
    let_go = small_step()
    grown = {kind: growth(module, run, let_go) for kind, run in runs.items()}
    seconds = seconds_in_turn(runs, rounds, module.zero_grad)
    plan, (use,) = steps["arena"].plans[0], steps["arena"].memory().rows
    row: Row = {"model": name, "threads": threads, "share": share, "budget": budget, "rounds": rounds}
    row |= {"planned_bytes": plan.peak - plan.problem.resident, "live_peak": use.counted, "arena_bytes": use.arena}
    row |= {"first_bytes": first.resident, "outside_bytes": use.outside}
    row |= {"served": use.served, "fallbacks": use.fallbacks}
    row |= {f"{kind}_growth": grown[kind] for kind in steps}
    row |= {f"{kind}_seconds": statistics.median(seconds[kind]) for kind in steps}
    row["time_ratio"] = median_ratio(seconds["arena"], seconds["allocator"])
    row["plain_ratio"] = median_ratio(seconds["arena"], seconds["plain"])
    yield row


def _planned(key: str) -> Column:
    """Bytes in proportion to what the plan takes."""
    return lambda row: f"{row[key] / row['planned_bytes']:.3f}"


BENCHMARK = Benchmark(
    __doc__,
    "arena.jsonl",
    rows,
    {
        "network": "{model}",
        "threads": "{threads}",
        "share": "{share:g}",
        "planned": "{planned_bytes:_}",
        **{kind: _planned(f"{kind}_growth") for kind in ("plain", "allocator", "arena")},
        "first step": _planned("first_bytes"),
        "height": _planned("arena_bytes"),
        "outside": _planned("outside_bytes"),
        "fallbacks": "{fallbacks}",
        "time": "{time_ratio:.3f}x",
        "of plain": "{plain_ratio:.3f}x",
    },
    names=CASES,
    options={
        "threads": ((1,), "of PyTorch"),
        "share": ((0.9, 0.6), "of the bytes of keeping everything"),
        "time_limit": (15.0, "seconds to plan for one budget"),
        "rounds": (11, "of timed steps"),
    },
)

if __name__ == "__main__":
    BENCHMARK.run()
