"""Functions given one tensor twice, and intermediates that become leaves, as plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.backends.tensor_state import same_bits
from tests.support.bits import assert_same_bits
from tests.support.versions import needs

FOLLOWED = needs("2.12", "Dynamo refuses requires_grad_() of what a step computes")


class _Product(torch.autograd.Function):
    """With gradients that differ by place, so that their order shows in the last bits."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        return a * b.sin() * c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = ctx.saved_tensors
        return grad * b.sin() * c * 1.37, grad * a * b.cos() * c * 3.1, grad * a * b.sin() * 0.77


def _of_an_intermediate(x: Tensor) -> Tensor:
    y = x.sin() * 1.7
    return (_Product.apply(y, y, y) * y.exp()).sum() + (y.tanh() * _Product.apply(x, y, x)).sum()


def _of_an_input(x: Tensor) -> Tensor:
    return (_Product.apply(x, x, x) * x.exp()).sum() + (x.tanh() * _Product.apply(x.cos(), x, x)).sum()


def _after_frozen_layers(x: Tensor) -> Tensor:
    """As a model does that is trained by adapters, with checkpoints."""
    with torch.no_grad():
        embedded = x.sin()
    embedded.requires_grad_()
    return (embedded * x.cos()).square().sum()


def _handed_on(x: Tensor) -> Tensor:
    """A leaf that one checkpointed part makes, and the next one takes."""

    def part(y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = torch.zeros(50)
            bias.requires_grad = True
        return y.sin() + bias, bias

    y, bias = checkpoint(part, x, None, use_reentrant=False)
    return checkpoint(part, y, bias, use_reentrant=False)[0].square().sum()


def _assigned(x: Tensor) -> Tensor:
    """As models do that are trained with checkpoints: a view of an input, and what the step makes."""
    given = x.detach()[:, None]
    given.requires_grad = True
    bias = torch.zeros(50)
    bias.requires_grad = True
    return (x.sin()[:, None] * given + bias).square().sum()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "step",
    [
        _of_an_intermediate,
        _of_an_input,
        *(pytest.param(step, marks=FOLLOWED) for step in (_after_frozen_layers, _assigned, _handed_on)),
    ],
)
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(40, 50, requires_grad=True)
    (expected,) = torch.autograd.grad(step(x), x)
    (found,) = torch.autograd.grad(checkmate.compile(step, budget="1 MB", time_limit=1)(x), x)
    assert same_bits(found, expected)


def _hooked(model: nn.Module, x: Tensor) -> Tensor:
    y = x.sin().requires_grad_()
    y.register_hook(lambda grad: grad * 2)
    return model(y).sum()


