"""Plans beside links: against all plans there are of small steps, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import checkmate
from checkmate import Graph, Op, Plan, Problem, Profile, Value, solve
from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints
from checkmate.core.plan import Free, Run, Start
from checkmate.core.schedule import run_at_once
from checkmate.core.timing import timing, walk
from checkmate.errors import CheckmateError
from checkmate.look.timeline import timeline
from checkmate.solvers.catalogue import METHODS
from checkmate.solvers.search.overlap import Exposed
from tests.solvers.checks import wrong
from tests.support.all_plans import added, cheapest_plan, random_chain_split_over_ranks, random_chain_with_links
from tests.support.sampling import in_turn, slow

SLACK = 1 + 1e-6  # of floats
FARTHEST = 1.16  # times the seconds of the cheapest plan there is: what plans of 60 small steps took at most


def layers(count: int, *, seconds: float, gathering: float) -> Problem:
    """Layers whose parameters are gathered, and whose gradients are summed over ranks, each in so many seconds."""
    ops, values = list[Op](), [Value(f"shard{i}", 2, None, "parameter") for i in range(count)]

    def add(name: str, reads: list[int], size: int, phase: str, link: str = "") -> int:
        return added(ops, values, name, reads, size, phase, link)

    made, gathered, results = list[int](), list[int](), list[int]()
    for i in range(count):
        gathered.append(add(f"gather{i}", [i], 16, "forward", "ranks"))
        made.append(add(f"layer{i}", [*made[-1:], gathered[-1]], 10, "forward"))
    gradient = made[-1]
    for i in reversed(range(count)):
        of_weight = add(f"of_weight{i}", [gradient, *(made[i - 1 : i] if i else ())], 16, "backward")
        results.append(add(f"sum{i}", [of_weight], 2, "backward", "ranks"))
        if i:
            gradient = add(f"of_input{i}", [gradient, gathered[i]], 10, "backward")
    took = [gathering if op.link else seconds for op in ops]
    return Problem(Graph(tuple(ops), tuple(values), tuple(results)), Profile(took, [0] * len(ops)))


@in_turn(seed=[0, 2, 4, 15, 22, slow(1), slow(3), slow(6), slow(8), slow(9), slow(24), slow(41)])
def test_plans_and_bounds_beside_all_plans_there_are(seed: int) -> None:
    """The best of all plans passes the checker; what is proven is not above it, what is found is not far from it."""
    problem = random_chain_with_links(seed)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak + 6
    for budget in sorted({low, (low + high) // 2, high}):
        seconds, plan = cheapest_plan(problem, budget)
        found = solve(problem, budget, time_limit=0.5, progress=False)
        if plan is None:
            assert found.plan is None
            continue
        assert (wrong(problem, plan, budget), simulator.cost(plan, problem)) == ([], pytest.approx(seconds))
        assert max(found.bound, Exposed.of(problem).bound) <= seconds * SLACK
        assert seconds / SLACK <= found.cost <= seconds * FARTHEST
        at_once, peak = run_at_once(plan, problem.graph), simulator.simulate(plan, problem).peak
        assert (at_once.started, wrong(problem, at_once, budget)) == (False, [])
        assert simulator.simulate(at_once, problem).peak <= peak
        line = timeline(plan, problem)
        np.testing.assert_array_equal(sum(line.by_role().values()), line.bytes)
        assert line.peak == peak


@in_turn(seed=[11, 29, *(slow(seed) for seed in range(60, 80))])
def test_what_nothing_hides_comes_on_top_of_the_processor(seed: int) -> None:
    """It does in the cheapest of all plans, too, and where something is made again last for an op of no seconds."""
    problem = random_chain_with_links(seed)
    exposed, low = Exposed.of(problem), int(problem.unavoidable_bytes.max())
    for budget in (low, low + 1, low + 3, low + 6):
        seconds, plan = cheapest_plan(problem, budget)
        runs = () if plan is None else plan.runs
        of_processor = sum(problem.seconds[k] for k in runs if not problem.graph.ops[k].link)
        assert of_processor + exposed.seconds <= seconds * SLACK


@in_turn(seed=[*range(6), *(slow(seed) for seed in range(6, 20))])
def test_sums_that_layers_wait_for_are_proven_to_be_waited_for(seed: int) -> None:
    """Nothing that the next layer waits for hides where layers are split over ranks, unless beside another op."""
    problem = random_chain_split_over_ranks(seed)
    seconds, plan = cheapest_plan(problem, problem.keep_all_peak + 8)
    assert wrong(problem, plan, problem.keep_all_peak + 8) == []
    assert Exposed.of(problem).bound == pytest.approx(seconds)
    low = int(problem.unavoidable_bytes.max())
    for budget in range(low, low + 4):
        seconds, _ = cheapest_plan(problem, budget)
        found = solve(problem, budget, time_limit=0.5, progress=False)
        assert found.bound / SLACK <= seconds <= found.cost * SLACK


def test_gathers_hide_beside_layers() -> None:
    """All but the first gather and the last sum run beside layers, and that is proven to be the best."""
    problem = layers(6, seconds=1.0, gathering=0.5)
    of_processor = 6 + 6 + 5
    for share in (1.0, 0.7):
        found = solve(problem, int(share * problem.keep_all_peak), time_limit=5, progress=False)
        assert found.cost == pytest.approx(of_processor + 0.5 + 0.5)
        assert found.status is checkmate.Status.OPTIMAL
        assert found.overhead < 0
        assert any(isinstance(step, Start) for step in found.plan.steps)
        assert found.peak <= found.budget
    assert problem.keep_all_cost == of_processor + 12 * 0.5
    assert found.waited == pytest.approx(1.0)
    assert "links carry" in str(found)
    problem = layers(4, seconds=1.0, gathering=4.0)  # where the link takes longer, nothing is gathered again
    found = solve(problem, problem.keep_all_peak, time_limit=1, progress=False)
    assert np.bincount(found.plan.runs).max() == 1
    assert found.bound >= 8 * 4.0  # the link alone


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.needs_host])
def test_every_method_overlaps_its_plan(method: str) -> None:
    problem = layers(3, seconds=1.0, gathering=0.5)
    found = solve(problem, problem.keep_all_peak, method=method, time_limit=5, progress=False)
    if found.plan is None:
        assert method in ("chen-sqrt", "chen-greedy", "griewank", "rotor"), found.message  # for chains
        return
    one_by_one = sum(problem.seconds[k] for k in found.plan.runs)
    assert found.cost < one_by_one or (found.cost == one_by_one and method == "last-node")
    assert simulator.check_plan(found.plan, problem, found.budget) == []
    assert found.bound <= found.cost


def by_hand() -> Problem:
    """An op, one of a link that reads a parameter, one that reads both and writes over the parameter; a sum of it."""
    ops = (
        Op("a", "f", (), (1,)),
        Op("gather", "f", (0,), (2,), link="ranks"),
        Op("b", "f", (1, 2), (3,)),
        Op("sum", "f", (3,), (4,), "backward", "sums over ranks", link="ranks"),
        Op("c", "f", (1,), (5,), "backward"),
        Op("update", "f", (0, 4), (), "backward", "overwrites w", overwrites=(0,)),
    )
    values = (Value("w", 1, None, "parameter"), *(Value(f"v{k}", 2**k, k) for k in range(5)))
    return Problem(Graph(ops, values, (5,)), Profile([1.0, 2.0, 3.0, 4.0, 5.0, 0.0], [0, 32, 0, 0, 0, 0]))


GOOD = (Start(1), Run(0), Run(1), Run(2), Free(2), Start(3), Run(4), Run(3), Free(3), Free(1), Run(5), Free(4))


def test_bytes_and_seconds_by_hand() -> None:
    problem, plan = by_hand(), Plan(GOOD, 5)
    assert simulator.check_plan(plan, problem, 35) == []
    assert [event.device_bytes for event in walk(plan, problem)] == [34, 35, 35, 7, 5, 13, 29, 29, 25, 24, 24, 16]
    assert [event.at for event in walk(plan, problem)] == [0, 0, 1, 2, 5, 5, 5, 10, 10, 10, 10, 10]
    assert simulator.simulate(plan, problem).bytes_at == (35, 35, 13, 29, 29, 24)
    assert timing(plan, problem).stalls == ((2, 1.0),)
    assert simulator.cost(plan, problem) == 10.0
    assert simulator.cost(run_at_once(plan, problem.graph), problem) == 15.0


FAULTS = {
    "starts b, which no link carries": (*GOOD[:3], Start(2), *GOOD[3:]),
    "starts gather, which is under way": (Start(1), *GOOD),
    "starts gather, which has made what is at hand": (*GOOD[:4], Start(1), Run(1), *GOOD[4:]),
    "starts sum without its input v2": (*GOOD[:3], Start(3), *GOOD[3:5], *GOOD[6:]),
    "runs c before sum": (Run(0), Run(1), Run(2), Free(2), Run(4), Run(3), Free(3), Free(1), Run(5), Free(4)),
    "runs gather before a": (Start(1), Run(1), Run(0), *GOOD[3:]),
    "touches v2 while sum is under way": (*GOOD[:6], Free(3), *GOOD[6:8], *GOOD[9:]),
    "touches v1 while gather is under way": (*GOOD[:2], Free(2), *GOOD[2:4], *GOOD[5:]),
    "gather is under way when the backward begins": (*GOOD[:4], Start(1), *GOOD[5:]),
    "touches w while gather is under way": (*GOOD[:8], Start(1), Free(3), Free(1), Run(5), Run(1), Free(2), Free(4)),
    "starts gather after update has overwritten w": (*GOOD[:11], Start(1), Run(1), Free(2), Free(4)),
    "sum is under way when the step ends": (*GOOD[:7], *GOOD[9:]),
}


@in_turn(said=FAULTS)
def test_every_fault_of_a_start_is_named(said: str) -> None:
    """Each plan breaks one rule, at least; what it says of that is among what the checker says."""
    assert any(said in fault for fault in simulator.check_plan(Plan(FAULTS[said], 5), by_hand()))


def test_links_are_part_of_what_a_step_costs(tmp_path: Path) -> None:
    """Links travel in the files of problems and plans."""
    problem = layers(2, seconds=1.0, gathering=0.5)
    alone = replace(problem, graph=problem.graph.without_links())
    assert fingerprints(problem).structure == fingerprints(alone).structure
    assert fingerprints(problem).costs != fingerprints(alone).costs
    assert (problem.least_cost, alone.least_cost) == (5.0, 7.0)
    problem.to_json(tmp_path / "links.json")
    read = Problem.from_json(tmp_path / "links.json")
    assert read.graph == problem.graph
    plan = solve(read, read.keep_all_peak, progress=False).plan
    assert Plan.from_lists(plan.as_lists(), plan.boundary) == plan
    assert "start" in str(plan)


def test_a_known_plan_is_begun_with() -> None:
    problem = layers(4, seconds=1.0, gathering=0.5)
    first = solve(problem, problem.keep_all_peak, progress=False)
    again = solve(problem, problem.keep_all_peak, start=first, progress=False)
    assert again.cost == first.cost
    with pytest.raises(CheckmateError):
        solve(problem, 0, progress=False)
