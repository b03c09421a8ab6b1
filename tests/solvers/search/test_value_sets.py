"""Values that must be at hand, as bits: against plain sets, and against what simulated schedules hold."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Problem, Schedule
from checkmate.core import simulator
from checkmate.core.plan import Free
from checkmate.solvers.common.schedules import peak_of
from checkmate.solvers.search.value_sets import ValueSets
from tests.solvers.checks import runs, wrong
from tests.solvers.search.test_backward_search import refutations
from tests.support.oracle import ALL_KINDS, Make, all_schedules, pinned, random_problem
from tests.support.sampling import every, in_turn


def as_bits(sets: ValueSets, values: set[int]) -> int:
    return sum(sets.bit.get(v, 0) for v in values)


@in_turn(seed=range(30))
def test_bytes_of_sets(seed: int) -> None:
    problem, rng = random_problem(seed, most_ops=9), np.random.default_rng(seed)
    sets = ValueSets(problem)
    for _ in range(20):
        some = {v for v in sets.values if rng.random() < 0.5}
        assert sets.bytes_of(as_bits(sets, some)) == sum(int(problem.sizes[v]) for v in some)


def test_a_grain_leaves_out_what_is_small_and_results_and_what_nobody_reads() -> None:
    problem = Problem.from_dag([[], [0], [0], [1]], seconds=[1] * 4, sizes=[8, 2, 4, 16], outputs=[3])
    assert [ValueSets(problem).values, ValueSets(problem, grain=2).values] == [[0, 1], [0]]
    assert ValueSets(problem).working == [0, 0, 4, 16]


def with_pinned(seed: int, *, most_ops: int, share: float = 0.5, make: Make = random_problem) -> Problem:
    """A random problem in which about so many of the ops are pinned."""
    problem, rng = make(seed, most_ops=most_ops), np.random.default_rng(seed)
    ops = [replace(op, pinned="draws" if op.overwrites or rng.random() < share else None) for op in problem.graph.ops]
    return replace(problem, graph=replace(problem.graph, ops=tuple(ops)))


def smallest_cut(sets: ValueSets, t: int) -> int:
    """Bytes at least of what cuts all paths from what pinned ops made before stage t to what is read from t on."""
    graph, tables = nx.DiGraph(), sets.tables
    graph.add_nodes_from(("from", "to"))
    for v, one in sets.bit.items():
        graph.add_edge(("in", v), ("out", v), capacity=tables.size[v])
        if not one & sets.free[0] and tables.producer[v] < t:
            graph.add_edge("from", ("in", v))
        for k in tables.users[v]:
            if k >= t:
                graph.add_edge(("out", v), "to")
            for w in tables.outputs[k]:
                if sets.bit.get(w, 0) & sets.free[0]:
                    graph.add_edge(("out", v), ("in", w))
    return int(nx.maximum_flow_value(graph, "from", "to"))


@in_turn(make=ALL_KINDS[:3], seed=every(4, range(40)))
def test_no_schedule_holds_less_than_is_needed_and_owed(make: Make, seed: int) -> None:
    """At each run of each schedule the bytes are at least those of what later runs need, and of what is owed."""
    few = 5 if seed % 30 == 0 else 4
    problem = make(seed, most_ops=4) if seed % 2 else with_pinned(seed, most_ops=few, make=make)
    sets = ValueSets(problem)
    for R in (schedule.R for schedule in all_schedules(problem)):
        if wrong(problem, R):
            continue
        plan = simulator.lower(problem, Schedule.from_runs(problem.graph, R))
        used = iter(simulator.simulate(plan, problem).bytes_at)
        at_hand: set[int] = set()
        stage = 0
        for i, step in enumerate(plan.steps):
            if isinstance(step, Free):
                at_hand.discard(step.value)
                continue
            at_hand = at_hand.union(problem.graph.ops[step.op].outputs) - {step.over}
            freed = itertools.takewhile(lambda later: isinstance(later, Free), plan.steps[i + 1 :])
            after = at_hand.difference(free.value for free in freed)
            assert sets.at(stage, step.op, as_bits(sets, after)) <= next(used)
            stage += step.op == stage


@pytest.mark.slow
@in_turn(make=ALL_KINDS[:3], block=every(4, range(4)))
def test_refutations_are_true_where_half_of_the_ops_are_pinned(make: Make, block: int) -> None:
    seeds = range(4000 + 15 * block, 4015 + 15 * block)
    problems = [with_pinned(seed, most_ops=5 if seed % 15 == 0 else 4, make=make) for seed in seeds]
    assert sum(refuted for problem in problems for _, _, _, refuted in refutations(problem, 100)) > 20


def test_from_scratch_is_what_a_run_of_the_forward_takes() -> None:
    sets = ValueSets(Problem.from_dag([[], [0], [1], [2]], seconds=[1] * 4, sizes=[5, 1, 3, 2]))
    wanted = (sets.bit[2], sets.bit[2] | sets.bit[0], 0)
    assert [sets.from_scratch(3, values).peak for values in wanted] == [6, 9, 0]


def test_what_pinned_ops_leave_behind_is_owed_until_the_last_use_of_what_is_made_from_it() -> None:
    """A wide mask is owed whole until the backward reads it; a longer path to a later op owes less."""
    for problem in (dags.gpt(2), dags.gpt(3, batch=2, tokens=512)):
        sets, t = ValueSets(problem), problem.graph.forward_length
        drawn = {v for v in sets.values if problem.graph.ops[sets.tables.producer[v]].pinned}
        bytes_of, owed = sets.tables.size, sets.mandatory_bytes(t, 0)
        direct = sum(bytes_of[v] for v in drawn if problem.graph.users[v][-1] >= t)
        assert direct < owed <= sum(bytes_of[v] for v in drawn)
        assert sets.mandatory_bytes(t, as_bits(sets, drawn)) == 0
    assert 0.99 * sum(bytes_of[v] for v in drawn) <= owed <= smallest_cut(sets, t)


@pytest.mark.slow
def test_what_is_owed_is_a_flow() -> None:
    """No value lies on paths that owe more than its size, and together they owe no more than the smallest cut."""
    least = cut = 0
    for seed in range(24):
        sets = ValueSets(with_pinned(seed, most_ops=24, share=0.3))
        for t in range(sets.T):
            on = Counter[int]()
            for debt in sets.debts[t]:
                on.update({v: debt.least for v, one in sets.bit.items() if one & debt.values})
            assert all(bytes_ <= sets.tables.size[v] for v, bytes_ in on.items())
            assert sets.mandatory_bytes(t, 0) <= smallest_cut(sets, t)
            least, cut = least + sets.mandatory_bytes(t, 0), cut + smallest_cut(sets, t)
    assert least > 0.8 * cut


def test_what_may_go_with_a_run_is_taken_off_and_what_a_pinned_op_made_only_after_its_last_use() -> None:
    problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1] * 3, sizes=[8, 8, 8], over={1: [0], 2: [0]})
    for sets, least in ((ValueSets(problem), 8), (ValueSets(pinned(problem, 0)), 16)):
        assert sets.at(1, 1, sets.bit[1]) == least
        assert sets.at(1, 1, sets.bit[0] | sets.bit[1]) == 16
        assert sets.at(2, 2, 0) == 16
    assert ValueSets(problem, grain=8).at(1, 1, 0) == 0  # too small to be followed, so it may go in any case


def test_base_is_resident_and_results() -> None:
    problem = dags.vgg(4)
    sets = ValueSets(problem)
    assert sets.base[0] == problem.resident
    assert sets.base[-1] <= peak_of(problem, runs(problem))
    made = sum(int(problem.sizes[v]) for v in problem.graph.outputs if (problem.graph.values[v].producer or 0) < 9)
    assert sets.base[9] == problem.resident + made
