"""Numbers that cancel tell one order of summation from another, where numbers drawn at random do not.

They do so where there are more of them than are drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from checkmate.capture.inplace.shape_only import convolution_backward_input
from checkmate.capture.loss.rounding_probes import DRAWN, cancel, made_up
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
GEOMETRY = [1, 1], [1, 1], [1, 1], False, [0, 0]
MASK = [False, True, True]


def _draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _made_up(shapes: Iterable[Any], dtype: torch.dtype, draw: torch.Generator, device: str = "cpu") -> tuple[Any, ...]:
    """Tensors of the shapes among these arguments, and the others as they are."""
    return tuple(
        made_up(torch.empty(one, dtype=dtype, device=device), draw, 0) if isinstance(one, tuple) else one
        for one in shapes
    )


def _operands(terms: int, dtype: torch.dtype, rows: int = 64) -> tuple[Tensor, Tensor]:
    a, b = _made_up(((rows, terms), (terms, 48)), dtype, draw := _draw())
    cancel(aten.mm.default, (a, b), draw)
    return a, b


@pytest.mark.cuda
def test_numbers_are_the_same_on_a_device() -> None:
    found = []
    for device in ("cpu", "cuda"):
        shapes = (6, 6), (6, 5), (2, 6, 3, 3), (4, 6, 1, 1)
        a, b, x, w = _made_up(shapes, torch.float32, draw := _draw(), device)
        cancel(aten.mm.default, (a, b), draw)
        cancel(aten.convolution.default, (x, w, None, *GEOMETRY, 1), draw)
        complex_numbers = made_up(torch.empty(3, dtype=torch.cfloat, device=device), draw, 0)
        found.append([t.cpu() for t in (a, b, x, w, complex_numbers)])
    assert_same_bits(*found)


def _agree(a: Tensor, b: Tensor) -> Tensor:
    """The share of elements of each row of a product that have the same bits with the terms in another order."""
    order = torch.randperm(a.shape[1], generator=_draw())
    return (a.mm(b) == a[:, order].contiguous().mm(b[order].contiguous())).float().mean(1)


@pytest.mark.parametrize(
    ("dtype", "terms", "most"),
    [(torch.float32, 8, 0.1), (torch.float64, 32, 0.2), (torch.bfloat16, 64, 0.2), (torch.float16, 32, 0.2)],
    ids=str,
)
def test_another_order_of_the_terms_shows_in_most_elements(dtype: torch.dtype, terms: int, most: float) -> None:
    assert _agree(*_operands(terms, dtype)).mean() < most
    usual = _made_up(((64, terms), (terms, 48)), dtype, _draw())
    assert dtype.itemsize > 2 or _agree(*usual).mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_order_shows_in_each_row_where_numbers_repeat(dtype: torch.dtype) -> None:
    a, b = _operands(512, dtype, rows=2 * DRAWN // 512 + 64)
    assert a.numel() > 2 * DRAWN
    assert _agree(a, b).max() < 0.5


@pytest.mark.parametrize("shape", [(1024, 2048), (3, 512, 4, 512), (2**14, 97)], ids=str)
def test_no_row_tile_or_channel_is_like_another_where_numbers_repeat(shape: tuple[int, ...]) -> None:
    x = made_up(torch.empty(shape), _draw(), 0)
    assert x.numel() > DRAWN
    for length in (shape[-1], 32, 64, 97):  # what a kernel may take for one
        rows = x.view(-1)[: x.numel() // length * length].view(-1, length)
        apart = rows[: DRAWN // length] if length < shape[-1] else rows
        assert len({row.tobytes() for row in apart.numpy()}) == len(apart)


def test_terms_of_a_long_sum_cancel_in_pairs_that_no_halves_are() -> None:
    x = made_up(torch.empty(3 * DRAWN + 2), _draw(), 0)
    cancel(aten.sum.default, (x,), _draw(1))
    assert abs(float(x.double().sum())) < 1e-9
    assert int((x == 0).sum()) < 10
    for parts in (2, 4, 8):
        some = x[: len(x) // parts * parts].view(parts, -1).double().sum(1)
        assert float(some.abs().min()) > 1.0, "each of these parts cancels alone"


class _Made(TorchDispatchMode):
    """The bytes of each tensor that is made, and its type, by device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.types = defaultdict[str, set[int]](set), defaultdict[str, set[torch.dtype]](set)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for t in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(t, Tensor):
                self.sizes[t.device.type].add(t.untyped_storage().nbytes())
                self.types[t.device.type].add(t.dtype)
        return made


