"""A sharded step planned as one: Llama-3 8B on one of 64 GPUs, beside what trainers choose by switches.

    python -m benchmarks.sharded ["auto"] [POLICY ...] [--link NVLink] [--budget 24 32] [--time-limit 60]
    python -m benchmarks.sharded --report     # from the rows: results/sharded.md

The step is of `benchmarks/sharded/graph.py`: forward, loss and backward; the policies are those of
`benchmarks/sharded/policies.py`. A link carries all collectives beside the processor's ops: NVLink, which joins all
ranks, or a network. A gather is started before it is needed, and what sums gradients is waited for after the backward
went on. A gather and the casts of the shard before it are one op of the link. The policies' collectives are started and
waited for as those of plans are (`checkmate/solvers/search/overlap.py`), with all the bytes that this takes. A
peak counts everything that is there but an optimizer: the rank's shards of the parameters, 0.5 GB, gathered parameters,
activations, and gradients before and after they are scattered. Steps are beyond one that runs each op once, one after
another: what is below zero is hidden beside the processor's ops. Each case is a process of its own, on one thread;
seconds, those of the limit too, are the ones that the process computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.rows import Row, latest
from benchmarks.common.runner import Benchmark, document, where_from
from benchmarks.sharded import graph
from benchmarks.sharded.policies import POLICIES, runs_of
from benchmarks.solve.comparison import ONE_THREAD, figures
from checkmate.core import simulator
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem, Profile
from checkmate.core.timing import timing
from checkmate.solvers.common.schedules import lowered
from checkmate.solvers.search.overlap import place_starts
from checkmate.solvers.solve import solve

AUTO = "auto"
GB = 10**9
BUDGETS = (24.0, 32.0, 40.0, 48.0, 80.0)  # GB
RANKS = "ranks"
STEP = "{cost_ratio:beyond}|{status}"


def beside(problem: Problem) -> Problem:
    """The problem whose collectives a link carries; the gather of a parameter has its casts within."""
    old, seconds, workspace = problem.graph, problem.seconds.copy(), problem.workspace.copy()
    casts, reads = set[int](), dict[int, tuple[int, ...]]()
    for k, op in enumerate(old.ops):
        if graph.ALL_GATHER in op.target and op.pinned is None:
            inputs = op.inputs
            while (cast := old.values[inputs[0]].producer) is not None:
                casts.add(cast)
                seconds[k] += seconds[cast]
                workspace[k] += old.values[inputs[0]].size_bytes
                inputs = old.ops[cast].inputs
            reads[k] = inputs
    kept = [k for k in range(len(old.ops)) if k not in casts]
    values = [v for v, value in enumerate(old.values) if value.producer not in casts]
    op_at: dict[int | None, int | None] = {None: None, **{k: i for i, k in enumerate(kept)}}
    value_at = {v: i for i, v in enumerate(values)}
    ops = []
    for k in kept:
        op = old.ops[k]
        made, read_by = (tuple(value_at[v] for v in of) for of in (op.outputs, reads.get(k, op.inputs)))
        ops.append(replace(op, inputs=read_by, outputs=made, link=RANKS if graph.is_collective(op) else ""))
    moved = (replace(old.values[v], producer=op_at[old.values[v].producer]) for v in values)
    new = Graph(tuple(ops), tuple(moved), tuple(value_at[v] for v in old.outputs))
    return Problem(new, Profile(seconds[kept], workspace[kept], problem.resident, problem.profile.source))


def rows_of(name: str, link: str, budget: float, time_limit: float) -> Iterator[Row]:
    """A plan within a budget; or a policy."""
    problem = beside(graph.read(reach=graph.link(link)))
    row: Row = {"link": link, "method": name, "keep_all_seconds": problem.keep_all_cost}
    if name == AUTO:
        count_own_seconds()
        solution = solve(problem, int(budget * GB), time_limit=time_limit, progress=False)
        yield {**row, "time_limit": time_limit, **figures(solution), "waited": solution.waited}
        return
    plan = place_starts(problem, problem.keep_all_peak, lowered(problem, runs_of(problem, name)))
    assert not simulator.check_plan(plan, problem, problem.keep_all_peak)
    seconds, peak = timing(plan, problem), simulator.simulate(plan, problem).peak
    ratio = seconds.seconds / problem.keep_all_cost
    yield {**row, "ops": len(problem.graph.ops), "cost_ratio": ratio, "peak": peak, "waited": seconds.waited}


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The last row of each link, policy and budget."""
    found = latest([{"budget": None, **row} for row in rows], "link", "method", "budget")
    methods = [*POLICIES, AUTO]
    return sorted(found, key=lambda r: ([*graph.LINKS].index(r["link"]), methods.index(r["method"]), r["budget"] or 0))


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line that says where the rows are from."""
    rows = in_order(rows)
    once = ", ".join(dict.fromkeys(f"{row['keep_all_seconds']:.3f} s ({row['link']})" for row in rows))
    return document(
        "Llama-3 8B on 64 GPUs",
        f"Made by `python -m benchmarks.sharded` at {where_from(rows)}, one thread; seconds are those that the "
        f"process computed. Each op once, one after another, takes {once}: steps, bounds and what is waited for "
        "are beside that. Peaks count all that is there but optimizers.",
        BENCHMARK.table(rows),
    )


BENCHMARK = Benchmark(
    __doc__,
    "sharded.jsonl",
    rows_of,
    {
        "link": "{link}",
        "method": "{method}",
        "budget": "{budget:bytes}",
        "peak": "{peak:bytes}",
        "step": STEP,
        "bound": "{bound_ratio:beyond}",
        "gap": "{gap:.2%}",
        "waited": lambda row: f"{row['waited'] / row['keep_all_seconds']:.2%}",
        "seconds": "{seconds:.1f} s",
    },
    names=(AUTO, *POLICIES),
    options={
        "link": ((*graph.LINKS,), "between the ranks"),
        "budget": ({AUTO: BUDGETS, **dict.fromkeys(POLICIES, (0.0,))}, "GB, of auto"),
        "time_limit": (60.0, "seconds for each solve"),
    },
    packages=("numpy", "scipy", "highspy"),
    environment=ONE_THREAD,
    page=markdown,
)
