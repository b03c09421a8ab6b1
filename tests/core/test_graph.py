"""A graph holds what it is given, and refuses what makes no sense by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkmate.core.graph import MAX_BYTES, Graph, Op, Value
from checkmate.errors import InvalidProblem
from tests.support.oracle import random_problem
from tests.support.sampling import in_turn

OPS = Op("embed", "f", (0,), (1,)), Op("norm", "f", (1,), (2, 3)), Op("norm_grad", "f", (1, 3), (4,), "backward")
VALUES = Value("tokens", 8, None, "input"), Value("x", 4, 0), Value("y", 4, 1), Value("mean", 1, 1), Value("dx", 4, 2)
GRAPH = Graph(OPS, VALUES, (2, 4))


def test_users_and_deps() -> None:
    assert GRAPH.users == ((0,), (1, 2), (), (2,), ())
    assert GRAPH.deps == ((), (0,), (0, 1))
    assert GRAPH.forward_length == 2
    assert Graph((Op("a", "f", (), (0,), "backward"),), (Value("x", 1, 0),), (0,)).forward_length == 0
    assert Graph(OPS, _with_value(1, size_bytes=MAX_BYTES), (2, 4)).values[1].size_bytes == MAX_BYTES  # the largest


@in_turn(seed=range(20))
def test_ops_stand_behind_what_they_read(seed: int) -> None:
    graph = random_problem(seed, most_ops=8).graph
    assert all(dep < k for k, deps in enumerate(graph.deps) for dep in deps)
    users = [{k for k, op in enumerate(graph.ops) if v in op.inputs} for v in range(len(graph.values))]
    assert [set(found) for found in graph.users] == users


def _with_op(k: int, **change: object) -> tuple[Op, ...]:
    return (*OPS[:k], replace(OPS[k], **change), *OPS[k + 1 :])


def _with_value(v: int, **change: object) -> tuple[Value, ...]:
    return (*VALUES[:v], replace(VALUES[v], **change), *VALUES[v + 1 :])


def test_refused() -> None:
    for *graph, says in (
        ((), (), (), "The graph is empty"),
        (_with_op(0, inputs=(2,)), VALUES, (2, 4), "'embed' reads 'y', which is made by 'norm', itself or a later op"),
        (_with_op(0, inputs=(1,)), VALUES, (2, 4), "'embed' reads 'x', which is made by 'embed', itself"),
        (_with_op(0, inputs=(5,)), VALUES, (2, 4), "'embed' names value 5, but there are 5"),
        (_with_op(0, inputs=(-1,)), VALUES, (2, 4), "'embed' names value -1"),
        (_with_op(0, inputs=(0, 0)), VALUES, (2, 4), "'embed' lists an input or an output twice"),
        (_with_op(1, outputs=(2, 2)), VALUES, (2, 4), "Value 'mean' names 'norm' as its producer"),
        (_with_op(2, outputs=(4, 3)), VALUES, (2, 4), "'norm_grad' makes 'mean', which names another producer"),
        (_with_op(2, outputs=()), VALUES, (2, 4), "Value 'dx' names 'norm_grad' as its producer"),
        (_with_op(0, phase="backward"), VALUES, (2, 4), "'norm' is of the forward but stands after 'embed'"),
        (_with_op(0, phase="sideways"), VALUES, (2, 4), "'embed' has phase 'sideways'"),
        (OPS, _with_value(1, size_bytes=-1), (2, 4), "Value 'x' has size -1"),
        (OPS, _with_value(1, size_bytes=MAX_BYTES + 1), (2, 4), "Value 'x' has size 9007199254740993"),
        (OPS, _with_value(1, size_bytes=1.0), (2, 4), "Value 'x' has size 1.0"),
        (OPS, _with_value(1, size_bytes=True), (2, 4), "Value 'x' has size True"),
        (OPS, _with_value(1, producer=3), (2, 4), "Value 'x' is made by op 3, but there are 3"),
        (OPS, _with_value(1, producer=-1), (2, 4), "Value 'x' is made by op -1"),
        (OPS, _with_value(1, producer=None), (2, 4), "'embed' makes 'x', which names another producer"),
        (OPS, _with_value(1, role="guest"), (2, 4), "Value 'x' has role 'guest'"),
        (OPS, VALUES, (5,), "Output 5 is not a value"),
        (OPS, VALUES, (-1,), "Output -1 is not a value"),
        (OPS, VALUES, (2, 2), "An output is listed twice"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            Graph(*graph)
