"""Results lie in memory as those of the kernels, have their types, and so have the bits of eager PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import checkmate
from checkmate.capture.patches.results import strides as layouts
from checkmate.errors import Unsupported
from tests.support.plainly import assert_as_plain, at_smallest_budget, compiled, verify_to_the_byte
from tests.support.sampling import every, few, in_turn, long, slow

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
X = (2, 3, 9, 7)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "rotated": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "window": lambda x: torch.cat([x, x], dim=3)[..., 2:9],
    "expanded": lambda x: x[:, :, :1].expand(X),
    "flat": lambda x: x.flatten(1).t().contiguous().t(),
    "of three dimensions": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_lays_its_result_out_as_the_kernel_does(layout: str, training: bool) -> None:
    """A program that asks for the layout takes the branch that it takes in plain PyTorch."""
    seen: list[tuple[int, ...]] = []

    def step(x: Tensor) -> Tensor:
        laid_out = LAYOUTS[layout](x.sin())
        channels = laid_out.shape[1]
        y = F.batch_norm(laid_out, torch.zeros(channels), torch.ones(channels), training=training)
        seen.append(y.stride())
        return (y * 2 if y.is_contiguous() else y * 3).square().sum()

    assert_as_plain(step, torch.randn(X, requires_grad=True))
    assert len(seen) > 1
    assert len({*seen}) == 1


MENDED = sorted(layouts._DESCRIBED_WRONG, key=str)
OF_OPERANDS = ("contiguous", "transposed", "channels last", "window", "expanded")
OPTIONS = {"number": 0.5, "float": 0.5, "int": 1, "bool": False, "input_dtype": torch.float32}  # by type or name
STATISTICS, AFFINE = (torch.rand(2, 3, 9, 1), torch.rand(2, 3, 9, 1)), (torch.rand(7), torch.rand(7))
FURTHER: dict[Any, tuple[int, Callable[..., tuple[Any, ...]]]] = {  # how many tensors in a layout, and all arguments
    aten._prelu_kernel_backward.default: (2, lambda grad, x: (grad, x, torch.rand(1, 3, 1, 1))),
    aten.binary_cross_entropy.default: (2, lambda x, y: (x, y, None, 0)),
    aten.channel_shuffle.default: (1, lambda x: (x, 3)),
    aten.glu_backward.default: (2, lambda grad, x: (grad[:1], x, 0)),
    aten.huber_loss.default: (2, lambda x, y: (x, y, 0)),
    aten.leaky_relu_backward.default: (2, lambda grad, x: (grad, x, 0.1, False)),
    aten.native_layer_norm_backward.default: (2, lambda grad, x: (grad, x, [7], *STATISTICS, *AFFINE, [True] * 3)),
    aten.reflection_pad2d_backward.default: (2, lambda grad, x: (F.pad(grad, [1] * 4), x, [1] * 4)),
    aten.replication_pad2d_backward.default: (2, lambda grad, x: (F.pad(grad, [1] * 4), x, [1] * 4)),
    aten.roll.default: (1, lambda x: (x, [1], [1])),
}


def _usual(op: Any) -> tuple[int, Callable[..., tuple[Any, ...]]]:
    """As in FURTHER, for an op that takes tensors, numbers and flags only."""
    taken = [(a.name, str(a.type)) for a in op._schema.arguments if not a.kwarg_only]

    def arguments(*tensors: Tensor) -> tuple[Any, ...]:
        rest = iter(tensors)
        return tuple(next(rest) if kind == "Tensor" else OPTIONS.get(name, OPTIONS.get(kind)) for name, kind in taken)

    return sum(kind == "Tensor" for _, kind in taken), arguments


@pytest.mark.parametrize("op", [*MENDED[::3], *map(slow, MENDED[1::3]), *map(slow, MENDED[2::3])], ids=str)
def test_fake_results_lie_as_those_of_the_kernel(op: Any) -> None:
    tensors, arguments = FURTHER.get(op) or _usual(op)
    for laid_out in itertools.product([LAYOUTS[name] for name in OF_OPERANDS], repeat=tensors):
        args = arguments(*(layout(torch.rand(X) * 0.8 + 0.1) for layout in laid_out))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        assert [t.stride() for t in tree_leaves(fake)] == [t.stride() for t in tree_leaves(op(*args))]


def test_a_gate_whose_gradient_is_transposed() -> None:
    """The backward of a projection, as in gated linear attention, views the gradient as a matrix, or copies it."""
    model = nn.Linear(6, 4)
    assert_as_plain(
        lambda x: (F.softplus(model(x)).transpose(1, 2).contiguous().cumsum(-1) * 0.3).square().sum(),
        torch.randn(2, 12, 6),
        leaves=[*model.parameters()],
    )


ROWS, WIDTH = 24, 24
BASES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {  # what is written, and whose memory that is a part of
    "contiguous": lambda x: (x, x),
    "transposed": lambda x: ((y := x.t().contiguous().t()), y),
    "view": lambda x: (x.t(), x),
    "window": lambda x: (x[2:20, 3:21], x),
    "every other": lambda x: (x[:, ::2], x),
    "part": lambda x: (x.unsafe_chunk(2, dim=1)[1], x[:, :1]),
}
A, B = torch.rand(ROWS, WIDTH) + 0.1, torch.rand(ROWS, WIDTH) + 0.1
ROW = torch.tensor([3, 0, 3, 1])
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # y is (h, w), a and b are (h, w) and contiguous
    "masked_fill": lambda y, a, b: y.masked_fill_(a > 0.6, 0.5),
    "masked_scatter": lambda y, a, b: y.masked_scatter_(a > 0.6, b),
    "scatter": lambda y, a, b: y.scatter_(0, ROW.expand(y.shape[1], 4).t(), b),
    "scatter_add": lambda y, a, b: y.scatter_add_(0, ROW.expand(y.shape[1], 4).t(), b),
    "scatter_reduce": lambda y, a, b: y.scatter_reduce_(0, ROW.expand(y.shape[1], 4).t(), b[:4], "amax"),
    "index_add": lambda y, a, b: y.index_add_(0, ROW, b[:4], alpha=0.3),
    "index_copy": lambda y, a, b: y.index_copy_(0, ROW[1:], b[:3]),
    "index_fill": lambda y, a, b: y.index_fill_(1, ROW, 0.3),
    "index_put": lambda y, a, b: y.index_put_((ROW,), b[:4], accumulate=True),
    "cumsum": lambda y, a, b: y.cumsum_(1),
    "cumprod": lambda y, a, b: y.cumprod_(0),
    "addmm": lambda y, a, b: y.addmm_(a[:, :5], b[:5], beta=0.7),
    "addmv": lambda y, a, b: y[0].addmv_(a.t(), b[:, 0]),
    "addr": lambda y, a, b: y.addr_(a[:, 0], b[0]),
    "addcmul": lambda y, a, b: y.addcmul_(a, b, value=0.3),
    "addcdiv": lambda y, a, b: y.addcdiv_(a, b, value=0.3),
    "add": lambda y, a, b: y.add_(a, alpha=0.3).mul_(b).sigmoid_(),
    "relu": lambda y, a, b: F.relu(y.sub_(1), inplace=True),
    "hardswish": lambda y, a, b: F.hardswish(y, inplace=True),
    "renorm": lambda y, a, b: y.renorm_(2, 0, 1.5),
    "tril": lambda y, a, b: y.tril_(),
    "copy": lambda y, a, b: y.copy_(a),
    "zero": lambda y, a, b: y.zero_(),
    "normal": lambda y, a, b: y.normal_(0.2, 1.5),
    "uniform": lambda y, a, b: y.uniform_(),
    "bernoulli": lambda y, a, b: y.bernoulli_(0.3),
    "bernoulli of each": lambda y, a, b: y.bernoulli_(a.clamp(max=1)),
    "dropout": lambda y, a, b: F.dropout(y, 0.3, inplace=True),
}


WITH_EACH = ("masked_fill", "scatter_add", "addmm", "normal", "bernoulli")
CASES = [(name, base) for base in BASES for name in WRITES if name in WITH_EACH or base in ("transposed", "window")]


@pytest.mark.parametrize(
    ("name", "base"), [*CASES[::10], *few(3, [case for i, case in enumerate(CASES) if i % 10 in (3, 7)])]
)
def test_a_write_in_place_leaves_what_eager_leaves(name: str, base: str) -> None:
    """In the tensor, in what shares its memory, in sums over both, in the gradient and in the random state."""

    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, whole = BASES[base](x * 1.25)
        height, width = y.shape
        written = WRITES[name](y, A[:height, :width].contiguous(), B[:height, :width].contiguous())
        loss = (written.sum(0).sin() * 0.3).sum() + (y.sum(1).cos() * 0.7).sum() + whole.sum()
        return loss, y, whole

    def with_strides(step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda x: (*(results := step(x)), [t.stride() for t in results])

    x = torch.randn(ROWS, WIDTH).abs().add_(0.2).requires_grad_()
    assert_as_plain(with_strides(step), x, run=with_strides(at_smallest_budget(step, x)))


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda y: y.add_(1),
    "erf, transposed": lambda y: y.t().erf_(),
    "cumsum": lambda y: y.cumsum_(0),
    "normal": lambda y: y.normal_(),
    "one row": lambda y: y[1].mul_(3),
}


@pytest.mark.parametrize("name", every(5, OVERLAPPING))
def test_a_write_to_elements_that_overlap_writes_each_in_turn(name: str) -> None:
    """Write to an input, to a view of another input, and to a tensor of the step."""
    weight = torch.randn(4, 6, requires_grad=True)

    def overlapping(x: Tensor) -> Tensor:
        return x.as_strided((4, 6), (2, 1), 3)

    def step(alone: Tensor, x: Tensor, view: Tensor) -> tuple[Tensor, ...]:
        made = x.sin() * weight.sum()
        written = [alone, view, overlapping(made)]
        for y in written:
            OVERLAPPING[name](y)
        return sum((y * weight).sum() for y in written), *(y * 2 for y in written), x * 1, made * 1

    def given(step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, alone: step(overlapping(alone), x, overlapping(x))

    assert_as_plain(given(step), torch.randn(40), torch.randn(40), run=given(compiled(step)), leaves=[weight])


def test_lists_of_tensors_are_written_in_place() -> None:
    """Products in half precision round their factors, and those that make new tensors do not."""
    model, numbers = nn.Linear(7, 5), torch.linspace(-3, 3, 300)

    def step(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ys = [model(x), model(x * 2)]
        torch._foreach_mul_(ys, 1.1)
        torch._foreach_lerp_(ys, [torch.ones(3, 5), torch.ones(3, 5)], 0.3)
        torch._foreach_mul_(list(tensors), -0.3)
        torch._foreach_mul_(list(tensors), [0.7, 0.3, 1.1])
        loss = sum(y.sin().sum() for y in [*ys, *torch._foreach_pow(2.7, ys)])
        return loss, *torch._foreach_mul(list(tensors), 0.9)

    batch = torch.randn(3, 7), numbers.bfloat16(), numbers.half(), numbers
    assert_as_plain(step, *batch, leaves=[*model.parameters()])


@pytest.mark.parametrize(
    "expand",
    [
        lambda x: x.expand_as(x),
        lambda x: x.expand(-1, 6),
        lambda x: x.t().expand(1, 1, 6, 4)[0, 0, 1:],
        lambda x: x.view(24).broadcast_to(1, 24)[0, 3:],
    ],
)
def test_a_write_through_an_expansion_that_repeats_nothing(expand: Callable[[Tensor], Tensor]) -> None:
    """Write to an input, and to a tensor of the step. AOTAutograd loses such writes."""
    weight = torch.randn(4, 6, requires_grad=True)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        made, read = x * weight.detach(), expand(weight).square().mean()
        for y in (x, made):
            expand(y).mul_(0.5).add_(1)
        return (made * weight).sum() + read, x * 1, made * 1

    assert_as_plain(step, torch.arange(24.0).view(4, 6), leaves=[weight])


def _write_first_row(y: Tensor) -> None:
    y[0] = 1.0


SHARED = r"elements share memory\n.*test_strides.py:\d+[^$]*x\.clone\(\)"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {  # y and what is made need no gradient and one; others are inputs
    "zeroed": (lambda y, *_: y.expand(4, 6).zero_(), SHARED),
    "a row filled": (lambda y, *_: y.expand(4, 6)[0].fill_(2), SHARED),
    "a window": (lambda y, *_: y.unfold(0, 4, 1)[1].add_(1), SHARED),
    "of a list": (lambda y, *_: torch._foreach_add_([y.as_strided((2, 4), (1, 1))], 1.0), SHARED),
    "read as well": (lambda y, *_: (y := y.as_strided((2, 4), (1, 1))).add_(y), SHARED),
    "an input": (
        lambda y, made, rows, windows: _write_first_row(rows),
        r"share memory\n.*test_strides.py:\d+ in _write_first_row: y\[0\] = 1.0[^$]*clone",
    ),
    "read by another name": (
        lambda y, made, rows, windows: windows.detach().sub_(windows, alpha=0.5),
        "sub_ writes to a tensor whose elements share memory",
    ),
    "twice in a list": (
        lambda y, made, *_: torch._foreach_mul_([made, made], 1.5),
        r"test_strides.py:\d+: _foreach_mul_ writes to one tensor more than once",
    ),
    "a view in a list": (
        lambda y, made, *_: torch._foreach_mul_([made[1:], made * 2], 1.5),
        r"test_strides.py:\d+: _foreach_mul_ writes to a view",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_to_shared_elements_and_those_that_tracing_loses_are_refused(name: str) -> None:
    write, message = REFUSED[name]

    def step(x: Tensor, rows: Tensor, windows: Tensor) -> Tensor:
        y, made = x.detach() * 2, x * 2
        write(y, made, rows, windows)
        return (x * y).sum() + made.sum()

    batch = torch.ones(6).expand(4, 6), torch.randn(40).as_strided((3, 4), (4, 2))
    with pytest.raises(Unsupported, match=message):
        checkmate.trace(step, torch.ones(6, requires_grad=True), *batch)


def test_views_of_another_shape_lie_as_in_eager_pytorch() -> None:
    """Strides of dimensions of one element, too: a convolution may choose its kernel by them."""
    rng = random.Random(0)
    compared = 0
    for _ in range(300):
        shape = [rng.choice((1, 1, 2, 3)) for _ in range(rng.choice((2, 3, 4, 5)))]
        strides, step = [0] * len(shape), 1
        for d in rng.sample(range(len(shape)), len(shape)):
            strides[d], step = step, step * shape[d]
        factors = [n for n in shape if n > 1]
        wanted = [math.prod(factors)] if rng.random() < 0.3 else rng.sample(factors, len(factors))
        for _ in range(rng.choice((0, 1, 2))):
            wanted.insert(rng.randrange(len(wanted) + 1), 1)
        x = torch.empty_strided(shape, strides)
        try:
            eager = x.view(wanted)
        except RuntimeError:  # its memory is in another order
            continue
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            views = fake.view(wanted), aten._unsafe_view.default(fake, wanted)
        assert [view.stride() for view in views] == [eager.stride()] * 2, (shape, strides, wanted)
        compared += 1
    assert compared > 150


HALVES = [torch.bfloat16, torch.float16]
LAYER, GROUPS = (4, 5, 8), (4, 8, 6, 6)


def _ones(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _gradients_of_groups(x: torch.dtype, w: torch.dtype, mask: list[bool]) -> tuple[Tensor | None, ...]:
    like, statistics = _ones(x, *GROUPS), _ones(w, 4, 2)
    return aten.native_group_norm_backward(like, like, statistics, statistics, _ones(w, 8), 4, 8, 36, 2, mask)


CALLS: dict[str, Callable[[torch.dtype, torch.dtype], tuple[Tensor | None, ...]]] = {  # types of x and of parameters
    "layer": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], _ones(w, 8), _ones(w, 8), 1e-5),
    "layer without parameters": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], None, None, 1e-5),
    "layer with a bias": lambda x, w: aten.native_layer_norm(_ones(x, *LAYER), [8], None, _ones(w, 8), 1e-5),
    "groups": lambda x, w: aten.native_group_norm(_ones(x, *GROUPS), _ones(w, 8), _ones(w, 8), 4, 8, 36, 2, 1e-5),
    "gradients of groups": lambda x, w: _gradients_of_groups(x, w, [True] * 3),
    "gradients of groups' parameters": lambda x, w: _gradients_of_groups(x, w, [False, True, True]),
    "batch": lambda x, w: aten._native_batch_norm_legit_functional(
        _ones(x, *GROUPS), *(_ones(w, 8) for _ in range(4)), True, 0.1, 1e-5
    ),
    "batch without parameters": lambda x, w: aten._native_batch_norm_legit_functional(
        _ones(x, *GROUPS), None, None, _ones(w, 8), _ones(w, 8), True, 0.1, 1e-5
    ),
    "batch without statistics": lambda x, w: aten._native_batch_norm_legit.no_stats(
        _ones(x, *GROUPS), _ones(w, 8), _ones(w, 8), True, 0.1, 1e-5
    ),
    "soft margins": lambda x, w: (aten.soft_margin_loss(_ones(x, 4), _ones(w, 4), 1),),
    "gradients of soft margins": lambda x, w: (
        aten.soft_margin_loss_backward(_ones(x, 4), _ones(x, 4), _ones(w, 4), 1),
    ),
}


@in_turn(name=CALLS, dtype=[*HALVES, torch.float32])
def test_types_are_those_of_the_kernel(name: str, dtype: torch.dtype) -> None:
    for parameters in {dtype, torch.float32}:
        real = CALLS[name](dtype, parameters)
        with FakeTensorMode():
            described = CALLS[name](dtype, parameters)
        about = [[t is not None and (t.dtype, t.shape, t.stride()) for t in made] for made in (described, real)]
        assert about[0] == about[1], parameters


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm([16, 6, 6]),
    "groups": lambda: nn.GroupNorm(4, 16),
    "batch": lambda: nn.BatchNorm2d(16),
    "batch without statistics": lambda: nn.BatchNorm2d(16, track_running_stats=False),
    "batch without parameters": lambda: nn.BatchNorm2d(16, affine=False),
}


@in_turn(name=map(long, NORMS), dtype=HALVES)
def test_peaks_under_autocast_are_predicted_to_the_byte(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """At the smallest budget, with the bits of plain PyTorch; and each op is measured."""
    layers = [nn.Conv2d(3, 16, 3), NORMS[name](), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), NORMS[name](), nn.ReLU()]
    net, x = nn.Sequential(*layers), torch.randn(4, 3, 8, 8)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return net(x).float().square().mean()

    problem = checkmate.trace(step, x)
    assert "guess" not in problem.profile.source
    verify_to_the_byte(step, x, budget=checkmate.min_budget(problem, time_limit=1).peak)
    assert "estimated" not in caplog.text
