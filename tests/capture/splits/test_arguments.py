"""What the table of arguments says, held against the kernels: on adversarial shapes and numbers, with their tails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from checkmate.backends.tensor_state import same_bits
from checkmate.capture.splits.lanes import VECTORS, same_lanes
from checkmate.capture.splits.letters import pointwise
from checkmate.capture.splits.table import TABLE, Argument, OpSplit, argument_of, split_of
from tests.capture.splits.test_table import CASES, node_of

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ELEMENTS = 10_240  # of a case, at least
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-30, -1e-30, 3e38, -3e38, 1e-40, 1e-45, 6e-8, 1e-5, 65504.0]
Op = Callable[[Tensor, Tensor], Tensor]

BINARY: dict[str, Op] = {  # of numbers of any sign
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 0.3,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: torch.rsub(a, 2.0),
    "mul": lambda a, b: a * b,
    "mul by a number": lambda a, b: a * 0.3,
    "div": lambda a, b: a / b,
    "div by a number": lambda a, b: a / 0.3,
    "threshold_backward": lambda a, b: aten.threshold_backward(a, b, 0),
    "hardtanh": lambda a, b: aten.hardtanh(a, -1.0, 1.0),
    "hardtanh_backward": lambda a, b: aten.hardtanh_backward(a, b, -1.0, 1.0),
    "leaky_relu_backward": lambda a, b: aten.leaky_relu_backward(a, b, 0.1, False),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "clamp_min": lambda a, b: a.clamp_min(0.1),
    "clamp_max": lambda a, b: a.clamp_max(0.1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.5),
    "le": lambda a, b: a <= b,
    "to float32": lambda a, b: a.float(),
    "to bfloat16": lambda a, b: a.bfloat16(),
    "to float16": lambda a, b: a.half(),
    **{str(op): op for op in (aten.neg, aten.abs, aten.sqrt, aten.reciprocal, aten.square, aten.relu, aten.sign)},
    **{str(op): op for op in (aten.ceil, aten.floor, aten.round, aten.trunc, aten.isnan, aten.isinf)},
}
LANES: dict[str, Op] = {  # whose vectors and tails round otherwise, on some processors
    **{str(op): op for op in (aten.elu, aten.selu, aten.silu, aten.sigmoid, aten.mish)},
    **{str(op): op for op in (aten.softplus, aten.gelu, aten.rsqrt, aten.exp2, aten.sinh, aten.cosh, aten.atanh)},
    "pow of a number": lambda a, b: a.abs().pow(1.5),
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "gelu by tanh": lambda a, b: aten.gelu(a, approximate="tanh"),
    "gelu_backward": aten.gelu_backward,
    "gelu_backward by tanh": lambda a, b: aten.gelu_backward(a, b, approximate="tanh"),
    "silu_backward": aten.silu_backward,
    "sigmoid_backward": aten.sigmoid_backward,
    "tanh_backward": aten.tanh_backward,
    "elu_backward": lambda a, b: aten.elu_backward(a, 1.0, 1.0, 1.0, False, b),
    "softplus_backward": lambda a, b: aten.softplus_backward(a, b, 1.0, 20.0),
    "mish_backward": aten.mish_backward,
    "hardswish_backward": aten.hardswish_backward,
    "add times a number": lambda a, b: torch.add(a, b, alpha=0.3),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.3),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b, value=0.3),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "atan2": torch.atan2,
    "log_sigmoid": lambda a, b: aten.log_sigmoid_forward(a)[0],
}
ANYWHERE = BINARY | {str(op): op for op, (_, said) in TABLE.items() if said is Argument.VECTORS}


def _without_arguments(op: Op) -> Op:
    return (lambda a, b: op(a)) if isinstance(op, torch._ops.OpOverloadPacket) and len(_inputs(op)) == 1 else op


def _inputs(op: torch._ops.OpOverloadPacket) -> list[Any]:
    schema = op.default._schema
    return [one for one in schema.arguments if str(one.type) == "Tensor"]


def _numbers(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=draw, dtype=torch.float64) * 2
    made[::11] = torch.tensor(SPECIAL, dtype=torch.float64).repeat(count)[: len(made[::11])]
    return made.to(dtype)


def _pieces(count: int) -> Iterator[slice]:
    """Of 1, 2, ... 130 elements, and so on."""
    begin = 0
    while begin < count:
        for length in range(1, 131):
            yield slice(begin, begin + length)
            begin += length


def _same_but_for_nan(one: Tensor, other: Tensor) -> bool:
    """All bits, though not which NaN it is: IEEE 754 leaves that open, and a training step that has one is lost."""
    nan = one.isnan() & other.isnan()
    return same_bits(one.masked_fill(nan, 0), other.masked_fill(nan, 0))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_rounded_once_or_by_vectors_only_has_its_bits_wherever_it_lies(dtype: torch.dtype) -> None:
    a, b = (_numbers(dtype, ELEMENTS, seed) for seed in (0, 1))
    for name, op in ANYWHERE.items():
        run = _without_arguments(op)
        whole = run(a, b)
        found = torch.cat([run(a[some], b[some]) for some in _pieces(ELEMENTS)])
        assert _same_but_for_nan(found, whole), name
        columns = run(a.view(-1, 64)[:, 3:40], b.view(-1, 64)[:, 3:40])
        assert _same_but_for_nan(columns, whole.view(-1, 64)[:, 3:40].contiguous()), name


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_lanes_are_the_same_so_are_bits(dtype: torch.dtype, threads: int) -> None:
    """Of rows and columns of matrices, at shapes about each multiple of a vector."""
    lanes = VECTORS // dtype.itemsize
    widths = [1, 7, lanes - 1, lanes, lanes + 1, 2 * lanes, 2 * lanes + 1, 130]
    before, kept = torch.get_num_threads(), 0
    torch.set_num_threads(threads)
    try:
        for width in widths:
            rows = -(-max(ELEMENTS, 40_000 * (threads - 1)) // (width * lanes)) * lanes
            a, b = (_numbers(dtype, rows * width, seed).nan_to_num(1.0).view(rows, width) for seed in (0, 1))
            wholes = {name: _without_arguments(op)(a, b) for name, op in LANES.items()}
            for at, begin, length in _cuts(rows, width, lanes):
                parts = [t.narrow(at, begin, length) for t in (a, b)]
                for name, op in LANES.items():
                    made = _without_arguments(op)(*parts)
                    if same_lanes([wholes[name], a, b], [made, *parts], threads):
                        kept += 1
                        assert _same_but_for_nan(made, wholes[name].narrow(at, begin, length)), (name, width, at, begin)
    finally:
        torch.set_num_threads(before)
    assert kept > 10 * len(LANES)


def _cuts(rows: int, width: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Dimension, begin and length of parts."""
    yield from ((0, begin, rows // 2) for begin in (0, rows // 2))
    yield from ((0, lanes, lanes), (0, 1, rows - 1), (0, rows - 3, 3))
    if width > 1:
        yield from ((1, 0, width // 2), (1, width - width // 2, width // 2))


def test_lanes_by_shape() -> None:
    """Whole, part, threads: by rows of a multiple of the lanes; along a run only if no rest is left."""
    empty = torch.empty

    def of(whole: Tensor, part: Tensor, threads: int = 1) -> bool:
        return same_lanes([whole, whole], [part, part], threads)

    assert of(empty(8, 32), empty(2, 32))
    assert not of(empty(4, 131_073), empty(1, 131_073))
    assert not of(empty(8, 33), empty(2, 33))
    assert of(empty(64, 33), empty(32, 33))
    assert of(empty(8, 33, dtype=torch.bfloat16).expand(8, 33)[:, :32], empty(4, 64, dtype=torch.bfloat16)[:, :32])
    assert not of(empty(8, 64), empty(8, 64)[:, :32])  # not contiguous any more: gelu takes another library's code
    assert not of(empty(2, 65_536), empty(1, 65_536, dtype=torch.float64))
    assert of(empty(64, 1024), empty(32, 1024), threads=2)
    assert not of(empty(66, 1000), empty(33, 1000), threads=2)
    column, row = empty(8, 1), empty(33)
    assert same_lanes([empty(8, 33), empty(8, 33), row], [empty(4, 33), empty(4, 33), row], 1)  # each row is a run
    assert same_lanes([empty(8, 33), empty(8, 33), column], [empty(4, 33), empty(4, 33), column[:4]], 1)


def test_elementwise_ops_that_depend_on_more_have_no_argument() -> None:
    assert _argument(aten.logit.default, (torch.rand(64, 64), 1e-3)) is None
    assert _argument(aten.add.Tensor, (torch.rand(4), torch.rand(4))) is Argument.ONCE
    assert _argument(aten.div.Tensor, (torch.rand(4), torch.rand(4))) is Argument.ONCE
    assert _argument(aten.mul.Tensor, (torch.rand(4).to(torch.complex64), torch.rand(4))) is Argument.LANES
    assert _argument(aten.exp.default, (torch.rand(4).to(torch.complex64),)) is Argument.LANES
    assert _argument(aten._softmax.default, (torch.rand(4, 5, 6), 1, False), dim=2) is None  # goes by vectors there
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"] = b.meta["val"] = torch.rand(4)
    scaled = graph.call_function(aten.add.Tensor, (a, b), {"alpha": 0.3})
    scaled.meta["val"] = torch.rand(4)
    assert argument_of(scaled, OpSplit((0,), {a: 0, b: 0})) is Argument.LANES


def _argument(op: Callable[..., Any], args: tuple[Any, ...], dim: int = 0) -> Argument | None:
    node = node_of(op, args)
    return argument_of(node, OpSplit((dim,), dict.fromkeys(node.all_input_nodes, dim)))


def test_every_op_that_has_a_rule_for_parts_has_an_argument() -> None:
    """But for what is elementwise, which has the lanes."""
    for op, args, expected in CASES.values():
        node = node_of(op, args)
        result, dim = next(iter(expected))
        split = split_of(node, result, dim, 2)
        assert split is not None
        assert argument_of(node, split) is not None
    assert all(rule is pointwise for rule, said in TABLE.values() if said is Argument.LANES)
