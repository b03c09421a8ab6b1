"""Each op of the table of candidates leaves, over each argument that it names, the bits of the plain op.

Some go block by block, and need a block of memory beside it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.inplace import kernels
from checkmate.capture.inplace.rules import TABLE, block_bytes, call_over, positions, positions_to_try
from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

aten = torch.ops.aten
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, -3e38, 0.5, -0.5])
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}
SHAPE = (4, 6, 10, 26)  # 6,240 numbers
SAME_SIZE = [1, 1], [1, 1], [1, 1], False, [0, 0], 1  # of a convolution by 3 x 3
OTHERS: dict[Any, tuple[Any, ...]] = {  # arguments of an op after the tensors of one shape that it begins with
    **dict.fromkeys((aten.add.Scalar, aten.sub.Scalar, aten.lerp.Scalar), (0.3,)),
    aten.mul.Scalar: (-0.7,),
    aten.div.Scalar: (3.0,),
    aten.rsub.Scalar: (1.0,),
    aten.pow.Tensor_Scalar: (3.0,),
    **dict.fromkeys((aten.clamp.default, aten.hardtanh_backward.default), (-0.5, 0.7)),
    aten.clamp_max.default: (0.7,),
    aten.clamp_min.default: (-0.5,),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.softplus_backward.default: (1.0, 20.0),
    aten.threshold_backward.default: (0.1,),
    aten.binary_cross_entropy_backward.default: (None, 0),
    aten.mse_loss_backward.default: (0,),
    aten.smooth_l1_loss_backward.default: (0, 1.0),
    aten._softmax.default: (1, False),
    aten._log_softmax.default: (3, False),
    aten._safe_softmax.default: (3,),
    aten._softmax_backward_data.default: (3, torch.float32),
    aten._log_softmax_backward_data.default: (1, torch.float32),
}
CONTIGUOUS_ONLY = {aten.nll_loss2d_backward.default}  # elsewhere signs of NaN may differ


def _draw(dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """Numbers of many sizes, of which the first are special, in another order for each argument."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=draw) * 10 ** (4 * torch.rand(SHAPE, generator=draw) - 2)
    some = SPECIAL[torch.randint(len(SPECIAL), (520,), generator=draw)]
    x.view(-1)[:520] = some  # two rows of channels: other rows stay finite
    return LAYOUTS[layout](x.to(dtype))


