"""What runs in parts may write its first result over an input that is split as it is."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.capture.splits.find_region import Choice, StepToSplit, bytes_of, region_at
from checkmate.capture.splits.parts import InParts, Region, apart, in_parts
from checkmate.capture.ways.table import call_over, positions
from tests.support.bits import assert_same_bits

aten = torch.ops.aten


def _sum_of_two(length: int) -> tuple[Region, InParts]:
    """Of a product, made within, and another; the product with a third matrix is there before."""

    def step(grad: Tensor, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.mm(grad, h) + torch.mm(x, y)

    made = (torch.randn(64, 16), torch.randn(16, 12), torch.randn(64, 8), torch.randn(8, 12))
    graph = make_fx(step, tracing_mode="fake")(*made).graph
    first, second = graph.find_nodes(op="call_function", target=aten.mm.default)
    (node,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    step = StepToSplit(graph, (), {first.name})
    region = region_at(step, node, Choice(0, 1, 12, 16, down=False))
    assert region is not None
    assert second in region.splits
    alone = apart(region)
    assert alone is not None
    parts = in_parts(alone, length)
    assert parts is not None
    return region, parts


def _call(parts: InParts) -> fx.Node:
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = []
    for n in parts.whole.find_nodes(op="placeholder"):
        like = graph.placeholder("x")
        with mode:
            like.meta["val"] = torch.empty(n.meta["val"].shape)
        nodes.append(like)
    call = graph.create_node("call_function", parts, tuple(nodes))
    with mode:
        call.meta["val"] = tuple(torch.empty(m.shape) for m in parts.made)
    return call


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_region_writes_over_an_input_that_is_split_as_its_result_is(length: int) -> None:
    region, parts = _sum_of_two(length)
    (position,) = positions(_call(parts))
    inputs = [torch.randn(n.meta["val"].shape) for n, _ in region.inputs()]
    (plain,) = parts(*inputs)
    target, args, kwargs = call_over(parts, tuple(inputs), {}, position)
    (made,) = target(*args, **kwargs)
    assert made is inputs[position]
    assert_same_bits(made, plain)


def test_where_the_last_part_overlaps_another_nothing_is_written_over() -> None:
    _, parts = _sum_of_two(5)
    assert parts.parts == 3
    assert positions(_call(parts)) == ()


def test_what_is_written_over_an_input_counts_once() -> None:
    region, parts = _sum_of_two(6)
    _, overlapping = _sum_of_two(5)
    (result,) = parts.made
    assert bytes_of(overlapping, region) - overlapping.inner_bytes == 2 * 64 * 12 * 4
    assert result.shape == (64, 12)
    assert bytes_of(parts, region) - parts.inner_bytes == 64 * 12 * 4
