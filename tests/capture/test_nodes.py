"""Ops of ours stand in graphs as functions do: called, printed, copied, and written as code."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.fx as fx

from checkmate.capture.nodes import PlannedOp, call, has_effect, is_collective, rehearsed, target_name, updated
from checkmate.codegen.boxed import boxed
from checkmate.torch_internals.capturing import FakeTensorMode


def _adding(number: float, does: str | None = None, namespace: str = "checkmate") -> PlannedOp:
    return PlannedOp("add", lambda x, y: x + y * number, lambda: torch.add, does, (1,), namespace=namespace)


def _graph() -> fx.Graph:
    """Two ops of one name that do not do the same."""
    graph = fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    x.meta["val"] = y.meta["val"] = FakeTensorMode().from_tensor(torch.zeros(2))
    twice = graph.call_function(_adding(2.0), (x, y))
    graph.output(graph.call_function(_adding(3.0, "adds to {}"), (twice, y)))
    return graph


def test_two_ops_of_one_name_are_two_in_code_and_in_copies_of_it() -> None:
    module = fx.GraphModule({}, _graph())
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 10.0])
    for copy in (module, deepcopy(module), fx.GraphModule(module, module.graph)):
        assert copy(x, y).tolist() == [6.0, 52.0]
        assert boxed(copy)([x, y]).tolist() == [6.0, 52.0]
    assert "nodes.add](args = (%x, %y)" in str(module.graph)


def test_an_op_says_what_it_does() -> None:
    x, y, twice, thrice, _ = _graph().nodes
    assert [target_name(node) for node in (twice, thrice)] == ["checkmate.add"] * 2
    assert [has_effect(node) for node in (twice, thrice)] == [False, True]
    assert [updated(node) for node in (twice, x)] == [[y], []]
    assert not is_collective(twice)
    twice.target = _adding(2.0, namespace="_c10d_functional")
    assert is_collective(twice)
    assert target_name(twice) == "_c10d_functional.add"


def test_a_call_that_is_inserted_rehearses_its_op_and_runs_it_not() -> None:
    graph = _graph()
    x, y, *_, output = graph.nodes
    fails = PlannedOp("fails", lambda *_: 1 / 0, lambda: lambda pair: pair[0].unsqueeze(0))
    with graph.inserting_before(output):
        node = call(x, fails, ([x, y],))
    assert node.meta["val"].shape == (1, 2)
    assert rehearsed(torch.add) is torch.add
