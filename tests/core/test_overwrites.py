"""Ops that overwrite what is there before the step begins: what graphs, plans, counts and files say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Free, Plan, Run
from checkmate.core.problem import Problem
from checkmate.core.rules import with_rules
from checkmate.errors import InvalidProblem, RuleError
from tests.support.by_hand import schedule_of
from tests.support.oracle import all_schedules, random_problem_with_overwrites
from tests.support.paper_equations import violations
from tests.support.sampling import in_turn, long

# ops 0 and 1 read a parameter that op 2 overwrites; op 3 reads what op 0 makes, and the new content
DAG = [[], [0], [1], [0]], [1] * 4, [8, 4, 0, 2]
CHAIN = Problem.from_dag(*DAG, forward=2, outputs=[3], overwrites={2: [0, 1, 3]})


def _graph(**changes: object) -> Graph:
    values = Value("p", 4, None, "parameter"), Value("a", 4, 0)
    ops = Op("read", "f", (0,), (1,)), Op("update", "f", (0, 1), (), pinned="overwrites p", overwrites=(0,))
    return Graph((ops[0], replace(ops[1], **changes)), values, (1,))


def test_what_overwrites_is_checked() -> None:
    assert _graph().overwritten_by == {0: 1}
    for changes, says in (
        ({"overwrites": (9,)}, "overwrites value 9, but there are 2"),
        ({"overwrites": (1,)}, "overwrites 'a', which an op makes"),
        ({"pinned": None}, "'update' overwrites 'p', so it must be pinned"),
        ({"overwrites": (0, 0)}, "'update' and 'update' both overwrite 'p'"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            _graph(**changes)


def test_no_op_runs_after_what_it_reads_is_overwritten() -> None:
    graph = CHAIN.graph
    assert graph.in_order([0, 1, 2, 3]).overwritten_by == graph.overwritten_by
    with pytest.raises(InvalidProblem, match=r"'op3' reads 'p2', which 'op2' overwrites, and would change sides"):
        graph.in_order([0, 1, 3, 2])
    assert CHAIN.limits.last_stage == {0: 2, 1: 2}
    again = Plan((Run(0), Run(1), Free(0), Run(2), Free(1), Free(2), Run(0), Run(3), Free(0)), 3)
    says = "step 6 runs op0 after op2 has overwritten p2"
    assert simulator.check_plan(again, CHAIN) == [says]
    before = Plan((Run(0), Run(1), Free(0), Run(0), Run(2), Free(1), Free(2), Run(3), Run(3), Free(0)), 3)
    assert simulator.check_plan(before, CHAIN) == []  # and what reads the new content may run again
    broken = "overwritten: R[3, 0] = 1 though op2 has overwritten what it reads"
    assert violations(schedule_of(CHAIN, (3, 0)), CHAIN) == [broken]


def test_what_cannot_be_made_again_is_unavoidable() -> None:
    assert CHAIN.unavoidable_bytes.tolist() == [8, 12, 12, 10]  # op 0 may run just before op 2, but not after it
    free = replace(CHAIN, graph=replace(CHAIN.graph, ops=tuple(replace(op, overwrites=()) for op in CHAIN.graph.ops)))
    assert free.unavoidable_bytes.tolist() == [8, 12, 4, 10]


@in_turn(seed=[*range(2), *map(long, range(2, 4))])
def test_two_views_of_what_is_allowed(seed: int) -> None:
    problem = random_problem_with_overwrites(seed)
    seen = set()
    for schedule in all_schedules(problem):
        plan = simulator.lower(problem, schedule)
        faults = simulator.check_plan(plan, problem)
        assert bool(faults) == bool(violations(schedule, problem))
        seen.add(any("has overwritten" in fault for fault in faults))
        if not faults:
            usage = simulator.simulate(plan, problem)
            first = np.array([usage.bytes_at[usage.ops.index(k)] for k in range(len(problem.graph.ops))])
            assert (first >= problem.unavoidable_bytes).all()
    assert seen == {False, True}


def test_it_travels_in_files_and_counts_as_structure(tmp_path: Path) -> None:
    CHAIN.to_json(tmp_path / "chain.json")
    read = Problem.from_json(tmp_path / "chain.json")
    assert read.graph == CHAIN.graph
    assert '"version": 4' in (tmp_path / "chain.json").read_text()
    plain, elsewhere = (Problem.from_dag(*DAG, forward=2, outputs=[3], overwrites=over) for over in ({}, {2: [0, 3]}))
    plain.to_json(tmp_path / "plain.json")
    assert "overwrites" not in (tmp_path / "plain.json").read_text()
    assert fingerprints(read) == fingerprints(CHAIN)
    assert len({fingerprints(one).structure for one in (CHAIN, plain, elsewhere)}) == 3


def test_a_rule_does_not_ask_for_what_is_overwritten_in_the_forward() -> None:
    deps, seconds, sizes = [[], [0], [1], [0, 2]], [1] * 4, [4] * 4
    early = Problem.from_dag(deps, seconds, sizes, forward=3, overwrites={1: [0]})
    exempt = (0, "reads what op1 overwrites in the forward"), (1, "overwrites p1")
    assert with_rules(early, {"op": "recompute"}).rules[0].exempt[:2] == exempt
    late = Problem.from_dag(deps, seconds, sizes, forward=2, overwrites={2: [0, 1]})
    assert with_rules(late, {"op": "recompute"}).limits.recomputed == {0, 1}
    none = Problem.from_dag([[], [0], [1]], [1] * 3, [4] * 3, forward=2, overwrites={1: [0]})
    with pytest.raises(RuleError, match="op0 reads what op1 overwrites in the forward"):
        with_rules(none, {"op": "recompute"})
