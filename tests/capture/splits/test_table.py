"""Ops run in parts along each dimension that the rules name, and make what the whole makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.backends.tensor_state import same_bits as same
from checkmate.capture.splits.equal_bits import is_argued, same_bits
from checkmate.capture.splits.parts import InParts, Region, apart, in_parts
from checkmate.capture.splits.table import Argument, OpSplit, argument_of, split_of
from checkmate.capture.ways.batch_norm import gradient_of_input, normalized
from checkmate.capture.ways.shape_only import convolution_backward_input, max_pool2d_backward

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
R = torch.randn
GEOMETRY = [1, 1], [1, 1], [1, 1], False, [0, 0]
CLASSES = torch.arange(144).view(4, 6, 6) % 3
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[tuple[int, int], tuple[int | None, ...]]]] = {
    # op, arguments, {(result, dimension): the dimension of each tensor argument}; others have no parts
    "mm": (aten.mm.default, (R(32, 8), R(8, 64)), {(0, 0): (0, None), (0, 1): (None, 1)}),
    "addmm": (aten.addmm.default, (R(64), R(32, 8), R(8, 64)), {(0, 0): (None, 0, None), (0, 1): (0, None, 1)}),
    "bmm": (aten.bmm.default, (R(4, 8, 8), R(4, 8, 8)), {(0, 0): (0, 0), (0, 1): (1, None), (0, 2): (None, 2)}),
    "add": (aten.add.Tensor, (R(4, 8, 6), R(8, 1)), {(0, 0): (0, None), (0, 1): (1, 0), (0, 2): (2, None)}),
    "softmax": (aten._softmax.default, (R(4, 8, 6), 1, False), {(0, 0): (0,), (0, 2): (2,)}),
    "softmax backward": (
        aten._softmax_backward_data.default,
        (R(4, 8), R(4, 8).softmax(1), -1, torch.float32),
        {(0, 0): (0, 0)},
    ),
    "sum": (aten.sum.dim_IntList, (R(4, 8, 6), [1]), {(0, 0): (0,), (0, 1): (2,)}),
    "mean, kept": (aten.mean.dim, (R(4, 8, 6), [1], True), {(0, 0): (0,), (0, 2): (2,)}),
    "layer norm": (aten.native_layer_norm.default, (R(4, 8, 6), [6], R(6), R(6), 1e-5), {(0, 0): (0,), (0, 1): (1,)}),
    "group norm": (aten.native_group_norm.default, (R(4, 8, 6, 6), R(8), R(8), 4, 8, 36, 2, 1e-5), {(0, 0): (0,)}),
    "view": (aten.view.default, (R(4, 8, 6), [32, 6]), {(0, 1): (2,)}),
    "view of one": (aten.view.default, (R(1, 8, 6), [8, 6]), {(0, 0): (1,), (0, 1): (2,)}),
    "permute": (aten.permute.default, (R(4, 8, 6), [2, 0, 1]), {(0, 0): (2,), (0, 1): (0,), (0, 2): (1,)}),
    "transpose": (aten.transpose.int, (R(4, 8, 6), -1, 0), {(0, 0): (2,), (0, 1): (1,), (0, 2): (0,)}),
    "unsqueeze": (aten.unsqueeze.default, (R(4, 8), 1), {(0, 0): (0,), (0, 2): (1,)}),
    "expand": (
        aten.expand.default,
        (R(4, 1, 6), [2, 4, 8, 6]),
        {(0, 0): (None,), (0, 1): (0,), (0, 2): (None,), (0, 3): (2,)},
    ),
    "cat": (aten.cat.default, ([R(4, 8), R(4, 2)], 1), {(0, 0): (0, 0)}),
    "cat with nothing": (aten.cat.default, ([R(0), R(4, 8, 6)], -1), {(0, 0): (None, 0), (0, 1): (None, 1)}),
    "convolution": (
        aten.convolution.default,
        (R(4, 8, 9, 9), R(16, 8, 3, 3), R(16), *GEOMETRY, 1),
        {(0, 0): (0, None, None), (0, 1): (None, 0, 0)},
    ),
    "depthwise convolution": (
        aten.convolution.default,
        (R(4, 8, 9, 9), R(8, 1, 3, 3), R(8), *GEOMETRY, 8),
        {(0, 0): (0, None, None), (0, 1): (1, 0, 0)},
    ),
    "gradient of a convolution's input": (
        convolution_backward_input,
        (R(4, 16, 9, 9), R(16, 8, 3, 3), (4, 8, 9, 9), (648, 81, 9, 1), *GEOMETRY, 1),
        {(0, 0): (0, None), (0, 1): (None, 1)},
    ),
    "gradient of a convolution's weight": (
        aten.convolution_backward.default,
        (R(4, 16, 9, 9), R(4, 8, 9, 9), R(16, 8, 3, 3), [16], *GEOMETRY, 1, [False, True, True]),
        {(1, 0): (1, None, 0)},
    ),
    "pool": (aten.max_pool2d_with_indices.default, (R(4, 8, 6, 6), [2, 2], [2, 2]), {(0, 0): (0,), (0, 1): (1,)}),
    "pool backward": (
        max_pool2d_backward,
        (
            *(R(4, 8, 3, 3), torch.zeros(4, 8, 3, 3, dtype=torch.long), (4, 8, 6, 6), (288, 36, 6, 1)),
            *([2, 2], [2, 2], [0, 0], [1, 1], False),
        ),
        {(0, 0): (0, 0), (0, 1): (1, 1)},
    ),
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        (R(1, 8, 6, 6), R(1, 8, 6, 6), R(8), None, None, R(8), R(8), True, 1e-5, [True, True, True]),
        {(0, 1): (1, 1, 0, 0, 0)},
    ),
    "batch norm of given statistics": (
        normalized,
        (R(4, 8, 6, 6), R(8), R(8), R(8), R(8)),
        {(0, 0): (0, *[None] * 4), (0, 1): (1, 0, 0, 0, 0), (0, 2): (2, *[None] * 4), (0, 3): (3, *[None] * 4)},
    ),
    "batch norm backward of given sums": (
        gradient_of_input,
        (R(4, 8, 6, 6), R(4, 8, 6, 6), R(8), R(8), R(8), R(8), R(8), 144),
        {
            **{(0, dim): (dim, dim, *[None] * 5) for dim in (0, 2, 3)},
            (0, 1): (1, 1, 0, 0, 0, 0, 0),
        },
    ),
    "backward of a loss over images": (
        aten.nll_loss2d_backward.default,
        (torch.tensor(0.5), R(4, 3, 6, 6), CLASSES, R(3), 1, -100, torch.tensor(100.0)),
        {(0, 0): (None, 0, 0, None, None), (0, 2): (None, 2, 1, None, None), (0, 3): (None, 3, 2, None, None)},
    ),
    "backward of losses of pixels": (
        aten.nll_loss2d_backward.default,
        (R(4, 6, 6), R(4, 3, 6, 6), CLASSES, R(3), 0, -100, torch.tensor(0.0)),
        {(0, 0): (0, 0, 0, None, None), (0, 2): (1, 2, 1, None, None), (0, 3): (2, 3, 2, None, None)},
    ),
    "log sigmoid backward": (
        aten.log_sigmoid_backward.default,
        (R(8, 16), R(8, 16), R(8, 16)),
        {(0, 0): (0, 0, 0), (0, 1): (1, 1, 1)},
    ),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (R(4, 8, 6), torch.zeros(4, 8, dtype=torch.long), 10, -1, False),
        {(0, 1): (2, None)},
    ),
}


def node_of(op: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """The op in a graph, its tensor arguments placeholders."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def given(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(arg)
        return node

    mapped = tuple([given(a) for a in arg] if isinstance(arg, list) else given(arg) for arg in args)
    node = graph.call_function(op, mapped)
    with torch.no_grad():
        real = op(*args)
    fake = [None if t is None else mode.from_tensor(t) for t in (real if isinstance(real, tuple) else (real,))]
    node.meta["val"] = tuple(fake) if isinstance(real, tuple) else fake[0]
    return node


