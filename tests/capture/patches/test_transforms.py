"""Functions of autograd within torch.func have their own gradients, and a refusal leaves no level open."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import (
    assert_as_plain,
    assert_refused,
    at_smallest_budget,
    compiled,
    verify_to_the_byte,
)

pytestmark = pytest.mark.usefixtures("one_thread")
W, V = nn.Parameter(torch.linspace(-1, 1.5, 16)), torch.linspace(0.2, 1, 64).view(4, 16)
FACTOR = 2.0
FACTORS = torch.linspace(1, 2, 16)


class _Scaled(torch.autograd.Function):
    """A sine with three times its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 3


class _Rounded(_Scaled):
    forward = staticmethod(lambda x: x.round())
    backward = staticmethod(lambda ctx, grad: grad)
    jvp = staticmethod(lambda ctx, tangent: tangent)


class _OfItsResult(_Scaled):
    """An exponential that saves its result."""

    forward = staticmethod(lambda x: x.exp())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y / 2


class _OfTwo(_Scaled):
    """Two results with gradients, and one without, of two tensors and a number."""

    @staticmethod
    def forward(x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * y, x > 0, x.sin() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[2], output[2])
        ctx.mark_non_differentiable(output[1])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any, other: Tensor) -> tuple[Tensor, None, Tensor]:
        x, y, sine = ctx.saved_tensors
        return grad * y + other * sine * ctx.factor, None, grad * x * 2


class _Reading(_Scaled):
    """Reads a tensor that it is not given."""

    backward = staticmethod(lambda ctx, grad: grad * FACTORS)


class _OfAGlobal(_Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos() * FACTOR


class _WithVmap(_Scaled):
    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, Any]:
        return _Scaled.apply(x) * 2, dims[0]


def _with_factor(factor: float) -> Callable[[Tensor], Tensor]:
    class Closure(_Scaled):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0].cos() * factor

    return Closure.apply


def _of_two(x: Tensor) -> Tensor:
    product, positive, sine = _OfTwo.apply(x, 2.5, x * 2)
    return product + sine * positive


