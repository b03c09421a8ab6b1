"""Where checkpoints may go, which are kept, and the cheapest of many settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from unittest.mock import Mock

import networkx as nx
import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Graph, Op, Problem, Profile, Value
from checkmate.solvers.baselines.checkpointing import (
    articulation_points,
    chain,
    cheapest,
    droppable,
    flow,
    kept,
    linearized,
    selections,
    why_no_chain,
)
from checkmate.solvers.common.incumbent import Remarks
from checkmate.solvers.common.schedules import kept_by_the_forward, on_demand, peak_of
from checkmate.units import exact_bytes
from tests.solvers.checks import begun, solve
from tests.solvers.steps import random_chain
from tests.support.oracle import pinned, random_problem
from tests.support.sampling import every, in_turn


def dag(deps: list[list[int]], *which: int) -> Problem:
    """Ops of unit cost and size, all of the forward and some pinned, and a result that reads the last of them."""
    n = len(deps) + 1
    return pinned(Problem.from_dag([*deps, [n - 2]], [1] * n, [1] * n, outputs=[n - 1]), *which)


def parting_ops(problem: Problem) -> list[int]:
    """By definition: without the op, no part of the graph has both something before it and something after it."""
    line = flow(problem)
    found = []
    for v in sorted(k for k in line if line.in_degree(k) and line.out_degree(k)):
        rest = line.to_undirected()
        rest.remove_node(v)
        before, after = nx.ancestors(line, v), nx.descendants(line, v)
        if not any(part & before and part & after for part in nx.connected_components(rest)):
            found.append(v)
    return found


@in_turn(seed=range(40))
def test_on_anything(seed: int) -> None:
    problem = random_problem(seed, most_ops=16)
    points, line = articulation_points(problem), linearized(problem)
    assert [*points] == parting_ops(problem)
    assert {*points, *chain(problem)} <= {*line}
    assert all(k < problem.graph.forward_length for k in line)
    assert not any(droppable(problem).isdisjoint(problem.graph.ops[k].outputs) for k in line)


def test_articulation_points_of_a_residual_network_are_its_stem_and_the_ends_of_its_blocks() -> None:
    problem = dags.resnet((2, 2, 2, 2))
    targets = [op.target for op in problem.graph.ops[: problem.graph.forward_length]]
    adds = [k for k, target in enumerate(targets) if target == "add"]
    assert targets[:5] == ["load", "conv", "norm", "relu", "pool"]
    assert len(adds) == 8
    assert {targets[k + 1] for k in adds} == {"relu"}
    assert articulation_points(problem) == (1, 2, 3, 4, *sorted(k for add in adds for k in (add, add + 1)))


def masked() -> Problem:
    """A mask made of nothing in two steps, which three ops of a chain read; the chain begins with what is given."""
    reads = [(), (1,), (0,), (3, 2), (4, 2), (5, 2), (6,)]
    values = [Value("x", 4, None, "input"), *(Value(f"v{k}", 4, k) for k in range(7))]
    ops = [Op(f"op{k}", "f", tuple(sorted(read)), (k + 1,)) for k, read in enumerate(reads)]
    return Problem(Graph(tuple(ops), tuple(values), (7,)), Profile(np.ones(7), np.zeros(7)))


BRANCH: list[list[int]] = [[], [0], [], [1, 2], [0, 3], [4], [], [5, 6], [7]]  # around op 3, which has a side input
COPY: list[list[int]] = [[], [0], [1], [2], [3], [1, 2, 3], [4]]  # of running statistics, at the end of a network
DROPOUT: list[list[int]] = [[], [0], [1], [0, 2], [3]]  # op 1 draws a mask, op 2 makes noise of it, op 3 applies that


# the problem, articulation points, the chain if it is one, and what may be kept
SHAPES: dict[str, tuple[Problem, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]] = {
    "chain": (dags.unit_chain(6), (1, 2, 3, 4, 5), tuple(range(7)), tuple(range(7))),
    "side input on a branch": (dag(BRANCH), (4, 5, 7), None, None),
    "copy of all": (dag(COPY), (1, 4), None, None),
    "that is pinned": (dag(COPY, 5), (1, 2, 3, 4), None, None),
    "dropout": (dag(DROPOUT, 1), (3,), (0, 3, 4), None),
    "constants": (masked(), (3, 4), (2, 3, 4, 5), (0, 1, 2, 3, 4, 5)),  # op 2 begins, op 5 ends what may run again
}


@pytest.mark.parametrize("shape", SHAPES)
def test_articulation_points_and_chains(shape: str) -> None:
    """Side inputs, constants and what is pinned tie nothing together; constants may be kept."""
    problem, points, line, may_be_kept = SHAPES[shape]
    assert list(articulation_points(problem)) == parting_ops(problem) == [*points]
    if line is not None:
        assert (why_no_chain(problem), chain(problem)) == (None, line)
    assert may_be_kept in (None, linearized(problem))


def test_what_is_a_chain_and_why_others_are_none() -> None:
    """Several outputs of an op, such as the indices of a max-pool, and what the backward reads do not matter."""
    for shape in (dags.unit_chain(5), dags.vgg(8)):
        assert (why_no_chain(shape), chain(shape)) == (None, linearized(shape))
    for net in (dags.resnet, dags.unet, dags.mobilenet, dags.gpt):
        assert "is read by" in str(why_no_chain(net()))
    assert why_no_chain(dag([[], [0], [0, 1]])) == "what op0 makes is read by op1 and op2"
    assert why_no_chain(dag([[], [0], [], [2], [1, 3], [4]])) == "op4 reads what op1 makes, with op3 in between"


@in_turn(seed=range(40))
def test_what_is_kept_is_what_reaches_the_backward(seed: int) -> None:
    """The checkpoints, all after the last of them, and what is always at hand; nothing else of the forward."""
    problem = random_problem(seed, most_ops=16)
    graph, checkpoints = problem.graph, linearized(problem)[1::3]
    last = max(checkpoints, default=-1)
    here = kept(problem, checkpoints)
    for k, op in enumerate(graph.ops[: graph.forward_length]):
        for v in op.outputs:
            free = op.pinned is not None or v in graph.outputs or problem.sizes[v] == 0
            assert (v in here) == (k in checkpoints or k > last or free)
    assert all(graph.values[v].producer < graph.forward_length for v in here)


def over(sizes: Iterable[int], b: int) -> tuple[int, ...]:
    """By definition: the places at which the bytes since the last exceed b."""
    since, chosen = 0, []
    for place, size in enumerate(sizes):
        since += size
        if since > b:
            chosen, since = [*chosen, place], 0
    return tuple(chosen)


def test_selections_are_all_there_are() -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 12):
        sizes = rng.integers(1, 20, n).tolist()
        filled = list(itertools.accumulate(sizes))
        known = [over(sizes, b) for b in range(filled[-1] + 1)]
        assert selections(filled) == [chosen for chosen, _ in itertools.groupby(known)]
        few = selections(filled, most=4)
        assert (len(few) <= 5, few[0], few[-1]) == (True, tuple(range(n)), ())
        assert set(few) <= set(known)


@pytest.mark.slow
@in_turn(seed=every(3, range(30)))
def test_greedy_is_the_best_choice_of_all_thresholds_by_brute_force(seed: int) -> None:
    """Every b from 0 to all bytes, one by one."""
    problem = random_chain(100 + seed, layers=6)
    sizes, found = problem.sizes.tolist(), []
    for b in range(sum(sizes) + 1):
        R = kept_by_the_forward(problem, kept(problem, over(sizes[: problem.graph.forward_length], b)))
        found.append((float(R.sum(axis=0) @ problem.seconds), peak_of(problem, R)))
    for budget in {peak for _, peak in found}:
        best = min(cost for cost, peak in found if peak <= budget)
        for name in ("chen-greedy", "linearized-greedy"):
            assert solve(name, problem, budget).cost == best
    least = min(peak for _, peak in found)
    assert solve("chen-greedy", problem, least - 1).details["peak"] == least


def test_without_a_backward_or_candidates_all_is_kept() -> None:
    problem = Problem.from_dag([[k - 1] if k else [] for k in range(9)], [1] * 9, [1] * 9)
    assert (solve("chen-sqrt", problem, 2).cost, solve("ap-greedy", problem, 1).details["peak"]) == (9.0, 2)
    problem = Problem.from_dag([[], [0], [0, 1], [0, 1, 2]], [1] * 4, [1] * 4, forward=3)
    assert articulation_points(problem) == ()
    assert solve("ap-sqrt", problem, 4).cost == solve("ap-greedy", problem, 4).cost == 4.0


@in_turn(seed=range(40))
def test_the_last_node_is_all_that_is_kept(seed: int) -> None:
    problem = random_problem(seed, most_ops=12)
    graph, S = problem.graph, solve("last-node", problem, 10**6).schedule.S
    stays = {v for op in graph.ops if op.pinned is not None for v in op.outputs} | set(graph.outputs)
    for t in range(1, len(graph.ops)):
        assert set(np.flatnonzero(S[t])) <= stays | set(graph.ops[t - 1].outputs)


def test_last_node_runs_gradients_again_too_and_says_what_it_takes() -> None:
    problem = dags.resnet((1, 1))
    peak = peak_of(problem, on_demand(problem, {t: op.outputs for t, op in enumerate(problem.graph.ops)}))
    assert solve("last-node", problem, peak).schedule.recomputed[problem.graph.forward_length :].any()
    refused = solve("last-node", problem, peak - 1)
    assert refused.details == {"tried": 1, "peak": peak}
    assert refused.message == f"the smallest peak it reaches is {exact_bytes(peak)}, and it has no other schedule"


CHAIN = dags.unit_chain(40)
BUDGET = 25


def runs(setting: int) -> np.ndarray:
    """Keep the last values of the forward, as many as the setting says: more is cheaper and takes more memory."""
    return kept_by_the_forward(CHAIN, range(41 - setting, 41))


OUTCOMES = [(float(runs(setting).sum()), peak_of(CHAIN, runs(setting))) for setting in range(42)]
BEST = min(cost for cost, peak in OUTCOMES if peak <= BUDGET)


@pytest.mark.parametrize("tries", [16, 24, 32, 41, 42])
def test_the_cheapest_of_many_settings_is_found_and_none_is_tried_twice(tries: int) -> None:

    incumbent, asked = begun(CHAIN, BUDGET), Mock(wraps=runs)
    remarks = cheapest(incumbent.task, incumbent, "mine", 42, asked, {}, lambda best: {"best": best}, tries=tries)
    best = remarks.details["best"]
    assert asked.call_count == len({call.args for call in asked.call_args_list}) == tries
    assert OUTCOMES[best] == (incumbent.cost, peak_of(CHAIN, incumbent.R))
    assert incumbent.cost == BEST
    assert remarks == Remarks(details={"best": best, "tried": tries})


def test_settings_are_tried_in_bounded_time_and_without_a_plan_the_smallest_peak_is_named() -> None:
    late, least = begun(CHAIN, BUDGET, seconds=0.0), min(peak for _, peak in OUTCOMES)
    assert cheapest(late.task, late, "mine", 42, runs, tries=42).details["tried"] == 1
    tight = begun(CHAIN, least - 1)
    remarks = cheapest(tight.task, tight, "mine", 42, runs, {"a": 1}, tries=42, remedy="; ask another")
    assert remarks.details == {"a": 1, "tried": 42, "peak": least}
    assert remarks.message == f"the smallest peak it reaches is {least} B; ask another"
    problem = random_chain(5, layers=120)  # of many bytes per op
    details = solve("chen-greedy", problem, problem.keep_all_peak // 4, tries=20).details
    assert details["selections"] > details["tried"] == 20