PICTURES = (512, 64, 224, 224)
LARGE: dict[str, tuple[Any, tuple[Any, ...]]] = {  # logits of a language model, pictures; no byte of these is there
    "addmm": (aten.addmm.default, ((50257,), (8192, 768), (768, 50257))),
    "of a weight": (aten.mm.default, ((768, 2**23), (2**23, 768))),
    "convolution": (aten.convolution.default, (PICTURES, (64, 64, 3, 3), (64,), *GEOMETRY, 1)),
    "by channel": (aten.convolution.default, (PICTURES, (64, 1, 3, 3), None, *GEOMETRY, 64)),
    "weight": (aten.convolution_backward.default, (PICTURES, PICTURES, (64, 64, 3, 3), [64], *GEOMETRY, 1, MASK)),
    "sum": (aten.sum.default, ((2**24,),)),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, ((64, 16, 2048, 64),) * 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE)
def test_few_numbers_are_made_on_the_host_and_none_in_double_precision_elsewhere(case: str, dtype: torch.dtype) -> None:
    op, shapes = LARGE[case]
    with _Made() as made:
        args = _made_up(shapes, dtype, draw := _draw(), "meta")
        cancel(op, args, draw)
    assert max(made.sizes["cpu"]) <= 8 * 2**20  # places are int64
    assert made.types["meta"] == {dtype, torch.int64, torch.bool}  # places, and those of the first half
    assert max(made.sizes["meta"]) == max(t.nbytes for t in args if isinstance(t, Tensor))


WHOLE = slice(None)
INNER = (..., slice(1, -1), slice(1, -1))
SUMS: dict[str, tuple[Any, tuple[Any, ...], int, Any]] = {  # op, arguments, which of its results is a sum, and where
    "addmm": (aten.addmm.default, ((8,), (6, 9), (9, 8)), 0, WHOLE),
    "bmm": (aten.bmm.default, ((3, 6, 8), (3, 8, 5)), 0, WHOLE),
    "convolution": (aten.convolution.default, ((2, 8, 6, 6), (4, 8, 3, 3), (4,), *GEOMETRY, 1), 0, WHOLE),
    "in groups": (aten.convolution.default, ((2, 8, 6, 6), (4, 4, 3, 3), None, *GEOMETRY, 2), 0, WHOLE),
    "by channel, where nothing is padded": (
        aten.convolution.default, ((2, 4, 6, 6), (4, 1, 3, 3), None, *GEOMETRY, 4), 0, INNER,
    ),
    "input": (
        convolution_backward_input, ((2, 4, 6, 6), (4, 8, 3, 3), [2, 8, 6, 6], [288, 36, 6, 1], *GEOMETRY, 1), 0, WHOLE,
    ),
    "weight": (
        aten.convolution_backward.default,
        ((2, 4, 6, 6), (2, 8, 6, 6), (4, 8, 3, 3), [4], *GEOMETRY, 1, MASK), 1, WHOLE,
    ),
    "sum": (aten.sum.dim_IntList, ((6, 8), [1]), 0, WHOLE),
    "batch norm": (
        aten.native_batch_norm_backward.default,
        ((4, 3, 5, 5), (4, 3, 5, 5), (3,), None, None, (3,), (3,), True, 1e-5, [True, True, True]), 2, WHOLE,
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default, ((2, 2, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8)), 0, WHOLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUMS)
def test_terms_cancel_of_each_op_that_sums(case: str) -> None:
    op, shapes, which, where = SUMS[case]
    args = _made_up(shapes, torch.float64, draw := _draw())

    def size() -> float:
        made = op(*args)
        return float((made[which] if isinstance(made, tuple) else made)[where].abs().max())

    before = size()
    cancel(op, args, draw)
    assert size() < 1e-10 < 1e-3 < before


def test_what_has_no_pairs_stays_as_it_is() -> None:
    x = torch.randn(1, 8).expand(4, 8)  # its rows are one
    for op, args in ((aten.mm.default, (x, x.t())), (aten.relu.default, (x,)), (aten.exp.default, (x.clone(),))):
        before = [t.clone() for t in args]
        cancel(op, args, torch.Generator())
        assert_same_bits([*args], before)
