"""All published methods: verified, never below the optimum, and the figures that are known of unit chains."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, Status
from checkmate.solvers.baselines.dtr import HEURISTICS
from tests.solvers.checks import by, solve
from tests.solvers.steps import STEPS, random_chain
from tests.support.oracle import random_problem
from tests.support.sampling import every, in_turn, long

CHECKPOINTING = tuple(f"{kind}-{rule}" for kind in ("chen", "ap", "linearized") for rule in ("sqrt", "greedy"))
BASELINES = ("checkpoint-all", "last-node", *CHECKPOINTING, "griewank", "rotor", "min-cut", "dtr")
OPTIONS = [
    *((name, {}) for name in BASELINES),
    *(("griewank", {"candidates": kind}) for kind in ("ap", "linearized")),
    *(("dtr", {"heuristic": name}) for name in HEURISTICS),
]


@in_turn(seed=every(2, range(8)))
def test_never_below_the_integer_optimum_of_uneven_chains(seed: int) -> None:
    problem = random_chain(seed, layers=4)
    low, high = int(problem.unavoidable_bytes.max()), problem.keep_all_peak
    for budget in np.linspace(low, high, 4).astype(int).tolist():
        best = by("milp")(problem, budget, gap=0.0).cost
        costs = {f"{name} {options}": solve(name, problem, budget, **options).cost for name, options in OPTIONS}
        assert min(costs.values()) >= best * (1 - 1e-9)


@in_turn(seed=[*range(12), *map(long, range(12, 30))])
def test_any_graph_has_an_answer(seed: int) -> None:
    problem = random_problem(seed, most_ops=16)
    for name in BASELINES:
        solve(name, problem, (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2)


@pytest.mark.parametrize("name", ["checkpoint-all", *CHECKPOINTING[1::2], "griewank", "rotor", "min-cut", *HEURISTICS])
def test_with_room_for_all_nothing_runs_again(name: str) -> None:
    problems = [*STEPS.values(), random_chain(0, 8), *(random_problem(seed, most_ops=16) for seed in range(20))]
    name, options = ("dtr", {"heuristic": name}) if name in HEURISTICS else (name, {})
    for problem in problems:
        solution = solve(name, problem, problem.keep_all_peak, **options)
        if "for chains" not in solution.message:
            assert (solution.status, solution.cost) == (Status.OPTIMAL, pytest.approx(problem.keep_all_cost))


@pytest.mark.parametrize(
    ("names", "layers", "cost_within"),
    [
        (("chen-sqrt", "linearized-sqrt"), 16, {10: 45, 10**6: 45}),  # one schedule, whatever the budget
        (("chen-sqrt", "linearized-sqrt"), 32, {14: 89, 10**6: 89}),
        (("chen-sqrt", "linearized-sqrt"), 64, {22: 185, 10**6: 185}),
        (("griewank", "rotor"), 8, {3: 45, 4: 26, 5: 22, 6: 21, 8: 19}),  # the integer optima
        (("griewank", "rotor"), 16, {8: 43, 10: 41, 12: 39}),
        # op L + 1 reads the values of ops L and L - 1; then i + 1 runs make each value i of L - 2, …, 0
        *((("last-node",), L, dict.fromkeys((3, 10**6), 2 * L + 1 + L * (L + 1) // 2)) for L in (1, 2, 8, 30)),
    ],
)
def test_figures_of_unit_chains(names: tuple[str, ...], layers: int, cost_within: dict[int, int]) -> None:
    for name in names:
        costs = {budget: solve(name, dags.unit_chain(layers), budget).cost for budget in cost_within}
        assert costs == cost_within, name


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_short_unit_chains_against_the_integer_optimum(layers: int) -> None:
    """Rotor's persistent schedules are optimal there; no score of DTR is far off where it has a byte to spare."""
    problem = dags.unit_chain(layers)
    for budget in range(3, problem.keep_all_peak + 1):
        best = by("milp")(problem, budget, gap=0.0).cost
        assert solve("rotor", problem, budget).cost == best
        for name, options in OPTIONS:
            cost = solve(name, problem, budget, **options).cost
            assert cost >= best - 1e-9, (name, options)
            assert cost <= 1.7 * problem.keep_all_cost or name != "dtr" or "sample" in options or budget < 4


@pytest.mark.parametrize(
    ("name", "steps", "options", "most"),
    [
        ("ap-greedy", ("resnet", "unet", "gpt"), {"tries": 24}, 0.4),
        ("linearized-greedy", ("resnet", "unet", "gpt"), {"tries": 24}, 0.4),
        ("rotor", ("vgg", "resnet", "mobilenet", "gpt"), {}, 0.12),
        pytest.param("min-cut", ("vgg", "resnet", "unet", "gpt"), {}, 0.03, marks=pytest.mark.slow),
        ("dtr", ("resnet", "unet", "gpt"), {}, 0.05),
    ],
)
def test_training_steps_recompute_little_and_less_with_more_memory(
    name: str, steps: tuple[str, ...], options: dict[str, int], most: float
) -> None:
    for step in steps:
        problem = STEPS[step]
        tight, loose = (solve(name, problem, int(share * problem.keep_all_peak), **options) for share in (0.8, 0.9))
        assert 0 < loose.overhead <= tight.overhead + 0.005 <= most + 0.005, step


INSTEAD = {
    "chen-sqrt": "ap-sqrt and linearized-sqrt",
    "chen-greedy": "ap-greedy and linearized-greedy",
    "griewank": "candidates='ap' and candidates='linearized'",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_where_the_forward_is_no_chain_it_says_so_and_names_others(name: str) -> None:
    for step in ("resnet", "unet", "gpt"):
        message = solve(name, STEPS[step], STEPS[step].keep_all_peak).message
        assert message.startswith("it is for chains, and this forward is none (what ")
        assert message.endswith(f"); {INSTEAD[name]} apply to any graph")


@pytest.mark.parametrize(
    ("name", "problem", "budget", "message"),
    [
        ("checkpoint-all", dags.unit_chain(5), 6, "keeping everything takes 7 B"),
        ("chen-sqrt", dags.unit_chain(16), 7, "reaches is 8 B, and it has no other schedule; chen-greedy adapts"),
        ("griewank", dags.unit_chain(5), 2, "reaches is 3 B"),
        ("min-cut", dags.unet(), int(0.45 * dags.unet().keep_all_peak), "least peak takes"),
    ],
)
def test_where_nothing_fits_it_names_the_smallest_peak(name: str, problem: Problem, budget: int, message: str) -> None:
    refused = solve(name, problem, budget)
    assert refused.status is Status.NOT_FOUND
    assert message in refused.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem", "share", "seconds", "most"),
    [
        ("dtr", dags.gpt(24), 0.5, 12, 0.2),
        ("rotor", dags.unit_chain(300), 80 / 302, 15, 0.5),
        pytest.param("min-cut", dags.gpt(24), 0.6, 15, 0.12, marks=pytest.mark.long),
    ],
)
def test_large_steps_take_seconds(name: str, problem: Problem, share: float, seconds: float, most: float) -> None:
    solution = solve(name, problem, int(share * problem.keep_all_peak), time_limit=10.0)
    assert solution.seconds < seconds
    assert solution.overhead < most
    assert solution.details.get("segments", 0) <= 101  # a long chain is thinned
