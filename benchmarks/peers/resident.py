"""Memory that each way of the comparison takes of the machine, from before its model is made, in a process of its own.

    python -m benchmarks.peers.resident [NETWORK ...]

What malloc holds depends on all that a process did before, so that each way is made anew in a process that does nothing
else, and trains there (`benchmarks.common.resident`). Ours plan again for the same budget, and run in an arena. A row
of `benchmarks/results/peers_resident.jsonl` belongs to those of the comparison that allocate the very same. Linux, on
the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.resident import most_above, status, warm_up
from benchmarks.common.rows import Row, read
from benchmarks.common.runner import RESULTS, Benchmark
from benchmarks.common.timing import step_and_back
from benchmarks.peers.report import KEY, PEERS, latest, same_bits
from benchmarks.peers.settings import EAGER, OURS, named
from benchmarks.peers.subjects import NETWORKS, Subject, networks_at
from checkmate.memory import native

FAMILIES = (EAGER.family, *PEERS, OURS)
WHERE = "benchmarks.peers.subjects:NETWORKS"
ASKED = ("model", "family", "knob", "budget", "time_limit", "threads")


def chosen(rows: Iterable[Row]) -> list[Row]:
    """Choose a network's rows with the bits of plain PyTorch, and the lowest of each family, whatever its numbers.

    Several with the same allocations one by one are measured once, as the first.
    """
    worked = [row for row in rows if row["family"] in FAMILIES and row.get("fingerprint")]
    lowest = {row["family"]: row["peak"] for row in sorted(worked, key=lambda row: -row["peak"])}
    able = [row for row in worked if same_bits(row) or row["peak"] == lowest[row["family"]]]
    return list({tuple(row[key] for key in KEY): row for row in reversed(able)}.values())[::-1]


def measure(rows: Sequence[Row], report: Callable[[str], None], where: str = WHERE) -> Iterable[Row]:
    """For each chosen row what the process takes, or the error that ended it.

    Args:
        rows: of the comparison.
        report: is told what is done.
        where: a dict of networks by name, as another process finds it: ``module:name``.
    """
    for row in chosen(rows):
        try:
            (found,) = apart(partial(one, {"where": where, **{key: row[key] for key in ASKED}}))
        except EndedEarly as end:
            found = {"error": str(end)[:200]}
        report(f"{row['family']} {row['knob']}: {found}")
        yield {key: row[key] for key in dict.fromkeys([*KEY, *ASKED])} | {"resident": row["resident"], **found}


def one(asked: Row) -> list[Row]:
    """Train one way in this process, and say how far the peak of its steps is above what there was before the model."""
    torch.set_num_threads(asked["threads"])
    native.start()
    failure, level = native.wait(), status("VmRSS")
    subject = Subject.of(networks_at(asked["where"])[asked["model"]], torch.device("cpu"))
    setting = named(subject, asked["family"], asked["knob"], asked["budget"], asked["time_limit"])
    with setting.config():
        step: Any = setting.build(subject)
        run = partial(step_and_back, subject.module, step, subject.batch)
        if setting.family == OURS and failure is not None:
            sys.exit(f"No arena: {failure}.")
        warm_up(run)
        found = {"process": most_above(level, run)}  # what making and planning the step left behind counts
        if setting.family == OURS:
            plan, use = step.plans[0], step.memory().rows[0]
            found |= {"planned_bytes": plan.peak - plan.problem.resident}
            found |= {"arena_bytes": use.arena, "fallbacks": use.fallbacks}
        return [found]


def rows_of(name: str, rows: str) -> Iterator[Row]:
    """Measure what the last rows of a network have."""
    yield from measure(latest(read(RESULTS / rows))[name], partial(print, f"{name}:", file=sys.stderr, flush=True))


BENCHMARK = Benchmark(
    __doc__,
    "peers_resident.jsonl",
    rows_of,
    {"network": "{model}", "way": "{family}", "knob": "{knob}", "process": "{process:_}|{error}"},
    names=NETWORKS,
    options={"rows": ("peers.jsonl", "of the comparison, in benchmarks/results")},
)

if __name__ == "__main__":
    BENCHMARK.run()
