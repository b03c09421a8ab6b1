"""The exact model against brute force, known optima and the traps of published implementations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.networks import dags
from checkmate import Graph, Op, Problem, Profile, Schedule, Status, Value, solve
from checkmate.core import simulator
from checkmate.core.inplace import InPlace
from checkmate.errors import SolverError
from checkmate.solvers.common.schedules import without_useless
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import FORMULATIONS, build, without_spare
from checkmate.solvers.linear.highs import Result, SolveStatus
from checkmate.solvers.linear.milp import export, relax
from checkmate.solvers.linear.model import NONE, Model
from tests.solvers.checks import by, runs, takes_less_than
from tests.support.oracle import (
    PLAIN_AND_WAYS,
    Make,
    interesting_budgets,
    optimum,
    outcomes,
    random_problem,
    random_problem_with_ways,
)
from tests.support.paper_equations import bytes_in_memory, peak
from tests.support.sampling import every, in_turn, long, slow

milp = by("milp")

GOLDEN = {3: 45, 4: 26, 5: 22, 6: 21, 8: 19}  # budget -> cost of the chain of 8 layers, unit costs and sizes
# where each op of the backward may write over the gradient that it reads
GOLDEN_IN_PLACE = {3: 27, 4: 22, 5: 21, 6: 20, 8: 18}
GOLDEN_16 = {8: 43, 10: 41, 12: 39}


@cache
def known(seed: int, most_ops: int = 5, make: Make = random_problem) -> tuple[Problem, list[tuple[int, float]]]:
    """A random problem, and budgets worth asking for, the loosest and the tightest, with the least cost of each."""
    problem = make(seed, most_ops=most_ops)
    every = outcomes(problem)
    budgets = interesting_budgets(every)
    return problem, [(budget, optimum(every, budget)) for budget in sorted({*budgets[:2], *budgets[-3:]})]


def check_against_brute_force(problem: Problem, budgets: list[tuple[int, float]], formulation: str) -> None:
    for budget, best in budgets:
        solution = milp(problem, budget, formulation=formulation)
        assert solution.status is (Status.OPTIMAL if best < np.inf else Status.INFEASIBLE)
        assert solution.cost == pytest.approx(best, rel=1e-9)
        assert solution.bound <= best * (1 + 1e-9)


@in_turn(formulation=FORMULATIONS, make=PLAIN_AND_WAYS, seed=every(6, range(0, 80, 2)))
def test_both_forms_equal_brute_force(formulation: str, make: Make, seed: int) -> None:
    check_against_brute_force(*known(seed, make=make), formulation)


@pytest.mark.slow
@in_turn(formulation=FORMULATIONS, seed=[1009, *map(long, (1004, 1012))])
def test_six_ops_equal_brute_force(formulation: str, seed: int) -> None:
    check_against_brute_force(*known(seed, most_ops=6), formulation)


@in_turn(seed=every(5, range(0, 80, 4)), make=PLAIN_AND_WAYS)
def test_relaxations_bound_the_optimum_and_the_strengthened_one_is_tighter(seed: int, make: Make) -> None:
    problem, budgets = known(seed, make=make)
    for budget, best in budgets:
        strengthened, paper = (relax(problem, budget, formulation=name).bound for name in ("strengthened", "paper"))
        assert paper <= strengthened * (1 + 1e-7)
        assert strengthened <= best * (1 + 1e-7)


def chain_in_place() -> Problem:
    chain = dags.unit_chain(8)
    ways = tuple(InPlace(k, k, k - 1, 0) for k in range(9, 17))
    return replace(chain, profile=replace(chain.profile, ways=ways))


CHAINS = {"8": dags.unit_chain(8), "16": dags.unit_chain(16), "8 in place": chain_in_place()}


@pytest.mark.parametrize(
    ("chain", "formulation", "budget", "cost"),
    [
        marked.get(budget, pytest.param)(chain, formulation, budget, cost)
        for chain, formulation, costs, marked in (
            ("8", "strengthened", GOLDEN, {}),
            ("8", "paper", GOLDEN, {3: long, 4: long, 5: long}),
            ("16", "strengthened", GOLDEN_16, {8: long, 10: slow, 12: long}),
            ("8 in place", "strengthened", GOLDEN_IN_PLACE, {3: long}),
        )
        for budget, cost in costs.items()
    ],
)
def test_golden_chains(chain: str, formulation: str, budget: int, cost: float) -> None:
    solution = milp(CHAINS[chain], budget, formulation=formulation, time_limit=300)
    assert (solution.status, solution.cost) == (Status.OPTIMAL, cost)


def test_without_ways_the_model_has_no_trace_of_them() -> None:
    for seed in range(4):
        problem = random_problem(seed)
        model, x = build(problem, problem.keep_all_peak)
        assert (x.OVER == NONE).all()
        assert not {"write over what goes", "write over one", "keep one copy"} & set(model.families)


@pytest.mark.parametrize(("budget", "cost"), GOLDEN_16.items())
def test_the_strengthened_relaxation_alone_proves_the_chain_of_16(budget: int, cost: float) -> None:
    assert relax(CHAINS["16"], budget).bound == pytest.approx(cost, rel=1e-6)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_budget_below_what_is_resident_makes_a_model_without_solutions(formulation: str) -> None:
    problem = Problem.from_dag([[], [0]], [1, 1], [5, 7], workspace=[1, 1], resident_bytes=100)
    model, _ = build(problem, 50, formulation=formulation)
    assert highs.run(model).outcome is SolveStatus.INFEASIBLE
    assert relax(problem, 50, formulation=formulation).outcome is SolveStatus.INFEASIBLE


def random_runs(problem: Problem, seed: int) -> np.ndarray:
    """A valid R without useless runs."""
    R = runs(problem)
    R |= np.tril(np.random.default_rng(seed).random(R.shape) < 0.4, -1)
    for k, op in enumerate(problem.graph.ops):
        R[k + 1 :, k] &= op.pinned is None
    return without_useless(problem.graph, R)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_equations_and_simulator_agree_on_every_run(seed: int) -> None:
    problem = random_problem(seed, most_ops=8)
    schedule = Schedule.from_runs(problem.graph, random_runs(problem, seed))
    usage = simulator.simulate(simulator.lower(problem, schedule), problem)
    assert bytes_in_memory(schedule, problem)[schedule.R].tolist() == list(usage.bytes_at)
    assert peak(schedule, problem) == usage.peak


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), formulation=st.sampled_from(FORMULATIONS))
def test_the_model_admits_a_schedule_exactly_from_its_simulated_peak_on(seed: int, formulation: str) -> None:
    problem = PLAIN_AND_WAYS[seed % 2](seed, most_ops=6)
    R = random_runs(problem, seed)
    most = peak(Schedule.from_runs(problem.graph, R), problem)
    for budget, outcome in ((most, SolveStatus.OPTIMAL), (most - 1, SolveStatus.INFEASIBLE)):
        if budget < problem.unavoidable_bytes.max():
            continue
        model, x = build(problem, budget, formulation=formulation)
        there = x.R != NONE
        if (R & ~there).any():
            assert outcome is SolveStatus.INFEASIBLE, "a useful run that fits has a variable"
            continue
        model.constrain("as given", [(x.R[there], 1.0)], lower=R[there], upper=R[there])
        assert highs.run(model).outcome is outcome


@in_turn(seed=range(12))
def test_trap_nothing_is_freed_after_an_op_that_did_not_run(seed: int) -> None:
    """FREE <= R left out undercounts memory: in the paper's form no FREE goes without its R."""
    problem = random_problem(seed)
    _, x = build(problem, problem.keep_all_peak, formulation="paper")
    freed = np.argwhere(x.FREE != NONE)
    for t, e in freed[:: max(1, len(freed) // 6)]:
        tried, x = build(problem, problem.keep_all_peak, formulation="paper")
        columns = np.array([x.FREE[t, e], x.R[t, x.touches.op[e]]])
        tried.constrain("freed without a run", [(columns, 1.0)], lower=[1, 0], upper=[1, 0])
        assert highs.run(tried).outcome is SolveStatus.INFEASIBLE


@in_turn(seed=range(12))
def test_trap_nothing_is_freed_twice_or_without_being_at_hand(seed: int) -> None:
    """The strengthened form may free late, but never more than is there, nor what is still to be read or kept."""
    problem = random_problem(seed)
    model, x = build(problem, problem.keep_all_peak)
    result = highs.run(model)
    R, S, FREE = (model.value(result.x, family) for family in (x.R, x.S, x.FREE))
    of = x.touches
    for v in np.unique(of.value):
        mine = of.value == v
        at_hand = S[:, v] + R[:, of.made_by[mine][0]]
        kept = np.append(S[1:, v], 0.0)
        assert (FREE[:, mine].sum(axis=1) + kept <= at_hand + 1e-6).all()


def test_trap_leaving_free_bounds_out_undercounts() -> None:
    """The known bug, made on purpose: without the hazard 1 - R[t, k] in (7c) the 'optimum' costs too little."""
    model, _ = build(dags.unit_chain(8), 5, formulation="paper")
    rows = model.families["free with no hazard only"]
    model._entries = [
        tuple(part[(r < rows.start) | (r >= rows.stop) | (a != -1)] for part in (r, c, a)) for r, c, a in model._entries
    ]
    family = list(model.families).index("free with no hazard only")
    model._row_upper[family] = model._row_upper[family] + 1
    assert highs.run(model).objective < GOLDEN[5] - 0.5


def two_copies() -> Problem:
    """Within 15 bytes v, made again beside itself, would let op 3 save its 24 bytes and still leave v to op 4."""
    made = [(0,), (1,), (2,), (3, 4, 5), (6,)]
    reads: list[tuple[int, ...]] = [(), (0,), (), (1, 2), (1, 3, 4)]
    pinned = ["draws random numbers", None, "draws random numbers", None, None]
    sizes = [4, 4, 1, 4, 4, 1, 1]
    graph = Graph(
        ops=tuple(Op(f"op{k}", "op", reads[k], made[k], "forward", pinned[k]) for k in range(5)),
        values=tuple(Value(f"v{v}", sizes[v], k) for k, vs in enumerate(made) for v in vs),
        outputs=(6,),
    )
    ways = (InPlace(op=3, makes=3, over=1, workspace=0), InPlace(op=3, makes=5, over=2, workspace=20))
    return Problem(graph, Profile(np.ones(5), np.array([0, 0, 0, 20, 0]), ways=ways))


def way_of_less_workspace() -> Problem:
    plain = Problem.from_dag([[], [0]], [1, 1], [4, 4], workspace=[0, 4])
    return replace(plain, profile=replace(plain.profile, ways=(InPlace(op=1, makes=1, over=0, workspace=1),)))


IN_PLACE = Problem.from_dag([[], [0], [1], [2], [1, 3]], [1] * 5, [4, 4, 4, 1, 1], over={1: [0], 2: [1]})
TRAPS: dict[str, tuple[Problem, dict[int, float]]] = {
    "no second copy goes so that the first is written over": (two_copies(), {33: 5, 16: 6, 15: np.inf}),
    "what fits only in place may still run again": (IN_PLACE, {6: 7}),
    "the budget is rounded down to what ways leave too": (way_of_less_workspace(), {5: 2}),
    "the new output counts while its op runs": (Problem.from_dag([[], [0]], [1, 1], [5, 7]), {12: 2, 11: np.inf}),
    "all values are results": (
        Problem.from_dag([[], [0], [1]], [1] * 3, [1, 2, 3], outputs=[0, 1, 2]),
        {6: 3, 5: np.inf},
    ),
}


@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("trap", TRAPS)
def test_trap(trap: str, formulation: str) -> None:
    problem, costs = TRAPS[trap]
    every = outcomes(problem)
    for budget, cost in costs.items():
        assert optimum(every, budget) == cost
        solution = milp(problem, budget, formulation=formulation, time_limit=20)
        status = Status.INFEASIBLE if np.isinf(cost) else Status.OPTIMAL
        assert (solution.status, solution.cost) == (status, cost)


def test_trap_binaries_are_rounded_not_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    def almost(model: Model, **options: object) -> Result:
        result = run(model, **options)
        return replace(result, x=np.where(model.integer, result.x * (1 - 1e-7), result.x))

    run = highs.run
    monkeypatch.setattr(highs, "run", almost)
    assert milp(dags.unit_chain(8), 5).cost == 22


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.3])
def test_trap_the_gap_ends_the_search_and_loosens_no_constraint(gap: float) -> None:
    solution = milp(CHAINS["8"], 4, gap=gap)
    assert solution.gap <= gap + 1e-9
    assert solution.peak <= 4
    assert solution.bound <= GOLDEN[4] <= solution.cost


