"""Where checkpoints may go: chains, articulation points, all in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.networks import dags
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.solvers.baselines.checkpoint_places import (
    articulation_points,
    chain,
    droppable,
    flow,
    linearized,
    why_no_chain,
)
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn


def dag(deps: list[list[int]], pinned: Iterable[int] = ()) -> Problem:
    """Ops of unit cost and size, all of the forward, and a result that reads the last of them."""
    n = len(deps) + 1
    problem = Problem.from_dag([*deps, [n - 2]], [1] * n, [1] * n, outputs=[n - 1])
    ops = [replace(op, pinned="draws" if k in set(pinned) else None) for k, op in enumerate(problem.graph.ops)]
    return Problem(replace(problem.graph, ops=tuple(ops)), problem.profile)


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


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_articulation_points_are_what_parts_before_from_after(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    deps = [data.draw(st.lists(st.integers(0, k - 1), max_size=2, unique=True)) if k else [] for k in range(n)]
    problem = dag(deps, pinned=data.draw(st.sets(st.integers(0, n - 1), max_size=2)))
    assert list(articulation_points(problem)) == parting_ops(problem)


@in_turn(seed=range(40))
def test_on_anything(seed: int) -> None:
    problem = random_problem(seed, most_ops=16)
    assert list(articulation_points(problem)) == parting_ops(problem)
    assert set(articulation_points(problem)) | set(chain(problem)) <= set(linearized(problem))
    for k in linearized(problem):
        assert k < problem.graph.forward_length
        assert not droppable(problem).isdisjoint(problem.graph.ops[k].outputs)


def test_articulation_points_of_a_chain_are_its_inner_ops() -> None:
    problem = dags.unit_chain(6)
    assert articulation_points(problem) == (1, 2, 3, 4, 5)
    assert articulation_points(problem) == tuple(sorted(nx.articulation_points(flow(problem).to_undirected())))
    assert chain(problem) == linearized(problem) == tuple(range(7))


def test_articulation_points_of_a_residual_network_are_its_stem_and_the_ends_of_its_blocks() -> None:
    problem = dags.resnet((2, 2, 2, 2))
    targets = [op.target for op in problem.graph.ops[: problem.graph.forward_length]]
    adds = [k for k, target in enumerate(targets) if target == "add"]
    assert targets[:5] == ["load", "conv", "norm", "relu", "pool"]
    assert len(adds) == 8
    assert {targets[k + 1] for k in adds} == {"relu"}
    assert articulation_points(problem) == (1, 2, 3, 4, *sorted(k for add in adds for k in (add, add + 1)))


def test_a_side_input_makes_no_articulation_point_on_a_branch() -> None:
    """Op 3 parts its side input from the rest, but the other branch leads around it; a true one may have one too."""
    problem = dag([[], [0], [], [1, 2], [0, 3], [4], [], [5, 6], [7]])
    assert 3 in set(nx.articulation_points(flow(problem).to_undirected()))
    assert articulation_points(problem) == (4, 5, 7)


def test_pinned_ops_tie_nothing_together() -> None:
    """As the copy of all running statistics would, at the end of a network with batch norms."""
    deps = [[], [0], [1], [2], [3], [1, 2, 3]]
    assert articulation_points(dag([*deps, [4]])) == (1, 4)
    assert articulation_points(dag([*deps, [4]], pinned=[5])) == (1, 2, 3, 4)


def masked() -> Problem:
    """A mask made of nothing in two steps, which three ops of a chain read; the chain begins with what is given."""
    reads = [(), (1,), (0,), (3, 2), (4, 2), (5, 2), (6,)]
    values = [Value("x", 4, None, "input"), *(Value(f"v{k}", 4, k) for k in range(7))]
    ops = [Op(f"op{k}", "f", tuple(sorted(read)), (k + 1,)) for k, read in enumerate(reads)]
    return Problem(Graph(tuple(ops), tuple(values), (7,)), Profile(np.ones(7), np.zeros(7)))


def test_constants_tie_nothing_together_but_may_be_kept() -> None:
    assert articulation_points(masked()) == (3, 4)  # op 2 begins, op 5 ends what may run again
    assert linearized(masked()) == (0, 1, 2, 3, 4, 5)
    assert chain(masked()) == (2, 3, 4, 5)
    assert why_no_chain(masked()) is None


@pytest.mark.parametrize("shape", [dags.unit_chain(5), dags.vgg(8)], ids=["unit", "vgg"])
def test_chains(shape: Problem) -> None:
    """Several outputs of an op, such as the indices of a max-pool, and what the backward reads do not matter."""
    assert why_no_chain(shape) is None
    assert chain(shape) == linearized(shape)


@pytest.mark.parametrize("shape", [dags.resnet, dags.unet, dags.mobilenet, dags.gpt])
def test_no_chains(shape: Callable[[], Problem]) -> None:
    assert "is read by" in str(why_no_chain(shape()))


def test_what_is_no_chain_and_why() -> None:
    assert why_no_chain(dag([[], [0], [0, 1]])) == "what op0 makes is read by op1 and op2"
    two_into_one = dag([[], [0], [], [2], [1, 3], [4]])
    assert why_no_chain(two_into_one) == "op4 reads what op1 makes, with op3 in between"


def test_a_dropout_on_a_chain_leaves_it_one() -> None:
    """Op 1 draws a mask and is pinned; op 2 makes noise of it, a side input; op 3 applies the noise."""
    problem = dag([[], [0], [1], [0, 2], [3]], pinned=[1])
    assert why_no_chain(problem) is None
    assert chain(problem) == (0, 3, 4)
    assert articulation_points(problem) == (3,)