def _arguments(op: Any, dtype: torch.dtype, layout: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y, z = (_draw(dtype, layout, seed) for seed in range(3))
    where = torch.rand(SHAPE, generator=torch.Generator().manual_seed(3)) < 0.5
    weights = torch.rand(4, SHAPE[1], generator=torch.Generator().manual_seed(4)).to(dtype).unbind()
    size = [2, 2], [2, 2], [0, 0]
    kernel = torch.randn(6, 6, 3, 3, generator=torch.Generator().manual_seed(5)).to(dtype)
    special: dict[Any, tuple[Any, ...]] = {
        aten.elu_backward.default: (x, 1.0, 1.0, 1.0, False, y),
        aten.masked_fill.Scalar: (x, where, -0.5),
        aten.masked_fill.Tensor: (x, where, torch.tensor(-0.5, dtype=dtype)),
        aten.where.self: (where, x, y),
        aten._native_batch_norm_legit_functional.default: (x, *weights, True, 0.1, 1e-5),
        aten.native_batch_norm_backward.default: (x, y, weights[0], None, None, *weights[1:3], True, 1e-5, [True] * 3),
        aten.convolution.default: (x, kernel, weights[0], *SAME_SIZE),
        aten.convolution_backward.default: (x, y, kernel, None, *SAME_SIZE, [True, False, False]),
        convolution_backward_input: (x, kernel, SHAPE, x.stride(), *SAME_SIZE),
        aten.avg_pool2d_backward.default: (x[:, :, ::2, ::2].contiguous(), y, *size, False, True, None),
        aten.nll_loss_backward.default: (
            torch.tensor(-0.5, dtype=dtype), x.reshape(-1, 26), torch.arange(240) % 26, None, 1, -100,
            torch.tensor(240.0, dtype=dtype),
        ),
        aten.nll_loss2d_backward.default: (
            torch.tensor(-0.5, dtype=dtype), x, torch.arange(1040).view(4, 10, 26) % 6, None, 1, -100,
            torch.tensor(1040.0, dtype=dtype),
        ),
    }  # fmt: skip
    if op is aten.max_pool2d_with_indices_backward.default:
        pooled, indices = aten.max_pool2d_with_indices(x, *size)
        return (pooled, x, *size, [1, 1], False, indices), {}
    if op in special:
        return special[op], {}
    count = sum(str(a.type) == "Tensor" for a in op._schema.arguments if not a.kwarg_only)
    return (*(x, y, z)[:count], *OTHERS.get(op, ())), {"rounding_mode": "trunc"} if op is aten.div.Tensor_mode else {}


def _node(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    graph = fx.Graph()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    node = graph.call_function(op, tuple(map(placeholder, args)), kwargs)
    node.meta["val"] = op(*args, **kwargs)
    return node


def _over_each(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Run an op over each argument that it may write over: its bits and strides, and no copy beyond its block."""
    node, expected = _node(op, args, kwargs), op(*args, **kwargs)
    plain = measure_peak(lambda: op(*args, **kwargs)).peak
    for i in positions(node):
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        into, over_args, over_kwargs = call_over(op, own, kwargs, i)
        made: list[Any] = []
        use = measure_peak(lambda: made.append(into(*over_args, **over_kwargs)))  # noqa: B023  # called at once
        first = made[0] if isinstance(made[0], Tensor) else made[0][0]
        assert first is own[i]
        assert first.stride() == args[i].stride()
        assert_same_bits(made[0], expected)
        assert use.peak <= plain - first.nbytes + (block_bytes(node) or 0), "it makes a copy"
        assert_same_bits(*([a for j, a in enumerate(some) if j != i] for some in (own, args)))
    return {*positions(node)}


@pytest.mark.parametrize("op", TABLE, ids=lambda op: getattr(op, "__name__", str(op)))
def test_an_op_of_the_table_leaves_its_bits_over_each_argument(op: Any) -> None:
    tried = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for layout in LAYOUTS:
            args, kwargs = _arguments(op, dtype, "contiguous" if op in CONTIGUOUS_ONLY else layout)
            if op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
                args = (*args[:-1], dtype)
            tried |= _over_each(op, args, kwargs)
    assert tried == set(TABLE[op].positions)


FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def _numbers(*shape: int, seed: int, dtype: torch.dtype, layout: str) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return drawn.contiguous(memory_format=FORMATS[layout])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_gradients_of_a_batch_norm_block_by_block(training: bool, dtype: torch.dtype, layout: str) -> None:
    for seed, shape in enumerate([(4, 48, 14, 14), (2, 70, 9, 5)]):
        grad, x = (_numbers(*shape, seed=seed + i, dtype=dtype, layout=layout) for i in (0, 2))
        weight, mean, std, nothing = torch.rand(4, shape[1]).unbind()
        saved = (mean, std) if training else (nothing[:0], nothing[:0])
        for wanted in ([True, True, True], [True, False, False]):
            statistics = (None, None, *saved) if training else (mean, std + 0.5, *saved)
            args = (grad, x, weight if wanted[1] else None, *statistics, training, 1e-5, wanted)
            assert _over_each(aten.native_batch_norm_backward.default, args, {}) == {0, 1}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("groups", [1, 24], ids=["dense", "by channel"])
def test_a_convolution_and_the_gradient_of_its_input_block_by_block(groups: int, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad, x = (_numbers(8, 24, 20, 20, seed=i, dtype=dtype, layout=layout) for i in (0, 2))
        weight = _numbers(24, 24 // groups, 3, 3, seed=1, dtype=dtype, layout=layout)
        geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        args = (grad, x, weight, None, *geometry, [True, False, False])
        assert kernels.convolution_backward_block(*args) == kernels.convolution_block(x) == x.nbytes // 4
        assert _over_each(aten.convolution_backward.default, args, {}) == {0, 1}
        assert _over_each(aten.convolution.default, (x, weight, None, *geometry), {}) == {0}


def test_a_block_is_a_small_part_of_what_is_large() -> None:
    large, wanted = torch.empty(64, 64, 112, 112, device="meta"), [True, False, False]
    few = large[:1, :, :7, :7]
    beside = large[:8].contiguous(memory_format=torch.channels_last)
    for x, block in (
        (large, large[:, :1]),  # a channel is more than a mebibyte
        (large[:8], large[:8, :2]),
        (few, few[:, :4]),
        (beside, beside[:, :16]),
    ):
        assert kernels.batch_norm_block(x, x, wanted) == 3 * block.nbytes
    assert kernels.convolution_block(large) == large[:8].nbytes
    assert kernels.convolution_block(large[:4]) == large[:2].nbytes


def test_what_makes_more_or_less_than_an_inputs_gradient_or_few_images_is_not_taken_apart() -> None:
    x, weight = torch.empty(8, 4, 6, 6, device="meta"), torch.empty(4, 4, 3, 3, device="meta")
    assert kernels.convolution_backward_block(x, x, weight, None, [True, False, False]) is not None
    assert kernels.convolution_backward_block(x, x, weight, None, [True, True, False]) is None
    assert kernels.convolution_block(x[:3]) is None
    assert kernels.batch_norm_block(x, x, [False, True, True]) is None


def test_no_variant_of_the_table_makes_a_copy_of_its_own() -> None:
    """PyTorch generates some: they fill a new tensor and copy it."""
    variants = [written.into for written in TABLE.values() if isinstance(written.into, torch._ops.OpOverload)]
    assert variants
    assert not [op for op in variants if torch.Tag.generated in op.tags]
    assert torch.Tag.generated in aten.relu.out.tags  # as this one is


LIKE = torch.ones(4, 6)
ADDED: dict[str, tuple[Tensor, Tensor, tuple[int, ...]]] = {  # two arguments, and over which of them
    "alike": (LIKE, LIKE.clone(), (0, 1)),
    "vector": (LIKE, torch.ones(6), (0,)),
    "expanded": (LIKE, torch.ones(1, 6).expand(4, 6), (0,)),
    "transposed": (LIKE, torch.ones(6, 4).t(), (0,)),
    "to half": (LIKE, LIKE.bfloat16(), (0,)),
    "from half": (LIKE.bfloat16(), LIKE, (1,)),
    "gaps": (torch.ones(4, 12)[:, ::2], LIKE, (1,)),
    "part": (torch.ones(8, 6)[4:], LIKE, (1,)),
    "int": (LIKE.long(), LIKE.long(), ()),
    "complex": (LIKE.cfloat().conj(), LIKE, ()),
    "meta": (LIKE.to("meta"), LIKE.to("meta"), (0, 1)),
}


@pytest.mark.parametrize("name", ADDED)
def test_an_argument_that_is_not_just_like_the_result_is_not_written_over(name: str) -> None:
    x, y, expected = ADDED[name]
    assert positions(_node(aten.add.Tensor, (x, y), {})) == expected


def test_what_is_tried_does_not_depend_on_memory_behind_the_argument_and_is_pointwise_elsewhere() -> None:
    """An op is known by shapes, strides and types: the same one may read the whole of a memory elsewhere."""
    assert positions_to_try(_node(aten.add.Tensor, ADDED["part"][:2], {})) == (0, 1)
    x = LIKE.to("meta")
    assert positions(_node(aten.exp.default, (x,), {})) == (0,)
    assert positions(_node(aten._softmax.default, (x, 1, False), {})) == ()