def region_of(node: fx.Node, split: OpSplit, units: int) -> Region:
    splits, made = {node: split}, [node]
    if isinstance(node.meta["val"], tuple):
        made = []
        for i, at in enumerate(split.results):
            if at is not None:
                face = node.graph.call_function(operator.getitem, (node, i))
                face.meta["val"] = node.meta["val"][i]
                splits[face] = OpSplit((at,), {node: None})
                made.append(face)
    return Region(splits, units, tuple(made))


def _assert_same_of_whole_numbers(parts: InParts, *, exact: bool) -> None:
    """All orders of summation give the same of these; what is no sum is within rounding."""
    inputs = [torch.randint(-8, 8, n.meta["val"].shape).float() for n in parts.whole.find_nodes(op="placeholder")]
    for whole, made in zip(fx.GraphModule({}, parts.whole)(*inputs), parts(*inputs), strict=True):
        assert same(whole, made) if exact else torch.testing.assert_close(whole, made, equal_nan=True) is None


@pytest.mark.parametrize("case", CASES)
def test_an_op_runs_in_parts_along_its_independent_dimensions_and_no_others(case: str) -> None:
    op, args, expected = CASES[case]
    node = node_of(op, args)
    vals = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    result = next(iter(expected))[0]
    for dim, size in enumerate(vals[result].shape):
        split = split_of(node, result, dim, size) if size > 1 else None
        if (result, dim) not in expected:
            assert split is None, dim
            continue
        assert split is not None, dim
        dims = expected[result, dim]
        assert tuple(split.reads[n] for n in node.all_input_nodes)[: len(dims)] == dims
        if case == "expand":  # overlaps itself: no result of its own
            continue
        alone = apart(region_of(node, split, size))
        assert alone is not None
        parts = in_parts(alone, max(1, size // 2))
        assert parts is not None
        (ops, *_) = parts.region.splits.items()
        argument = argument_of(*ops)
        assert is_argued(parts) or argument in (None, Argument.LANES), dim
        if is_argued(parts) and argument is not Argument.ORDER:
            assert same_bits(parts), dim
        else:
            _assert_same_of_whole_numbers(parts, exact=argument is Argument.ORDER)


def test_a_part_of_rows_may_be_units_of_a_merged_dimension() -> None:
    node = node_of(aten.view.default, (R(4, 8, 6), [32, 6]))
    assert split_of(node, 0, 0, 4) == OpSplit((0,), {node.all_input_nodes[0]: 0})
    assert split_of(node, 0, 0, 32) is None


def test_an_elementwise_op_that_makes_two_has_no_parts() -> None:
    node = node_of(aten.frexp.Tensor, (R(4, 8),))
    assert split_of(node, 0, 0, 4) is None


def test_a_split_along_what_is_summed_has_other_bits() -> None:
    """What a wrong rule would give is not offered."""
    graph = make_fx(lambda a, b: a.mm(b), tracing_mode="fake")(R(64, 300), R(300, 8)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    wrong = OpSplit((0,), dict.fromkeys(node.all_input_nodes))
    alone = apart(Region({node: wrong}, 64, (node,)))
    assert alone is not None
    assert in_parts(alone, 32) is None  # the whole is no part