def _kept(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin().requires_grad_()
    return model(y).sum(), y.view(-1)


def _kept_of_a_part(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint(_kept, model, x, use_reentrant=False)


def _alone(model: nn.Module, x: Tensor) -> Tensor:
    return x.sin().requires_grad_().sum()


@FOLLOWED
@pytest.mark.parametrize(
    ("step", "words"),
    [
        pytest.param(
            _hooked, "by a hook or outside", marks=needs("2.13", "it is planned: nobody sees what the hook gives")
        ),
        (_kept, "by a hook or outside"),
        (_kept_of_a_part, "by a hook or outside"),
        (_alone, "which trains nothing"),
    ],
)
def test_a_leaf_whose_gradient_is_asked_for_is_refused(step: Callable[..., Any], words: str) -> None:
    model = nn.Linear(5, 2)
    with pytest.raises(checkmate.Unsupported, match=rf"test_leaves.py:\d+: .*{words}"):
        checkmate.compile(lambda x: step(model, x), budget="1 MB", time_limit=1)(torch.randn(3, 5))


@pytest.mark.usefixtures("one_thread")
def test_attention_with_values_of_another_width() -> None:
    """As in multi-head latent attention, whose keys carry the positions too."""
    x = torch.randn(2, 6, 3 * (12 + 12 + 8), requires_grad=True)

    def step(x: Tensor) -> Tensor:
        q, k, v = x.view(2, 6, 3, -1).transpose(1, 2).split([12, 12, 8], -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    (expected,) = torch.autograd.grad(step(x), x)
    (found,) = torch.autograd.grad(checkmate.compile(step, budget="1 MB", time_limit=1)(x), x)
    assert same_bits(found, expected)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def test_a_view_of_what_has_come_to_need_a_gradient() -> None:
    """It was made before what it shows was multiplied by a parameter."""
    weight = torch.arange(1.0, 5.0, requires_grad=True)

    def step() -> Tensor:
        made = torch.ones(4)
        view = made.view(4)
        made.mul_(weight)
        return _Times.apply(view, weight).sum()

    found = [torch.autograd.grad(run(), weight) for run in (checkmate.compile(step, budget="1 MB"), step)]
    assert same_bits(*found[0], *found[1])


def _frozen_for_a_while(base: nn.Module, adapter: nn.Linear, x: Tensor) -> Tensor:
    policy = base(x) + adapter(x)
    adapter.requires_grad_(False)
    with torch.no_grad():
        reference = base(x)
    fixed = adapter(policy)  # its gradient reaches the policy, and not the adapter here
    assert not adapter.weight.requires_grad
    adapter.requires_grad_(True)
    return (policy - reference).square().mean() + fixed.sin().mean() + adapter(policy).mean()


def _by_attribute(base: nn.Module, adapter: nn.Linear, x: Tensor) -> Tensor:
    adapter.weight.requires_grad = False
    fixed = adapter(base(x))
    adapter.weight.requires_grad = True
    return fixed.square().mean() + adapter(x).sin().mean()


@pytest.mark.parametrize("step", [_frozen_for_a_while, _by_attribute])
def test_parameters_frozen_for_a_while(step: Callable[..., Tensor]) -> None:
    """As those of an adapter that is off, or of a critic that judges."""
    torch.manual_seed(0)
    base, adapter, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6)
    weights = [*base.parameters(), *adapter.parameters()]
    compiled = checkmate.compile(lambda x: step(base, adapter, x), budget="1 MB", time_limit=1)
    found = [torch.autograd.grad(run(x), weights) for run in (compiled, lambda x: step(base, adapter, x))]
    assert_same_bits(*found)
    assert all(weight.requires_grad for weight in weights)


@needs("2.14", "Dynamo refuses what peft asks of its layers before it switches an adapter off")
def test_the_adapter_of_peft_is_off_for_the_reference() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model, x = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"])), torch.randn(4, 8)
    weights = [p for p in model.parameters() if p.requires_grad]
    for weight in weights:
        nn.init.normal_(weight)

    def loss(x: Tensor) -> Tensor:
        policy = model(x).log_softmax(-1)
        with torch.no_grad(), model.disable_adapter():
            reference = model(x).log_softmax(-1)
        return -nn.functional.logsigmoid(policy - reference).mean()

    found = [torch.autograd.grad(run(x), weights) for run in (checkmate.compile(loss, budget="1 MB"), loss)]
    assert_same_bits(*found)


def _left(layer: nn.Module) -> None:
    layer.requires_grad_(False)


def _thawed(layer: nn.Module) -> None:
    layer.bias.requires_grad_(True).requires_grad_(False)


def _within_a_checkpoint(layer: nn.Module) -> None:
    checkpoint(lambda x: layer.weight.requires_grad_(False) * x, torch.ones(4), use_reentrant=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_left, "on weight, and leaves it so"),
        (_thawed, "on bias, which was frozen before it"),
        (_within_a_checkpoint, "on weight, in a part that is a graph of its own, such as a checkpoint"),
    ],
)
def test_flags_that_stay_changed_and_frozen_parameters_that_are_thawed_are_refused(
    change: Callable[[nn.Module], None], said: str
) -> None:
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        change(layer)
        return loss

    with pytest.raises(checkmate.Unsupported, match=said):
        checkmate.compile(step, budget="1 MB")(torch.ones(2, 4))
    assert [p.requires_grad for p in layer.parameters()] == [True, False]


def test_a_batch_that_the_step_has_need_a_gradient_is_refused_as_such() -> None:
    """It was frozen by nobody."""
    layer = nn.Linear(4, 4)
    with pytest.raises(checkmate.Unsupported, match=r"pass it in with requires_grad_\(\)"):
        checkmate.compile(lambda x: layer(x.requires_grad_()).sum(), budget="1 MB")(torch.ones(2, 4))


@pytest.mark.usefixtures("one_thread")
def test_a_tied_weight_frozen_by_one_name_is_frozen_by_the_other() -> None:
    table, head, i = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), torch.arange(6)
    head.weight = table.weight

    def step(i: Tensor) -> Tensor:
        hidden = table(i).sin()
        head.requires_grad_(False)
        fixed = head(hidden).square().mean() + table(i).cos().mean()
        table.weight.requires_grad_(True)
        return fixed + head(hidden).sin().mean()

    compiled = checkmate.compile(step, budget="1 MB", time_limit=1)
    assert_same_bits(*(torch.autograd.grad(run(i), table.weight) for run in (compiled, step)))
