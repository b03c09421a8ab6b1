"""The code that runs is the module's code, with each op bound to itself."""

from __future__ import annotations

import operator
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.fx as fx

from checkmate.codegen.boxed import _BINDINGS, boxed
from tests.support.seen import Seen

Pair = namedtuple("Pair", "size other")
M, X, IMAGE = torch.rand(4, 4), torch.rand(2, 4, 4), torch.rand(1, 1, 4, 4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_adaptive_avg_pool2d": (IMAGE, [2, 2]),
    "_foreach_copy_": ([torch.rand(4)], [torch.rand(4)]),
    "_log_softmax": (X, 1, False),
    "_log_softmax_backward_data": (X, X, 1, torch.float32),
    "_softmax": (X, 1, False),
    "_softmax_backward_data": (X, X, 1, torch.float32),
    "add": (M, 1),
    "addmm": (M, M, M),
    "bmm": (X, X),
    "cat": ([M, M], 1),
    "clone": (M,),
    "convolution": (IMAGE, torch.rand(1, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "div": (M, 2.0),
    "embedding": (M, torch.tensor([1, 2])),
    "expand": (M, [2, 4, 4]),
    "gelu": (M,),
    "hardtanh": (M, 0, 6),
    "max_pool2d_with_indices": (IMAGE, [2, 2], [2, 2]),
    "mean": (IMAGE, [2, 3], True),
    "mm": (M, M),
    "mul": (M, 2.0),
    "native_layer_norm": (M, [4], None, None, 1e-5),
    "neg": (M,),
    "permute": (M, [1, 0]),
    "relu": (M,),
    "select": (M, 0, 1),
    "sigmoid": (M,),
    "silu": (M,),
    "squeeze": (IMAGE, 0),
    "sub": (M, 1.0),
    "sum": (M, [0], True),
    "t": (M,),
    "tanh": (M,),
    "transpose": (M, 0, 1),
    "unsqueeze": (M, 0),
    "view": (M, [2, 8]),
    "where": (M > 0.5, M, M),
}


@pytest.mark.parametrize("op", _BINDINGS, ids=str)
def test_a_binding_runs_the_op_it_stands_for(op: torch._ops.OpOverload) -> None:
    name = op._schema.name.removeprefix("aten::")
    with torch.no_grad(), Seen() as seen:
        _BINDINGS[op](*ARGUMENTS[name])
    assert seen.ops == [op]


def test_the_list_is_cleared_before_anything_runs() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, y)),))
    run = boxed(fx.GraphModule(torch.nn.Module(), graph))
    inputs = [torch.full((2,), 3.0), torch.full((2,), 5.0)]
    assert run(inputs)[0].tolist() == [15.0, 15.0]
    assert inputs == []


def test_modules_that_differ_in_sizes_share_their_code() -> None:
    def of(size: int, dim: int = 0) -> Any:
        graph = fx.Graph()
        x = graph.placeholder("x")
        parts = graph.call_function(torch.ops.aten.split.Tensor, (x, size, dim))
        graph.output((graph.call_function(operator.getitem, (parts, 0)), Pair(size, None), [slice(size), size, -size]))
        return boxed(fx.GraphModule(torch.nn.Module(), graph))

    four, three, other = of(4), of(3), of(3, dim=-1)
    assert four.__code__ is three.__code__ is not other.__code__
    for size, run in ((4, four), (3, three)):
        first, *rest = run([torch.arange(8)])
        assert first.tolist() == [*range(size)]
        assert rest == [Pair(size, None), [slice(size), size, -size]]


def test_an_op_of_ours_that_fails_is_named_without_its_address() -> None:
    def agree_with_ranks(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    graph = fx.Graph()
    graph.output((graph.call_function(agree_with_ranks, (graph.placeholder("x"),)),))
    with pytest.raises(ValueError, match=r"no\n  in tests\.agree_with_ranks of the forward: "):
        boxed(fx.GraphModule(torch.nn.Module(), graph))([M])
