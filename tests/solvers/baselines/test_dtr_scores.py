"""The six scores: the neighbourhoods against graph searches, and for each score the value that has to go first."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.solvers.baselines.dtr import HEURISTICS, Ancestors, Classes, Neighbourhood, Runtime
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.common.task import Clock
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn


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


@in_turn(seed=range(20))
def test_neighbourhoods_are_those_of_a_search_after_every_change(seed: int) -> None:
    problem = random_problem(seed, most_ops=14)
    tables, rng = Tables.of(problem), np.random.default_rng(seed)
    ancestors, both = Ancestors(tables), Neighbourhood(tables)
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
    classes, evicted = Classes(tables), set()
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
    classes = Classes(Tables.of(chain))
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
    runtime = Watched(Tables.of(problem), sum(sizes[v] for v in last) + 50 - 1, HEURISTICS[heuristic], clock=Clock())
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
    for kind, seconds in ((Neighbourhood, 3.0), (Ancestors, 3.0), (Classes, 6.0)):
        neighbours = kind(tables)
        neighbours.mark(0, evicted=True)
        neighbours.mark(1, evicted=True)
        assert neighbours.seconds(np.array([2])).tolist() == [seconds]


@in_turn(heuristic=HEURISTICS, seed=range(15))
def test_the_runtime_counts_its_room_and_can_bring_back_what_it_let_go(heuristic: str, seed: int) -> None:
    for problem in (random_problem(seed, most_ops=16), dags.gpt(1)):
        tables = Tables.of(problem)
        budget = (int(problem.unavoidable_bytes.max()) + problem.keep_all_peak) // 2
        runtime = Runtime(tables, budget, HEURISTICS[heuristic], clock=Clock())
        for t in range(len(tables.inputs)):
            if not isinstance(runtime._stage(t), list):
                break
            here = sum(tables.size[v] for v, p in enumerate(tables.producer) if p >= 0 and runtime.at_hand[v])
            assert runtime.room == budget - tables.resident - here >= 0
            gone = [v for v, is_evicted in enumerate(runtime.evicted) if is_evicted]
            assert all(runtime.may_run[tables.producer[v]] and not runtime.at_hand[v] for v in gone)
            assert not runtime.locks[[v for v, p in enumerate(tables.producer) if p >= 0]].any()
