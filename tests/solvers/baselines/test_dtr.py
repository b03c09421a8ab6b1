"""Dynamic tensor rematerialization, staged: its six scores, and its runtime."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Status
from checkmate.solvers.baselines.dtr import HEURISTICS, Runtime
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.task import Clock, OutOfTime
from tests.solvers.baselines.test_baselines import STEPS, solve
from tests.solvers.search.test_next_use import masked
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn, long


@pytest.mark.parametrize("heuristic", ["h_full", "h_eq"])
@pytest.mark.parametrize("layers", [64, 256])
def test_with_memory_of_the_root_of_the_length_a_chain_costs_a_constant_factor(heuristic: str, layers: int) -> None:
    """What the paper proves for such scores: O(N) ops in Ω(√N) memory."""
    solution = solve("dtr", dags.unit_chain(layers), 2 * math.isqrt(layers), heuristic=heuristic)
    assert solution.cost <= 1.5 * solution.problem.keep_all_cost


def test_without_the_neighbourhood_the_factor_grows() -> None:
    chains = {n: dags.unit_chain(n) for n in (16, 64, 256)}
    factors = [solve("dtr", c, 2 * math.isqrt(n), heuristic="local").overhead for n, c in chains.items()]
    assert factors[0] < 0.5 < 0.8 < factors[1] < 1.5 < factors[2]


def test_it_writes_over_what_goes_right_after_the_run() -> None:
    chain = Problem.from_dag([[], [0], [1]], [1] * 3, [8] * 3, over={1: [0], 2: [1]})
    assert solve("dtr", chain, 8).cost == 3.0
    read_later = Problem.from_dag([[], [0], [0, 1]], [1] * 3, [8, 8, 8], over={1: [0], 2: [1]})
    assert solve("dtr", read_later, 16).cost == 3.0
    assert solve("dtr", read_later, 15).status is Status.NOT_FOUND


@pytest.mark.parametrize("name", ["unet", "gpt", "resnet"])
def test_all_scores_are_tried_and_the_cheapest_is_kept_and_named(name: str) -> None:
    problem = STEPS[name]
    budget = int(0.8 * problem.keep_all_peak)
    best = solve("dtr", problem, budget)
    each = {score: solve("dtr", problem, budget, heuristic=score).cost for score in HEURISTICS}
    assert best.details["costs"] == pytest.approx(each)  # one adds up ops by their runs, the other in their order
    assert best.cost == min(each.values()) == each[best.details["heuristic"]]


def test_options_that_look_at_fewer_values_still_find_plans() -> None:
    problem = dags.gpt(2)
    budget = int(0.7 * problem.keep_all_peak)
    plain, sampled = (solve("dtr", problem, budget, heuristic="h_eq", sample=sample) for sample in (False, True))
    assert sampled.cost == solve("dtr", problem, budget, heuristic="h_eq", sample=True).cost
    assert sampled.cost != plain.cost
    assert solve("dtr", problem, budget, heuristic="h_eq", ignore_small=True).plan is not None


def test_small_values_go_where_there_is_nothing_else() -> None:
    """Values of one byte beside one of thousands; the room that is lacking is theirs."""
    problem = Problem.from_dag([[], [], [], [2], [0, 1, 3]], seconds=[1] * 5, sizes=[1, 1, 1000, 1, 1], outputs=[4])
    solution = solve("dtr", problem, 1002, heuristic="size", ignore_small=True)
    assert solution.cost == 6.0


def test_a_mask_is_held_to_bring_back_the_noise_made_of_it() -> None:
    for heuristic in HEURISTICS:
        solution = solve("dtr", masked(noise=4, mask=1), budget=8, heuristic=heuristic)
        assert solution.schedule is not None
        assert solution.schedule.recomputed.tolist() == [0, 1, 0, 0, 0]


def test_what_a_pinned_op_made_goes_for_good_where_less_stays_for_it() -> None:
    problem = masked(noise=4, mask=8)
    assert solve("dtr", problem, budget=12).cost == 5.0
    assert solve("dtr", problem, budget=11).status is Status.NOT_FOUND


def test_a_second_copy_of_a_result_is_counted() -> None:
    """Op 0 makes a result and a value that has to come back: for a moment there are two of the result."""
    values = [Value("result", 4, 0), Value("x", 3, 0), Value("big", 6, 1), Value("end", 1, 2)]
    ops = [Op("two", "f", (), (0, 1)), Op("press", "f", (), (2,)), Op("mid", "f", (2,), (3,))]
    values.append(Value("out", 1, 3))
    ops.append(Op("out", "f", (1, 3), (4,)))
    problem = Problem(Graph(tuple(ops), tuple(values), (0, 4)), Profile(np.ones(4), np.zeros(4)))
    solution = solve("dtr", problem, budget=12, heuristic="local")
    assert solution.cost == 5.0
    assert solution.peak == 12  # result, its copy, x, end
    assert solve("dtr", problem, budget=11, heuristic="local").status is Status.NOT_FOUND


def test_a_chain_longer_than_pythons_stack_comes_back() -> None:
    n = 1500
    deps = [[k - 1] if k else [] for k in range(n)] + [[], [n - 1, n]]
    deps[n - 1] = [n - 2]
    problem = Problem.from_dag(deps, seconds=[1] * (n + 2), sizes=[1] * n + [2, 1], outputs=[n + 1])
    runtime = Runtime(Tables.of(problem), 4, HEURISTICS["LRU"], Clock())
    stages = runtime.run()
    assert isinstance(stages, list)


def test_no_such_heuristic() -> None:
    with pytest.raises(ValueError, match=r"no heuristic 'lru'.*LRU"):
        solve("dtr", dags.unit_chain(3), 5, heuristic="lru")


def test_where_nothing_is_left_to_evict_it_says_so() -> None:
    problem = dags.gpt(2)
    solution = solve("dtr", problem, int(problem.unavoidable_bytes.max()), heuristic="size")
    assert solution.status is Status.NOT_FOUND
    assert problem.graph.ops[solution.stuck].name in solution.message


def test_the_time_limit_is_named() -> None:
    solution = solve("dtr", dags.gpt(4), int(0.6 * dags.gpt(4).keep_all_peak), time_limit=0.0)
    assert solution.status is Status.NOT_FOUND
    assert "time limit" in solution.message


def test_a_run_that_goes_round_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkmate.solvers.baselines.dtr.MOST_RUNS", 2)
    # 45 runs of 17 ops, at the least
    runtime = Runtime(Tables.of(dags.unit_chain(8)), 3, HEURISTICS["LRU"], Clock())
    with pytest.raises(OutOfTime):
        runtime.run()


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
    for v in (1, 2, 3):
        classes.mark(v, evicted=True)
    assert classes.seconds(np.array([0, 4])).tolist() == [14, 14]
    classes.mark(2, evicted=False)
    assert classes.seconds(np.array([0, 2, 4])).tolist() == [10, 10, 10]
    classes.mark(2, evicted=True)
    classes.mark(1, evicted=False)
    classes.mark(3, evicted=False)
    assert classes.seconds(np.array([1])).tolist() == [4]
    classes.mark(2, evicted=False)
    assert classes.seconds(np.array([1])).tolist() == [0]
    classes.mark(3, evicted=True)
    assert classes.seconds(np.array([2, 4])).tolist() == [8, 8]


class Watched(Runtime):
    """Remembers what was chosen under pressure."""

    def _choose(self) -> int | None:
        chosen = super()._choose()
        self.chosen = [*getattr(self, "chosen", []), chosen]
        return chosen


def first_out(heuristic: str, made: list[tuple[list[int], float, int]], last: list[int]) -> int:
    """The value that goes first where any one of those still read makes enough room.

    The ops of (deps, seconds, bytes) run, then a long one, one that presses, and one that reads the last values.
    """
    n = len(made)
    ops = [*made, ([], 1000.0, 0), ([], 1.0, 50), (last, 1.0, 1)]
    deps, seconds, sizes = (list(column) for column in zip(*ops, strict=True))
    problem = Problem.from_dag(deps, seconds, sizes, outputs=[n + 2])
    runtime = Watched(Tables.of(problem), sum(sizes[v] for v in last) + 50 - 1, HEURISTICS[heuristic], Clock())
    assert isinstance(runtime.run(), list)
    return runtime.chosen[0]


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


def test_of_equal_scores_the_first_value_goes() -> None:
    assert first_out("size", [([], 1.0, 2)] * 3, [0, 1, 2]) == 0


def test_two_outputs_of_an_op_count_its_seconds_once_in_the_exact_neighbourhood() -> None:
    values = [Value("a", 1, 0), Value("b", 1, 0), Value("c", 1, 1)]
    ops = [Op("split", "f", (), (0, 1)), Op("join", "f", (0, 1), (2,))]
    tables = Tables.of(Problem(Graph(tuple(ops), tuple(values), (2,)), Profile(np.array([3.0, 1.0]), np.zeros(2))))
    for name, seconds in {"h_full": 3.0, "MSPS": 3.0, "h_eq": 6.0, "local": 0.0}.items():
        neighbours = HEURISTICS[name].around(tables)
        neighbours.mark(0, evicted=True)
        neighbours.mark(1, evicted=True)
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