def _losses(f: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Steps that differentiate a function for its input, for what a level does not differentiate, and twice."""
    of_energy: Any = lambda x: grad_and_value(lambda t: f(t * W).square().sum())(x)  # noqa: E731
    pulled_back: Any = lambda x: vjp(lambda t: f(t * W), x)  # noqa: E731
    return {
        "grad": lambda x: grad(lambda t: f(t * W).square().sum())(x).square().mean(),
        "of a weight": lambda x: grad(lambda t: (f(W * 2) * t).square().sum())(x).square().mean(),
        "grad_and_value": lambda x: of_energy(x)[0].square().sum() + of_energy(x)[1],
        "vjp": lambda x: pulled_back(x)[1](V)[0].square().sum(),
        "twice": lambda x: grad(lambda s: grad(lambda t: f(t * W * s).sum())(x).square().sum())(x).square().mean(),
        "jacrev": lambda x: jacrev(lambda t: f(t * W))(x[0]).square().mean(),
    }


@pytest.mark.parametrize(
    "f",
    [_Scaled.apply, _OfItsResult.apply, _of_two, _with_factor(0.7)],
    ids=["scaled", "of its result", "of two", "closure"],
)
def test_a_function_of_autograd_keeps_its_backward_within_gradients(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-2, 2, 64).view(4, 16)
    for loss in _losses(f).values():
        assert_as_plain(loss, x, leaves=[W], budget="1 GB")


def test_a_number_that_a_backward_reads_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-2, 2, 64).view(4, 16)

    def step(x: Tensor) -> Tensor:
        return grad(lambda t: _OfAGlobal.apply(t * W).sum())(x).square().sum()

    run = assert_as_plain(step, x, leaves=[W], budget="1 GB")
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert_as_plain(step, x, leaves=[W], run=run)


class _Cells:
    """What methods of a function read of what is around them: numbers, and an attribute of an object."""

    def __init__(self) -> None:
        self.factor = 1.0
        number: Any = 1.0

        def set_to(value: float) -> None:
            nonlocal number
            number = self.factor = value

        def remember(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.number, ctx.factor = number, self.factor

        methods: dict[str, dict[str, Any]] = {
            "forward": {"forward": lambda x: x.sin() * number * self.factor},
            "backward": {"backward": lambda ctx, grad: grad * number * self.factor},
            "setup_context": {
                "setup_context": remember,
                "backward": lambda ctx, grad: grad * ctx.number * ctx.factor,
            },
        }
        self.set_to = set_to
        self.functions = {
            name: type("_Own", (_Scaled,), {key: staticmethod(method) for key, method in own.items()})
            for name, own in methods.items()
        }


@pytest.mark.parametrize("method", ["forward", "backward", "setup_context"])
def test_what_a_function_reads_of_what_is_around_it_is_guarded(method: str) -> None:
    cells = _Cells()
    own: Any = cells.functions[method]
    x = torch.linspace(-2, 2, 64).view(4, 16)
    step = lambda x: own.apply(x * W).square().sum()  # noqa: E731
    within = lambda x: grad(lambda t: own.apply(t * W).sum())(x).square().sum() + own.apply(W).sum()  # noqa: E731
    runs = [assert_as_plain(f, x, leaves=[W], budget="1 GB") for f in (step, within)]
    for factor in (3.0, 0.5):
        cells.set_to(factor)
        for f, run in zip((step, within), runs, strict=True):
            assert_as_plain(f, x, leaves=[W], run=run)

    # So is the method itself.
    setattr(own, method, staticmethod(_Cells().functions[method].__dict__[method].__func__))
    for f, run in zip((step, within), runs, strict=True):
        assert_as_plain(f, x, leaves=[W], run=run)


def test_a_tensor_that_a_function_reads_is_an_input() -> None:
    factors = torch.linspace(1, 2, 16)
    own: Any = type("_Own", (_Scaled,), {"backward": staticmethod(lambda ctx, grad: grad * factors)})
    x = torch.linspace(-2, 2, 64).view(4, 16)
    step = lambda x: own.apply(x * W).square().sum()  # noqa: E731
    run = assert_as_plain(step, x, leaves=[W], budget="1 GB")
    factors = torch.linspace(3, 4, 16)
    assert_as_plain(step, x, leaves=[W], run=run)


class _OfAClass(_Scaled):
    """A forward that is a method of the class."""

    forward = classmethod(lambda cls, x: x.sin())


def test_a_method_of_the_class_is_refused() -> None:
    words = "The forward of _OfAClass, an autograd.Function, is no @staticmethod. Write it as one"
    assert_refused(lambda x: _OfAClass.apply(x * W).sum(), torch.ones(16), words=words)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: sum(jvp(lambda t: _Rounded.apply(t * W), (x,), (V,))), "_Rounded is an autograd.Function within"),
        (lambda x: sum(jvp(lambda t: _Scaled.apply(W * 2) * t, (x,), (V,))), "_Scaled is an autograd.Function within"),
        (lambda x: vmap(lambda t: _WithVmap.apply(t * W))(x), "_WithVmap is an autograd.Function within"),
        (lambda x: grad(lambda t: _Reading.apply(t * W).sum())(x), "reads a tensor, or a number that changes"),
        (lambda x: grad(lambda t: (t * W).max())(x), "Within torch.func the gradient of aten.max.default"),
    ],
)
def test_what_cannot_be_followed_within_torch_func_is_refused(step: Callable[[Tensor], Tensor], words: str) -> None:
    x = torch.linspace(-2, 2, 64).view(4, 16)
    said = assert_refused(lambda x: step(x).square().sum(), x, words=words, budget="1 GB")
    assert "rite it by" in said
    assert "please report" not in said


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(16), (4, 16)),
    "layer norm of two dimensions, without bias": (lambda: nn.LayerNorm((3, 16), bias=False), (2, 3, 16)),
    "layer norm without weights": (lambda: nn.LayerNorm(16, elementwise_affine=False), (4, 16)),
    "group norm": (lambda: nn.GroupNorm(4, 16), (2, 16, 3, 3)),
    "group norm without weights": (lambda: nn.GroupNorm(4, 16, affine=False), (4, 16)),
}


def _jvp_without_gradients(*args: Any) -> Tensor:
    with torch.no_grad():
        return jvp(*args)[1]


def _by_tangents(norm: nn.Module, v: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    """Results of a norm and their tangents, by what has a tangent."""
    weights = dict(norm.named_parameters())
    tangents = {name: weight.detach().cos() for name, weight in weights.items()}
    of_first = dict([*tangents.items()][:1])

    def called(some: dict[str, Tensor], t: Tensor) -> Tensor:
        return functional_call(norm, {**weights, **some}, (t,))

    forms: dict[str, Callable[[Tensor], Any]] = {
        "the input": lambda x: jvp(norm, (x,), (v,)),
        "the input, without gradients": lambda x: (norm(x), _jvp_without_gradients(norm, (x,), (v,))),
        "the input, within a gradient": lambda x: (
            norm(x),
            grad(lambda t: sum(y.square().sum() for y in jvp(norm, (t,), (v,))))(x),
        ),
        "the input, of a gradient": lambda x: (norm(x), *jvp(grad(lambda t: norm(t).sin().sum()), (x,), (v,))),
    }
    if weights:
        forms |= {
            "the input and all weights": lambda x: jvp(called, (weights, x), (tangents, v)),
            "one weight": lambda x: jvp(
                lambda some: called(some, x), ({name: weights[name] for name in of_first},), (of_first,)
            ),
        }
    return forms


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in NORMS), ("layer norm", torch.float64), ("group norm", torch.bfloat16)],
    ids=str,
)
def test_the_jvp_of_a_norm_is_as_plain(kind: str, dtype: torch.dtype) -> None:
    make, shape = NORMS[kind]
    norm = make().to(dtype)
    weights, x = [*norm.parameters()], torch.randn(shape).to(dtype).requires_grad_()
    with torch.no_grad():
        for weight in weights:
            weight.add_(torch.randn_like(weight))
    for form in _by_tangents(norm, torch.randn(shape).to(dtype)).values():

        def step(x: Tensor, form: Callable[[Tensor], Any] = form) -> Any:
            return sum(y.square().mean() for y in form(x * 1.5))

        assert_as_plain(step, x, leaves=weights, budget="1 GB")
        if kind == "layer norm" and dtype is torch.float32:
            assert_as_plain(step, x, leaves=weights, run=at_smallest_budget(step, x))


class _Block(nn.Module):
    """A block of a transformer whose attention is written by products."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        heads = (q @ k.mT / 8**0.5).softmax(-1) @ v
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def test_a_transformer_trains_on_its_own_jvp() -> None:
    """The loss of MeanFlow, within the smallest budget to the byte."""
    net, x, noise = nn.Sequential(_Block(), _Block()), torch.randn(2, 5, 16), torch.randn(2, 5, 16)

    def step(x: Tensor, noise: Tensor) -> Tensor:
        t = torch.full((2, 1, 1), 0.6)
        v = noise - x
        u, change = jvp(lambda z, t: net(z + t), (x + t * v, t), (v, torch.ones_like(t)))
        return (u - (v - 0.3 * change).detach()).square().mean() + change.square().mean()

    smallest = checkmate.min_budget(checkmate.trace(step, x, noise), time_limit=1).peak
    verify_to_the_byte(step, x, noise, budget=smallest)


MATRICES = [(6, 6), (3, 6, 6), (1, 6, 6), (2, 3, 6, 6)]


@pytest.mark.parametrize("left", MATRICES)
def test_products_of_batches_within_torch_func(left: tuple[int, ...]) -> None:
    for right in MATRICES:
        x, y = torch.randn(left).requires_grad_(), torch.randn(right).requires_grad_()
        v, w = torch.randn(left), torch.randn(right)
        steps: list[Callable[..., Any]] = [
            lambda x, y, v=v: sum(a.square().sum() for a in jvp(lambda t: t @ y, (x,), (v,))),
            lambda x, y, w=w: sum(a.square().sum() for a in jvp(lambda t: x.mT @ t, (y,), (w,))),
            lambda x, y: grad(lambda t: (t @ y).square().sum())(x).square().sum(),
        ]
        for step in steps:
            assert_as_plain(step, x, y, budget="1 GB")


def _of_attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


def _failing(x: Tensor) -> Tensor:
    """An op that is traced at a level, and then refused."""
    return x.max() * x


def _that_cannot_be_shown(x: Tensor) -> Tensor:
    """An op that Dynamo cannot describe at a level, whose message shows what it is given."""
    return x.quantile(0.3, -1, keepdim=True)


@pytest.mark.parametrize("f", [_of_attention, _failing, _that_cannot_be_shown])
def test_a_refusal_leaves_no_level_open(f: Callable[[Tensor], Tensor]) -> None:
    """Levels are entered by nodes of the graph; the fixture of all tests compares them before and after each."""
    x = torch.linspace(-2, 2, 64).view(4, 16)
    steps = {
        "jvp": lambda x: sum(jvp(f, (x * W,), (V,))).sum(),
        "grad": lambda x: grad(lambda t: f(t * W).sum())(x).sum(),
        "vjp": lambda x: vjp(f, x * W)[1](torch.ones_like(f(x)))[0].sum(),
        "vmap": lambda x: vmap(grad(lambda t: _failing(t * W).sum()))(x).sum(),
    }

    for step in steps.values():
        with contextlib.suppress(Unsupported):  # what can be followed differs by version
            compiled(step, budget="1 GB")(x)
        gc.collect()  # guards that frames of a traceback hold end
        assert_same_bits(jvp(torch.sin, (x,), (V,)), (x.sin(), x.cos() * V))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert (x * W).sum().requires_grad
