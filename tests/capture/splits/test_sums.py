"""Ops that sum over parts make what the whole makes, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.splits import equal_bits
from checkmate.capture.splits.find_region import choices
from checkmate.capture.splits.parts import InParts, apart, in_parts
from checkmate.capture.splits.table import SUMMED, OpSplit, sums_of
from tests.capture.splits.test_table import GEOMETRY, R, node_of, region_of
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
S = SUMMED
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[tuple[int | None, ...], tuple[Any, ...]]]]] = {
    # op, arguments, [(how results are split, the dimension of each tensor argument)]
    "mm": (aten.mm.default, (R(8, 32), R(32, 6)), [((S,), (1, 0))]),
    "bmm": (aten.bmm.default, (R(4, 8, 32), R(4, 32, 6)), [((S,), (2, 1))]),
    "sum": (aten.sum.dim_IntList, (R(4, 8, 6), [0, 1]), [((S,), (0,)), ((S,), (1,))]),
    "sum of all": (aten.sum.default, (R(4, 8),), [((S,), (0,)), ((S,), (1,))]),
    "mean": (aten.mean.dim, (R(4, 8, 6), [1]), []),
    "gradients of a convolution's weight and bias": (
        aten.convolution_backward.default,
        (R(4, 16, 9, 9), R(4, 8, 9, 9), R(16, 8, 3, 3), [16], *GEOMETRY, 1, [False, True, True]),
        [((None, S, S), (0, 0, None))],
    ),
    "all gradients of a convolution": (
        aten.convolution_backward.default,
        (R(4, 16, 9, 9), R(4, 8, 9, 9), R(16, 8, 3, 3), [16], *GEOMETRY, 1, [True, True, False]),
        [((0, S, None), (0, 0, None))],
    ),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (R(4, 8, 6), R(4, 8, 6), [6], R(4, 8, 1), R(4, 8, 1), R(6), R(6), [True, True, True]),
        [((0, S, S), (0, 0, 0, 0, None, None)), ((1, S, S), (1, 1, 1, 1, None, None))],
    ),
    "group norm backward": (
        aten.native_group_norm_backward.default,
        (R(4, 8, 6, 6), R(4, 8, 6, 6), R(4, 2), R(4, 2), R(8), 4, 8, 36, 2, [True, True, True]),
        [((0, S, S), (0, 0, 0, 0, None))],
    ),
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        (R(4, 8, 6, 6), R(4, 8, 6, 6), R(8), R(8), R(8), R(8), R(8), True, 1e-5, [True, True, True]),
        [],
    ),
    "sums of a batch norm's backward": (
        aten.native_batch_norm_backward.default,
        (R(4, 8, 6, 6), R(4, 8, 6, 6), R(8), None, None, R(8), R(8), True, 1e-5, [False, True, True]),
        [((None, S, S), (0, 0, None, None, None))],
    ),
}
WRONG_IN_PARTS = {("layer norm backward", 1)}  # PyTorch's kernel takes means and deviations to lie without gaps


def _parts(node: fx.Node, split: OpSplit, units: int, length: int) -> InParts | None:
    alone = apart(region_of(node, split, units))
    assert alone is not None
    return in_parts(alone, length)


@pytest.mark.parametrize("case", CASES)
def test_an_op_sums_over_parts_of_what_it_reduces_and_of_nothing_else(case: str) -> None:
    op, args, expected = CASES[case]
    found = [*sums_of(node_of(op, args))]
    assert [split.results for split in found] == [results for results, _ in expected]
    for k, (split, (_, dims)) in enumerate(zip(found, expected, strict=True)):
        assert tuple(split.reads.values()) == dims
        node = node_of(op, args)  # a region adds to the graph
        parts = _parts(node, [*sums_of(node)][k], 4, 2)
        assert parts is not None
        assert parts.parts == 2
        assert (equal_bits.off_in_parts(parts) < inf) is ((case, k) not in WRONG_IN_PARTS)
        made, whole = _run(parts, [])
        assert [a.shape for a in made] == [a.shape for a in whole]


def _run(parts: InParts, inputs: list[Tensor]) -> tuple[Any, Any]:
    inputs = inputs or [torch.rand(n.meta["val"].shape) for n in parts.whole.find_nodes(op="placeholder")]
    return parts(*inputs), fx.GraphModule({}, parts.whole)(*inputs)


def test_of_whole_numbers_the_sums_are_equal_and_each_part_counts_once() -> None:
    node = node_of(aten.mm.default, (R(8, 12), R(12, 6)))
    (split,) = sums_of(node)
    for length in (1, 2, 3, 4, 6):
        parts = _parts(node, split, 12, length)
        assert parts is not None
        made, whole = _run(parts, [torch.randint(-8, 8, shape).float() for shape in ((8, 12), (12, 6))])
        assert_same_bits(made, whole)
    assert _parts(node, split, 12, 5) is None  # the last would overlap


def test_more_parts_are_of_a_length_that_divides_the_whole() -> None:
    node = node_of(aten.mm.default, (R(8, 12), R(12, 6)))
    (split,) = sums_of(node)
    lengths, parts = [], _parts(node, split, 12, 6)
    while parts is not None:
        lengths.append(parts.length)
        parts = parts.in_more_parts()
    assert lengths == [6, 3, 2, 1]


def test_nothing_is_written_over_an_input_by_a_region_that_begins_with_a_sum() -> None:
    node = node_of(aten.mm.default, (R(12, 12), R(12, 12)))
    parts = _parts(node, next(sums_of(node)), 12, 4)
    assert parts is not None
    assert parts.written is None
    assert parts.summed == (True,)


def test_a_product_of_a_matrix_with_itself_is_no_sum_over_parts() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = R(6, 6)
    node = graph.call_function(aten.mm.default, (x, x))
    node.meta["val"] = R(6, 6)
    assert [*sums_of(node)] == []


def test_what_is_wrong_by_more_than_rounding_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums whose last part is left out; and other bits in what is no sum."""
    node = node_of(aten.mm.default, (R(8, 64), R(64, 6)))
    parts = _parts(node, next(sums_of(node)), 64, 16)
    assert parts is not None
    monkeypatch.setattr(equal_bits, "_tried", {})
    really = InParts._write
    monkeypatch.setattr(InParts, "_write", lambda self, i, r, begin: begin < 48 and really(self, i, r, begin))
    assert equal_bits.off_in_parts(parts) == inf

    rows = _parts(node, OpSplit((0,), dict(zip(node.all_input_nodes, (0, None), strict=True))), 8, 4)
    assert rows is not None
    monkeypatch.setattr(InParts, "_write", lambda self, i, r, begin: (really(self, i, r, begin), r[0].mul_(1 + 1e-6)))
    assert equal_bits.off_in_parts(rows) == inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_how_far_off_sums_are_goes_with_their_type(dtype: torch.dtype) -> None:
    node = node_of(aten.mm.default, (R(8, 4096, dtype=dtype), R(4096, 6, dtype=dtype)))
    parts = _parts(node, next(sums_of(node)), 4096, 64)
    assert parts is not None
    off = equal_bits.off_in_parts(parts)
    assert 0 < off < equal_bits.most_off(parts) == torch.finfo(dtype).eps ** 0.5
    assert off < 64 * torch.finfo(dtype).eps


def test_a_sum_is_begun_along_the_dimension_that_it_was_found_for() -> None:
    """Though another one, that comes first, has no such units."""
    node = node_of(aten.sum.dim_IntList, (R(4, 6, 8), [0, 1]))
    node.graph.output(node)
    begun = {
        (choice.dim, choice.units, *split.reads.values())
        for choice in choices(node, sums=True)
        if choice.summed and (split := choice.split(node)) is not None
    }
    assert begun == {(0, 4, 0), (1, 6, 1)}


@pytest.mark.parametrize(("rows", "depth", "inputs"), [(1, 2**21, 32), (8, 2**18, 16), (64, 2**16, 2)])
def test_little_that_is_made_of_much_is_tried_until_a_thousand_numbers_are_compared(
    rows: int, depth: int, inputs: int
) -> None:
    node = node_of(aten.mm.default, (R(rows, depth), R(depth, rows)))
    parts = _parts(node, next(sums_of(node)), depth, depth // 2)
    assert parts is not None
    assert equal_bits.inputs_of(parts) == inputs
    assert inputs == equal_bits.MOST_INPUTS or inputs * rows * rows >= equal_bits.COMPARED
