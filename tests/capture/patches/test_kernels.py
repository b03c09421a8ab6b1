"""Ops that tracing would take apart, or differentiate by another formula, run as eager PyTorch runs them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg
from torch.func import grad, jvp

import checkmate
from checkmate.capture.patches.kernels import _folds
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, at_smallest_budget
from tests.support.sampling import every
from tests.support.seen import Seen

pytestmark = pytest.mark.usefixtures("one_thread")
Function = Callable[[Tensor], Tensor]
X = (2, 3, 9, 7)
WINDOW = torch.hann_window(16) + 0.1
STEPS: dict[str, Function] = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear, corners": lambda x: F.interpolate(x, size=(13, 20), mode="bilinear", align_corners=True),
    "bilinear, antialias": lambda x: F.interpolate(x, size=(5, 4), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest-exact": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "area": lambda x: F.interpolate(x, size=(4, 4), mode="area"),
    "softshrink": lambda x: F.softshrink(x, 0.2),
    "hardshrink": lambda x: F.hardshrink(x, 0.2),
    "multi-margin": lambda x: F.multi_margin_loss(x.flatten(1), torch.tensor([3, 5])),
    "grid sample": lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3) + F.adaptive_max_pool2d(x, 3),
    "pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "pixel shuffle": lambda x: F.pixel_unshuffle(F.pad(x, (0, 1, 0, 1)), 2),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.mish(x) + F.silu(x) + F.hardswish(x) + F.elu(x),
    "softplus": lambda x: F.softplus(x) + F.logsigmoid(x) + F.leaky_relu(x) + F.rrelu(x, training=True) + F.celu(x),
    "norms": lambda x: F.group_norm(x, 3) + F.instance_norm(x) + F.local_response_norm(x, 2),
    "losses": lambda x: F.huber_loss(x, x.detach() * 2) + F.smooth_l1_loss(x, x.detach() * 3) + F.kl_div(x, x.exp()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3) + F.normalize(x, dim=1),
    "added products": lambda x: (
        torch.addcdiv(x, x.cos(), x.exp(), value=0.3) + torch.addcmul(x, x.cos(), x, value=0.3)
    ).addcdiv_(x.sin(), x.exp(), value=0.7),
    "vector times matrices": lambda x: torch.linspace(0, 1, 9) @ x,
    "matrices times one": lambda x: x[:, 0] @ torch.linspace(0, 1, 35).view(1, 7, 5),
    "weighted matrices times weighted one": lambda x: (x[:, 0] * 0.7) @ (x[:1, 1].mT * x[:1, 2].mT).cos(),
    "weighted one times weighted matrices": lambda x: (x[:1, 1] * x[:1, 2]).cos() @ (x[:, 0].mT * 0.7),
    "matrices of other strides times one": lambda x: x[0].transpose(1, 2) @ torch.linspace(0, 1, 18).view(9, 2),
    "matrices times a vector": lambda x: x.transpose(2, 3) @ torch.linspace(0, 1, 9),
    "one matrix of other strides times a vector": lambda x: x[:, :, :1].transpose(0, 2) @ torch.linspace(0, 1, 7),
    "every second column of matrices times a vector": lambda x: x[..., ::2] @ torch.linspace(0, 1, 4),
    "matrix times matrices": lambda x: torch.linspace(0, 1, 36).view(4, 9) @ x,
    "dropout of nothing": lambda x: F.dropout(x.sin()[:, :, :, :5], 0.0),
    "dropout in evaluation": lambda x: F.dropout(x.sin()[:, :, :, :5], 0.5, training=False),
    "linear algebra": lambda x: linalg.vector_norm(x, dim=1) + torch.cdist(x[0], x[1]).sum() + x.logcumsumexp(2)[:, 0],
    "multilabel-margin": lambda x: F.multilabel_margin_loss(
        x[:, 0].flatten(1), F.pad(torch.tensor([[2, 40, 7], [1, 0, 30]]), (0, 60), value=-1)
    ),
}


COMPLEX: dict[str, Function] = {
    "pinv": lambda z: linalg.pinv(z[0, 0]),
    "pinv of batches": linalg.pinv,
    "pinv of a product": lambda z: linalg.pinv(z @ z.mH + torch.eye(9)) @ z,
    "cumulative product with zeros": lambda z: (y := (z * (torch.arange(7) % 3 > 0)).cumprod(-1)) * y.flip(0),
    "istft": lambda z: torch.istft(z[:, 0], 16, 4, window=WINDOW),
    "istft of conjugates": lambda z: torch.istft(z[0].conj(), 16, 4, window=WINDOW, normalized=True, length=20),
    "istft of one": lambda z: torch.istft(z[0, 0], 16, 4, window=WINDOW[:12], win_length=12),
    "two-sided istft": lambda z: torch.istft(
        torch.cat([z[0], z[1, :, :7]], 1), 16, 4, window=WINDOW, onesided=False, return_complex=True
    ),
    "solve": lambda z: linalg.solve(z @ z.mH + torch.eye(9), z),
}


def _check(function: Function) -> None:
    """The bits of plain PyTorch at the smallest budget, and its random state."""
    x = torch.randn(X, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return function(x.sin()).square().sum()

    assert_as_plain(step, x, run=at_smallest_budget(step, x))


@pytest.mark.parametrize("name", every(2, STEPS))
def test_same_bits_as_eager(name: str) -> None:
    _check(STEPS[name])


@pytest.mark.parametrize("name", every(3, COMPLEX))
def test_complex_numbers_have_the_bits_of_eager_from_the_first_call_on(name: str) -> None:
    function = COMPLEX[name]

    def step(x: Tensor, w: Tensor) -> Tensor:
        made = function(torch.complex(x, x.cos()) * w)
        return (torch.view_as_real(made.resolve_conj()) if made.is_complex() else made).square().sum()

    x, w = torch.randn(X, requires_grad=True), torch.randn(X, dtype=torch.cfloat, requires_grad=True)
    assert_as_plain(step, x, w, run=at_smallest_budget(step, x, w))


def test_dropout_of_complex_numbers_draws_as_the_kernel() -> None:
    try:
        F.dropout(torch.ones(2).cfloat())
    except NotImplementedError:
        pytest.skip("this PyTorch drops out no complex numbers")

    def dropout(x: Tensor) -> Tensor:
        strided = F.dropout(torch.complex(x, x.cos()).transpose(1, 3), 0.4).abs()
        return strided + F.dropout(x.cfloat(), 0.3).real.transpose(1, 3)

    _check(dropout)


def test_dropout_of_everything_draws_nothing() -> None:
    layers = torch.nn.LSTM(8, 8, 2, dropout=1.0)

    def step(x: Tensor) -> Tensor:
        F.dropout(x, 1.0)  # nothing reads it
        assert F.dropout(x[:0].cfloat(), 0.5).is_complex()
        read = F.dropout(x / 0, 1.0), F.dropout(x.detach().transpose(0, 1), 1.0), F.dropout(x[:0], 0.5)
        attention = F.scaled_dot_product_attention(x, x, x, dropout_p=1.0)
        return x.square().sum() + sum(part.nan_to_num(2.0).sum() for part in (*read, attention, layers(x)[0]))

    x = torch.randn(3, 5, 8, requires_grad=True)
    run = assert_as_plain(step, x, run=at_smallest_budget(step, x), leaves=[*layers.parameters()])
    before = torch.get_rng_state()
    run(x)
    assert_same_bits(torch.get_rng_state(), before)


def test_products_take_the_kernel_of_eager() -> None:
    """Batches of random strides, and of one, times a vector or a matrix, from either side."""
    draw = random.Random(0)
    for _ in range(1000):
        batches = torch.zeros([draw.choice((1, 1, 2, 3)) for _ in range(draw.choice((3, 4)))])
        batches = batches.permute(draw.sample(range(batches.ndim), batches.ndim))[..., :: draw.choice((1, 1, 2))]
        batches = draw.choice((batches, batches[:, :1], batches[:1].expand(3, *batches.shape[1:])))
        if left := draw.random() < 0.5:
            batches = batches.mT
        length = batches.shape[-2 if left else -1]
        other = draw.choice((torch.zeros(length), torch.zeros((2, length) if left else (length, 2))))
        other.requires_grad_(draw.random() < 0.2)
        x, y = (other, batches) if left else (batches, other)
        with Seen() as calls:
            torch.matmul(x, y)
        assert _folds(x, y, is_out=False) == (torch.ops.aten.bmm.default not in calls.ops)


REDUCTIONS: dict[str, Function] = {  # whose formula of the gradient eager PyTorch chooses by the data
    "max": lambda x: -x.max(),
    "max of a transposed": lambda x: (-3 * x.t().max()).sin(),
    "min": lambda x: x.min().sin(),
    "median": lambda x: -x.median(),
    "nanmedian": lambda x: -x.nanmedian(),
    "prod": lambda x: x.prod().sin(),
    "prod along": lambda x: x.prod(1).sin().sum(),
    "prod kept": lambda x: x.t().prod(-1, True).sin().sum(),
    "prod in double precision": lambda x: x.prod(0, dtype=torch.float64).sin().sum(),
    "of integers": lambda x: x.sum() * (x > 0.5).int().max(),
    "scaled": lambda x: (x / x.abs().max() * 127).round().sum() + x.square().sum(),
}
CHANGES: dict[str, Function] = {
    "plain": lambda x: x,
    "a zero": lambda x: x.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(0.0)),
    "zeros in a row": lambda x: x.index_put((torch.tensor([2, 2]), torch.tensor([3, 5])), torch.tensor(0.0)),
    "ties": lambda x: x.index_put((torch.tensor([1, 4]), torch.tensor([1, 4])), x.max()).clamp(min=-0.5),
    "no number": lambda x: x.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan"))),
}


@pytest.mark.parametrize("name", every(4, REDUCTIONS))
def test_gradients_take_the_formula_of_eager(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return REDUCTIONS[name](x * 1.5)

    drawn = torch.randn(6, 7)
    run = at_smallest_budget(step, drawn.clone().requires_grad_())
    for change in CHANGES.values():
        assert_as_plain(step, change(drawn.clone()).requires_grad_(), run=run)
    assert len(run.plans) == 1


def test_such_a_gradient_is_one_op_that_is_measured() -> None:
    ops = checkmate.trace(lambda x: x.max() + x.prod(), torch.randn(5, 5, requires_grad=True)).graph.ops
    assert [op.target for op in ops].count("checkmate.gradient.default") == 2


MATRICES = [torch.randn(n, n, generator=torch.Generator().manual_seed(n)) for n in (3, 4, 7)]
OF_MATRICES: dict[str, Function] = {  # which round otherwise where the vectors are computed too
    "svdvals": linalg.svdvals,
    "eigvals": linalg.eigvals,
    "eigvalsh": lambda x: linalg.eigvalsh(x @ x.mT),
    "spectral norm": lambda x: linalg.matrix_norm(x, 2),
    "nuclear norm": lambda x: torch.norm(x, "nuc"),
    "condition": linalg.cond,
    "svd": lambda x: linalg.svd(x)[1],
}


@pytest.mark.parametrize("name", OF_MATRICES)
def test_values_of_a_matrix_are_computed_with_vectors_where_eager_does(name: str) -> None:
    """Values of inputs, of a parameter within ``no_grad``, and of a parameter, but for eigenvalues of any matrix."""
    values, weight = OF_MATRICES[name], MATRICES[1].clone().requires_grad_()

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            shown = values(weight)
        trained = weight if name == "eigvals" else values(weight).abs()
        return trained.sum(), shown, *(values(x.mT) for x in inputs)

    assert_as_plain(step, *MATRICES, leaves=[weight])


def _hooked(x: Tensor) -> Tensor:
    """Fill the gradient in a hook, which runs within the backward of the op before it."""
    x.register_hook(lambda grad: torch.where(grad > 0, grad, 0))
    return x


FILLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a copy": lambda x, mask, value: x.masked_fill(mask, value.cos()),
    "in place": lambda x, mask, value: x.sin().masked_fill_(mask, value),
    "of other strides": lambda x, mask, value: x.mT.masked_fill(mask.mT, value).mT,
    "with a mask of the last dimension": lambda x, mask, value: x.masked_fill(mask[0, 0], value),
    "with a mask of more elements": lambda x, mask, value: x[:1, :1].masked_fill(mask, value),
    "within jvp": lambda x, mask, value: sum(jvp(lambda t: t.sin().masked_fill(mask, value), (x,), (x.detach(),))),
    "within a gradient": lambda x, mask, value: (
        x * grad(lambda v: (x.masked_fill(mask, v) * torch.linspace(0, 1, 50)).sin().sum())(value)
    ),
    "with a hook that fills": lambda x, mask, value: _hooked(x.masked_fill(mask, value)),
    "by where": lambda x, mask, value: torch.where(mask, x, 0.5) + torch.where(mask, value, x),
}


@pytest.mark.parametrize("kind", FILLED)
def test_the_gradient_of_a_value_sums_what_its_mask_selects(kind: str) -> None:
    """Plain autograd sums the selected elements only; a tensor that is traced gets a sum with zeros between."""
    x, value = torch.randn(4, 7, 50, requires_grad=True), torch.tensor(0.3, requires_grad=True)
    mask, weight = torch.rand(4, 7, 50) < 0.6, torch.randn(4, 7, 50)

    def step(x: Tensor, value: Tensor) -> Tensor:
        return (FILLED[kind](x * 1.5, mask, value) * weight).sin().sum()

    assert_as_plain(step, x, value, budget="1 GB")
    assert_as_plain(step, x, value, run=at_smallest_budget(step, x, value))
