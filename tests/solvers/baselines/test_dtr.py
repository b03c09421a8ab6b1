"""Dynamic tensor rematerialization, staged: its six scores, and its runtime."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Graph, Op, Problem, Profile, Status, Value
from checkmate.solvers.baselines.dtr import HEURISTICS, Runtime
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.incumbent import Clock, OutOfTime
from tests.solvers.checks import solve
from tests.solvers.steps import STEPS, masked
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn, long


@pytest.mark.parametrize("heuristic", ["h_full", "h_eq", "local"])
@pytest.mark.parametrize("layers", [64, long(256)])
def test_with_memory_of_the_root_of_the_length_a_chain_costs_a_constant_factor(heuristic: str, layers: int) -> None:
    """The paper proves for such scores O(N) ops in Ω(√N) memory. Without the neighbourhood the factor grows."""
    overhead = solve("dtr", dags.unit_chain(layers), 2 * math.isqrt(layers), heuristic=heuristic).overhead
    least, most = (0.8, 1.5) if layers == 64 else (1.5, math.inf)
    assert least < overhead < most if heuristic == "local" else overhead <= 0.5


def two_of_a_result() -> Problem:
    """Op 0 makes a result and a value that has to come back: for a moment there are two of the result."""
    sizes = {"result": 4, "x": 3, "big": 6, "end": 1, "out": 1}
    values = tuple(Value(name, size, max(0, v - 1)) for v, (name, size) in enumerate(sizes.items()))
    links = {"two": ((), (0, 1)), "press": ((), (2,)), "mid": ((2,), (3,)), "out": ((1, 3), (4,))}
    ops = tuple(Op(name, "f", reads, makes) for name, (reads, makes) in links.items())
    return Problem(Graph(ops, values, (0, 4)), Profile(np.ones(4), np.zeros(4)))


LINE = Problem.from_dag([[], [0], [1]], [1] * 3, [8] * 3, over={1: [0], 2: [1]})
READ_LATER = Problem.from_dag([[], [0], [0, 1]], [1] * 3, [8, 8, 8], over={1: [0], 2: [1]})


COSTS: dict[str, tuple[Problem, dict[str, Any], dict[int, float]]] = {
    "it writes over what goes right after the run": (LINE, {}, {8: 3}),
    "and not over what is read later": (READ_LATER, {}, {16: 3, 15: math.inf}),
    "what a pinned op made goes for good where less stays for it": (masked(4, mask=8), {}, {12: 5, 11: math.inf}),
    "a second copy of a result is counted": (two_of_a_result(), {"heuristic": "local"}, {12: 5, 11: math.inf}),
}


@pytest.mark.parametrize("case", COSTS)
def test_what_a_plan_takes(case: str) -> None:
    problem, options, costs = COSTS[case]
    for budget, cost in costs.items():
        solution = solve("dtr", problem, budget, **options)
        assert (solution.cost, solution.status is Status.NOT_FOUND) == (cost, cost == math.inf)


def test_a_mask_is_held_to_bring_back_the_noise_made_of_it() -> None:
    for heuristic in HEURISTICS:
        solution = solve("dtr", masked(noise=4, mask=1), budget=8, heuristic=heuristic)
        assert solution.schedule.recomputed.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("name", ["unet", "gpt", "resnet"])
def test_all_scores_are_tried_and_the_cheapest_is_kept_and_named(name: str) -> None:
    problem = STEPS[name]
    budget = int(0.8 * problem.keep_all_peak)
    best = solve("dtr", problem, budget)
    each = {score: solve("dtr", problem, budget, heuristic=score).cost for score in HEURISTICS}
    assert best.details["costs"] == pytest.approx(each)  # one adds up ops by their runs, the other in their order
    assert best.cost == min(each.values()) == each[best.details["heuristic"]]


def test_a_chain_longer_than_pythons_stack_comes_back_and_endless_runs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1500
    deps = [[], *([k] for k in range(n - 1)), [], [n - 1, n]]
    problem = Problem.from_dag(deps, seconds=[1] * (n + 2), sizes=[1] * n + [2, 1], outputs=[n + 1])
    assert isinstance(Runtime(Tables.of(problem), 4, HEURISTICS["LRU"], Clock()).run(), list)
    monkeypatch.setattr("checkmate.solvers.baselines.dtr.MOST_RUNS", 2)
    with pytest.raises(OutOfTime):  # 45 runs of 17 ops, at the least
        Runtime(Tables.of(dags.unit_chain(8)), 3, HEURISTICS["LRU"], Clock()).run()


def test_without_a_plan_it_says_why() -> None:
    """Either nothing is left to evict, or the time was over."""
    small, large = dags.gpt(2), dags.gpt(4)
    stuck = solve("dtr", small, int(small.unavoidable_bytes.max()), heuristic="size")
    late = solve("dtr", large, int(0.6 * large.keep_all_peak), time_limit=0.0)
    for solution, says in ((stuck, small.graph.ops[stuck.stuck].name), (late, "time limit")):
        assert solution.status is Status.NOT_FOUND
        assert says in solution.message
    with pytest.raises(ValueError, match=r"no heuristic 'lru'.*LRU"):
        solve("dtr", dags.unit_chain(3), 5, heuristic="lru")


def searched(problem: Problem, evicted: set[int], v: int, *, ancestors: bool, descendants: bool) -> float:
    """Seconds of the ops of evicted values around v, by searches in the graph of values."""
    tables = Tables.of(problem)
    edges = [(u, w) for k, inputs in enumerate(tables.inputs) for u in inputs for w in tables.outputs[k]]
    found: set[int] = set()
    for wanted, pairs in ((descendants, edges), (ancestors, [(w, u) for u, w in edges])):
        graph = nx.DiGraph([(a, b) for a, b in pairs if b in evicted and (a in evicted or a == v)])
        if wanted and v in graph:
            found |= nx.descendants(graph, v)
    return sum(tables.seconds[k] for k in {tables.producer[w] for w in found})


@in_turn(seed=[*range(8), *map(long, range(8, 20))])
def test_neighbourhoods_are_those_of_a_search_after_every_change(seed: int) -> None:
    problem = random_problem(seed, most_ops=14)
    tables, rng = Tables.of(problem), np.random.default_rng(seed)
    ancestors, both = (HEURISTICS[name].around(tables) for name in ("MSPS", "h_full"))
    made = [v for v, p in enumerate(tables.producer) if p >= 0]
    evicted: set[int] = set()
    for _ in range(40):
        v = int(rng.choice(made))
        for follower in (ancestors, both):
            follower.mark(v, evicted=v not in evicted)
        evicted ^= {v}
        here = [w for w in made if w not in evicted]
        up = [searched(problem, evicted, w, ancestors=True, descendants=False) for w in here]
        down = [searched(problem, evicted, w, ancestors=False, descendants=True) for w in here]
        assert ancestors.seconds(np.array(here, dtype=int)) == pytest.approx(up)
        assert both.seconds(np.array(here, dtype=int)) == pytest.approx(np.add(up, down))


@in_turn(seed=range(20))
def test_classes_without_restoring_are_connected_components(seed: int) -> None:
    problem = random_problem(seed, most_ops=14)
    tables = Tables.of(problem)
    classes, evicted = HEURISTICS["h_eq"].around(tables), set()
    edges = [(u, w) for k, inputs in enumerate(tables.inputs) for u in inputs for w in tables.outputs[k]]
    made = [v for v, p in enumerate(tables.producer) if p >= 0]
    for v in np.random.default_rng(seed).permutation(made).tolist()[:-1]:
        classes.mark(v, evicted=True)
        evicted.add(v)
        graph = nx.Graph([(u, w) for u, w in edges if u in evicted and w in evicted])
        graph.add_nodes_from(evicted)
        parts = list(nx.connected_components(graph))
        for w in set(made) - evicted:
            near = {a for a, b in edges if b == w} | {b for a, b in edges if a == w}
            around = [sum(tables.seconds[tables.producer[x]] for x in part) for part in parts if part & near]
            assert classes.seconds(np.array([w])) == pytest.approx([sum(around)])


def test_a_value_that_comes_back_leaves_its_class_whole() -> None:
    """The middle of three held two sides together; when it is back they still count as one, less its seconds."""
    chain = Problem.from_dag([[], [0], [1], [2], [3]], seconds=[1, 2, 4, 8, 16], sizes=[1] * 5)
    classes = HEURISTICS["h_eq"].around(Tables.of(chain))
    for marks, around in (
        ({1: True, 2: True, 3: True}, {0: 14, 4: 14}),
        ({2: False}, {0: 10, 2: 10, 4: 10}),
        ({2: True, 1: False, 3: False}, {1: 4}),
        ({2: False}, {1: 0}),
        ({3: True}, {2: 8, 4: 8}),
    ):
        for v, evicted in marks.items():
            classes.mark(v, evicted=evicted)
        assert classes.seconds(np.array([*around])).tolist() == [*around.values()]


def first_out(heuristic: str, made: list[tuple[list[int], float, int]], last: list[int]) -> int:
    """The value that goes first where any one of those still read makes enough room.

    The ops of (deps, seconds, bytes) run, then a long one, one that presses, and one that reads the last values.
    """
    n = len(made)
    ops = [*made, ([], 1000.0, 0), ([], 1.0, 50), (last, 1.0, 1)]
    deps, seconds, sizes = (list(column) for column in zip(*ops, strict=True))
    problem = Problem.from_dag(deps, seconds, sizes, outputs=[n + 2])
    runtime = Runtime(Tables.of(problem), sum(sizes[v] for v in last) + 50 - 1, HEURISTICS[heuristic], Clock())
    chosen, choose = list[int | None](), runtime._choose
    runtime._choose = lambda: chosen.append(choose()) or chosen[-1]
    assert isinstance(runtime.run(), list)
    return chosen[0]


ALONE = [([], 10.0, 2), ([], 0.1, 3), ([], 10.0, 5)]
ANCESTOR = [([], 100.0, 2), ([0], 1.0, 2), ([], 5.0, 2)]  # 0 is dead: 1 is dear to bring back, 2 is not
DESCENDANT = [([], 1.0, 2), ([0], 100.0, 2), ([1], 1.0, 2), ([], 5.0, 2)]  # 1 waits for 0 to bring back 2
SIBLING = [([], 1.0, 2), ([], 100.0, 2), ([0, 1], 1.0, 2), ([2], 1.0, 2), ([], 50.0, 2)]  # 1 is a parent beside 0


@pytest.mark.parametrize(
    ("heuristic", "made", "last", "goes"),
    [
        ("LRU", ALONE, [0, 1, 2], 0),
        ("local", ALONE, [0, 1, 2], 1),
        ("size", ALONE, [0, 1, 2], 2),
        ("size", [([], 1.0, 2)] * 3, [0, 1, 2], 0),  # of equal scores the first
        ("local", ANCESTOR, [1, 2], 1),
        ("MSPS", ANCESTOR, [1, 2], 2),
        ("h_full", ANCESTOR, [1, 2], 2),
        ("h_eq", ANCESTOR, [1, 2], 2),
        ("MSPS", DESCENDANT, [0, 2, 3], 0),
        ("h_full", DESCENDANT, [0, 2, 3], 3),
        ("h_eq", DESCENDANT, [0, 2, 3], 3),
        ("h_full", SIBLING, [0, 3, 4], 0),
        ("h_eq", SIBLING, [0, 3, 4], 4),
    ],
)
def test_what_each_score_lets_go_first(heuristic: str, made: list, last: list[int], goes: int) -> None:
    assert first_out(heuristic, made, last) == goes


def test_two_outputs_of_an_op_count_its_seconds_once_in_the_exact_neighbourhood() -> None:
    values = [Value("a", 1, 0), Value("b", 1, 0), Value("c", 1, 1)]
    ops = [Op("split", "f", (), (0, 1)), Op("join", "f", (0, 1), (2,))]
    tables = Tables.of(Problem(Graph(tuple(ops), tuple(values), (2,)), Profile(np.array([3.0, 1.0]), np.zeros(2))))
    for name, seconds in {"h_full": 3.0, "MSPS": 3.0, "h_eq": 6.0, "local": 0.0}.items():
        neighbours = HEURISTICS[name].around(tables)
        for v in (0, 1):
            neighbours.mark(v, evicted=True)
        assert neighbours.seconds(np.array([2])).tolist() == [seconds]


@in_turn(heuristic=HEURISTICS, seed=range(15))
def test_the_runtime_counts_its_room_and_can_bring_back_what_it_let_go(heuristic: str, seed: int) -> None:
    for problem in (random_problem(seed, most_ops=16), dags.gpt(1)):
        tables = Tables.of(problem)
        budget = (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2
        runtime = Runtime(tables, budget, HEURISTICS[heuristic], Clock())
        for t in range(len(tables.inputs)):
            if not isinstance(runtime.stage(t), list):
                break
            here = sum(tables.size[v] for v, p in enumerate(tables.producer) if p >= 0 and runtime.at_hand[v])
            assert runtime.room == budget - tables.resident - here >= 0
            gone = runtime.around.evicted
            assert all(runtime.may_run[tables.producer[v]] and not runtime.at_hand[v] for v in gone)
            assert not runtime.locks[[v for v, p in enumerate(tables.producer) if p >= 0]].any()
