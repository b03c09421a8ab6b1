"""Worth of each stage of `auto`: each is left out in turn, on six graphs, at a roomy and at a tight budget.

    python -m benchmarks.solve.stages [GRAPH ...] [--time-limit 5]
    python -m benchmarks.solve.stages resnet50 --share 0.1919 0.207 --time-limit 60     # near the smallest budget
    python -m benchmarks.solve.stages --report     # from the rows: results/stages.md

Each solve is a process of its own, on one thread, on Linux. Seconds, those of the limit too, are the ones that it
computes, so that other work on the machine does not count. The stage "known" is not among them: it does something only
where a plan is given to begin with.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.solve.comparison import FILES, ONE_THREAD, figures, load
from checkmate.core.answer import Table
from checkmate.solvers.auto import STAGES
from checkmate.solvers.solve import solve

SHARES = {  # of the peak of keeping everything; the second is close to the smallest budget
    "chain-16": (6 / 18, 4 / 18),
    "vgg16": (0.7, 0.63),
    "unet": (0.5, 0.3),
    "mobilenetv2": (0.5, 0.3),
    "vit-b16": (0.5, 0.3),
    "gpt2-12": (0.5, 0.32),
}
LEFT_OUT = ("", *(stage.name for stage in STAGES if stage.name != "known"))  # "": none
WORSE = 1e-4  # of the step: a smaller difference is within the gap that is asked for
HEADER = ("left out", "dearer", "cheaper", "wider gap", "narrower gap", "first plan", "seconds")
Case = tuple[str, float, float]  # graph, share, time limit


def rows_of(name: str, share: float, without: str, time_limit: float) -> list[Row]:
    """Solve in this process, in seconds that it computes."""
    count_own_seconds()
    problem, budget = load(name), int(share * load(name).keep_all_peak)
    solution = solve(problem, budget, time_limit=time_limit, without=[without] if without else [], progress=False)
    return [{"graph": name, "share": share, "without": without, "time_limit": time_limit, **figures(solution)}]


def latest(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """For each graph, share and time limit the last row of each stage that was left out."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["graph"], row["share"], row["time_limit"]), {})[row["without"]] = row
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Of each time limit a table of the stages; one of all cases, and a line that says where the rows are from."""
    found = latest(rows)
    limits_of_stages = ", ".join(f"{s.name}: up to {s.most_ops} ops" for s in STAGES if s.most_ops < float("inf"))
    parts: list[str | Table] = []
    for limit in sorted({limit for _, _, limit in found}):
        of = {case: by_stage for case, by_stage in found.items() if case[2] == limit}
        left_out = [stage for stage in LEFT_OUT[1:] if all(stage in by_stage for by_stage in of.values())]
        parts += [f"{len(of)} cases within {limit:g} seconds each:"]
        parts += [Table(HEADER, [_worth(of, stage) for stage in left_out], HEADER[1:])]
    return document(
        "What each stage of auto is worth",
        f"Made by `python -m benchmarks.solve.stages` at {where_from(rows)}, one thread; seconds are those that the "
        "process computed, as the machine was busy with other work. Of all cases, each a graph and a budget: in how "
        "many the step is dearer or cheaper than with all stages, or the gap wider or narrower, by more than 0.01% of "
        "the step, and by how much at most; then the seconds up to the first plan, and in all: medians, divided by "
        "those with all stages. No plan counts as a gap of 100%.",
        f"Some stages look at small graphs only ({limits_of_stages}): on larger ones their rows differ from those with "
        "all stages by luck alone, of what is done last in the time.",
        *parts,
        "All cases: the budget is a share of the peak of keeping everything.",
        BENCHMARK.table(by_stage[stage] for by_stage in found.values() for stage in LEFT_OUT if stage in by_stage),
    )


def _worth(found: dict[Case, dict[str, Row]], stage: str) -> list[str]:
    """A row of the first table."""

    def or_else(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    def counted(key: str, without_plan: float, sign: int) -> str:
        """How many differences of this sign count, and the largest."""
        values = ([or_else(row[key], without_plan) for row in pair] for pair in pairs)
        differences = [sign * (without - with_all) for with_all, without in values]
        large = [difference for difference in differences if difference > WORSE]
        most = max(large, default=0.0)
        return f"{len(large)} ({'no plan' if most == float('inf') else f'{most:.2%}'})" if large else "–"

    pairs = [(by_stage[""], by_stage[stage]) for by_stage in found.values()]
    firsts = ([or_else(row["first_plan_seconds"], row["seconds"]) for row in pair] for pair in pairs)
    first = statistics.median(without / with_all for with_all, without in firsts)
    seconds = statistics.median(without["seconds"] / with_all["seconds"] for with_all, without in pairs)
    costs = [counted("cost_ratio", float("inf"), sign) for sign in (1, -1)]
    return [stage, *costs, *(counted("gap", 1.0, sign) for sign in (1, -1)), f"{first:.2f}", f"{seconds:.2f}"]


BENCHMARK = Benchmark(
    __doc__,
    "stages.jsonl",
    rows_of,
    {
        "graph": "{graph}",
        "ops": "{ops}",
        "budget": "{share:.0%}",
        "left out": lambda row: row["without"] or "none",
        "recomputed": "{cost_ratio:beyond}|{status}",
        "gap": "{gap:.2%}|100.00%",
        "first plan": "{first_plan_seconds:.2f} s|{seconds:.2f} s",
        "seconds": "{seconds:.1f} s",
    },
    names=(*SHARES, *(name for name in FILES if name not in SHARES)),
    default=(*SHARES,),
    options={
        "share": (SHARES, "of the peak of keeping everything"),
        "without": (LEFT_OUT, "which stage is left out"),
        "time_limit": (5.0, "seconds for each solve"),
    },
    environment=ONE_THREAD,
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