def test_an_answer_over_budget_within_the_tolerance_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, run = [], highs.run

    def careless(model: Model, **options: object) -> Result:
        tries.append(model)
        result = run(model, **options)
        if len(tries) > 1 or result.x is None:
            return result
        return replace(result, x=(model.lower == 1).astype(float))  # runs each op once, whatever the budget

    monkeypatch.setattr(highs, "run", careless)
    solution = milp(dags.unit_chain(4), 5)
    assert (len(tries), solution.peak <= 5, solution.bound) == (2, True, 10)  # that of the model of the whole budget


def test_a_solver_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is dropped that a known schedule contradicts."""

    def lie(model: Model, **options: object) -> Result:
        x = model.lower.copy()
        x[0] = 0  # the first op does not run
        return Result(SolveStatus.OPTIMAL, x, 0.0, 0.0)

    start = milp(CHAINS["8"], 5).schedule
    monkeypatch.setattr(highs, "run", lie)
    with pytest.raises(SolverError, match="milp"):
        milp(dags.unit_chain(3), 7)
    false = Result(SolveStatus.INFEASIBLE, None, np.inf, np.inf)
    monkeypatch.setattr(highs, "run", Mock(return_value=false))
    solution = milp(CHAINS["8"], 5, start=start)
    assert (solution.status, solution.cost, solution.bound) == (Status.FEASIBLE, 22, 17)


def test_a_start_is_never_made_worse_and_is_the_answer_when_there_is_no_time() -> None:
    """A start that does not fit is ignored, and without any there is but a bound. A target ends the search."""
    problem = dags.unit_chain(8)
    start, keep_all = milp(problem, 4).schedule, Schedule.from_runs(problem.graph, runs(problem))
    for options, expected in (
        ({"start": start, "time_limit": 0.0}, (Status.FEASIBLE, 26)),
        ({"start": start}, (Status.OPTIMAL, 22)),
        ({"start": keep_all}, (Status.OPTIMAL, 22)),
        ({"start": keep_all, "time_limit": 0.0}, (Status.NOT_FOUND, np.inf)),
        ({"time_limit": 0.0}, (Status.NOT_FOUND, np.inf)),
    ):
        solution = milp(problem, 5, **options)
        assert (solution.status, solution.cost) == expected, options
        assert 17 <= solution.bound <= 22
    assert milp(problem, 4, start=start, target=26.0).cost == 26


def test_unknown_names_and_what_fits_nowhere_are_refused() -> None:
    problem = dags.unit_chain(2)
    with pytest.raises(ValueError, match="one of strengthened, paper"):
        milp(problem, 5, formulation="weak")
    assert "at least 3 B are at hand while op9 runs" in milp(dags.unit_chain(8), 2).message


@pytest.mark.long
def test_huge_bytes_and_tiny_seconds_change_nothing() -> None:
    factor = 2**28 + 1
    for seed in range(20):
        problem, budgets = known(seed)
        scaled = in_larger_bytes(problem, factor)
        scaled = replace(scaled, profile=replace(scaled.profile, seconds=problem.seconds * 1e-7))
        for budget, best in budgets:
            assert milp(scaled, budget * factor).cost == pytest.approx(best * 1e-7, rel=1e-9)


def test_the_full_model_of_200_ops_is_built_in_seconds() -> None:
    problem = dags.mobilenet(11)
    assert len(problem.graph.ops) > 200
    with takes_less_than(3.0):
        build(problem, int(0.7 * problem.keep_all_peak))[0].matrix()


@pytest.mark.slow
@pytest.mark.long
def test_a_training_step_of_80_ops_is_solved_to_proven_optimality() -> None:
    problem = dags.vgg()
    solution = milp(problem, int(0.7 * problem.keep_all_peak), time_limit=300)
    assert (solution.status, solution.overhead) == (Status.OPTIMAL, pytest.approx(0.0239127, abs=1e-6))


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_exported_files_have_the_letters_of_the_paper(tmp_path: Path, formulation: str) -> None:
    export(dags.unit_chain(3), 4, tmp_path / "model.lp", formulation=formulation)
    names = ("R_3_1", "S_3_1", "FREE_3_", "U_3_1", "begin_stage_0", "run_and_free_0")
    assert all(name in (tmp_path / "model.lp").read_text() for name in names)


def test_zero_costs_and_zero_sizes_are_solved() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], [0, 0, 0], [0, 0, 0])
    for formulation in FORMULATIONS:
        assert milp(problem, 1, formulation=formulation).cost == 0


@pytest.mark.parametrize("method", ["milp", "lp-rounding", "auto"])
def test_a_workspace_far_beyond_all_values_is_taken(method: str) -> None:
    """HiGHS takes no model with a coefficient above 1e15."""
    problem = Problem.from_dag(
        [[], [0], [1], [0, 2], [1, 3]], [1] * 5, [1] * 5, workspace=[0, 4 * 10**15, 0, 0, 0], forward=3
    )
    found = solve(problem, problem.keep_all_peak, method=method)
    assert (found.cost, found.details.get("failed")) == (5.0, None)
    assert solve(problem, problem.keep_all_peak - 1, method=method).refusal.reason.startswith("op1 alone needs")


@pytest.mark.slow
@in_turn(seed=[*range(2), *map(long, range(2, 20))])
def test_without_what_is_spare_the_same_schedules_fit(seed: int) -> None:
    """A large workspace, of a plain run or of a way: the schedules within a budget are those of the smaller problem."""
    problem, rng = random_problem_with_ways(seed), np.random.default_rng(seed)
    large = [int(b) * 10**9 for b in rng.integers(0, 3, len(problem.workspace))]
    ways = tuple(
        replace(w, workspace=w.workspace + large[w.op] * int(rng.integers(0, 2))) for w in problem.profile.ways
    )
    problem = replace(problem, profile=replace(problem.profile, workspace_bytes=problem.workspace + large, ways=ways))
    found = outcomes(problem)
    for budget in interesting_budgets(found):
        smaller, less = without_spare(problem, budget)
        assert [peak <= budget for _, peak in found] == [peak <= less for _, peak in outcomes(smaller)]
        assert less == budget or less <= problem.resident + 4 * problem.sizes.sum()
        assert solve(problem, budget, method="milp").cost == pytest.approx(optimum(found, budget))


def in_larger_bytes(problem: Problem, times: int) -> Problem:
    """The problem whose sizes and workspaces are all multiples of a number of bytes."""
    values = tuple(replace(value, size_bytes=times * value.size_bytes) for value in problem.graph.values)
    ways = tuple(replace(way, workspace=times * way.workspace) for way in problem.profile.ways)
    workspace, resident = times * problem.workspace, times * problem.resident
    profile = replace(problem.profile, workspace_bytes=workspace, resident_bytes=resident, ways=ways)
    return replace(problem, graph=replace(problem.graph, values=values), profile=profile)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_bytes_that_no_value_fills_change_nothing(formulation: str) -> None:
    """The model of a budget in bytes is that in units of six, and of what is left over no more than a unit matters."""
    for seed in range(12):
        problem = random_problem_with_ways(seed)
        larger = in_larger_bytes(problem, 6)
        least = int(problem.unavoidable_bytes.max())
        for budget, left_over in ((least, 5), (least + 3, 1), (least + 10**6, 4)):
            plain, _ = build(*without_spare(problem, budget), formulation=formulation)
            other, _ = build(*without_spare(larger, 6 * budget + left_over), formulation=formulation)
            assert abs(plain.matrix() - other.matrix()).max() < 1e-9
            for mine, its in ((plain.upper, other.upper), (plain.row_upper, other.row_upper)):
                assert mine == pytest.approx(its, abs=1e-9)
