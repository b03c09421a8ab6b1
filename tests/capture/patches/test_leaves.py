"""Functions given one tensor twice, and intermediates that become leaves, as plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.plainly import assert_as_plain, assert_refused
from tests.support.versions import needs

pytestmark = pytest.mark.usefixtures("one_thread")
FOLLOWED = needs("2.12", "Dynamo refuses requires_grad_() of what a step computes")


class _Product(torch.autograd.Function):
    """A product whose gradients differ by place, so that their order shows in the last bits."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        return a * b.sin() * c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = ctx.saved_tensors
        return grad * b.sin() * c * 1.37, grad * a * b.cos() * c * 3.1, grad * a * b.sin() * 0.77


product = _Product.apply


class _Steps:
    """Steps that give a function one tensor twice."""

    def of_an_intermediate(x: Tensor) -> Tensor:
        y = x.sin() * 1.7
        return (product(y, y, y) * y.exp()).sum() + (y.tanh() * product(x, y, x)).sum()

    def of_an_input(x: Tensor) -> Tensor:
        return (product(x, x, x) * x.exp()).sum() + (x.tanh() * product(x.cos(), x, x)).sum()

    def attention_with_values_of_another_width(x: Tensor) -> Tensor:
        """Multi-head latent attention has such values: its keys carry the positions too."""
        q, k, v = x[:24, :48].reshape(2, 6, 3, 32).transpose(1, 2).split([12, 12, 8], -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    def of_a_view_made_before(x: Tensor) -> Tensor:
        """A view of what is then multiplied by what needs a gradient."""
        made = torch.ones(40, 50)
        view = made.view(2000)
        made.mul_(x)
        return product(view, x.view(2000), x.view(2000)).sum()


class _Leaves:
    """Steps that make leaves."""

    def after_frozen_layers(x: Tensor) -> Tensor:
        """Models do this that are trained by adapters, with checkpoints."""
        with torch.no_grad():
            embedded = x.sin()
        embedded.requires_grad_()
        return (embedded * x.cos()).square().sum()

    def handed_on(x: Tensor) -> Tensor:
        """A leaf that one checkpointed part makes, and the next one takes."""

        def part(y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            if bias is None:
                bias = torch.zeros(50)
                bias.requires_grad = True
            return y.sin() + bias, bias

        y, bias = checkpoint(part, x, None, use_reentrant=False)
        return checkpoint(part, y, bias, use_reentrant=False)[0].square().sum()

    def assigned(x: Tensor) -> Tensor:
        """Models trained with checkpoints assign the flag, to a view of an input and to a tensor of the step."""
        given = x.detach()[:, None]
        given.requires_grad = True
        bias = torch.zeros(50)
        bias.requires_grad = True
        return (x.sin()[:, None] * given + bias).square().sum()


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, id=name, marks=FOLLOWED if kind is _Leaves else ())
     for kind in (_Steps, _Leaves) for name, step in vars(kind).items() if name[0] != "_"],
)  # fmt: skip
def test_the_bits_of_plain_pytorch(step: Callable[[Tensor], Tensor]) -> None:
    assert_as_plain(step, torch.randn(40, 50, requires_grad=True), profile="measure")


LINEAR = nn.Linear(5, 2)


def _hooked(x: Tensor) -> Tensor:
    (y := x.sin().requires_grad_()).register_hook(lambda grad: grad * 2)
    return LINEAR(y).sum()


def _kept(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin().requires_grad_()
    return LINEAR(y).sum(), y.view(-1)


HOOK_SEEN = needs("2.13", "it is planned: nobody sees what the hook gives")
ASKED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "hooked": (_hooked, "by a hook or outside"),
    "kept": (_kept, "by a hook or outside"),
    "kept of a part": (lambda x: checkpoint(_kept, x, use_reentrant=False), "by a hook or outside"),
    "alone": (lambda x: x.sin().requires_grad_().sum(), "which trains nothing"),
}


@FOLLOWED
@pytest.mark.parametrize("name", [pytest.param("hooked", marks=HOOK_SEEN), *[*ASKED][1:]])
def test_a_leaf_whose_gradient_is_asked_for_is_refused(name: str) -> None:
    step, words = ASKED[name]
    assert_refused(step, torch.randn(3, 5), words=rf"test_leaves.py:\d+: .*{words}")


class _Frozen:
    """Parameters are frozen for a while: those of an adapter that is off, or of a critic that judges."""

    def frozen_for_a_while(base: nn.Module, adapter: nn.Linear, x: Tensor) -> Tensor:
        policy = base(x) + adapter(x)
        adapter.requires_grad_(False)
        with torch.no_grad():
            reference = base(x)
        fixed = adapter(policy)  # its gradient reaches the policy, and not the adapter here
        assert not adapter.weight.requires_grad
        adapter.requires_grad_(True)
        return (policy - reference).square().mean() + fixed.sin().mean() + adapter(policy).mean()

    def by_attribute(base: nn.Module, adapter: nn.Linear, x: Tensor) -> Tensor:
        adapter.weight.requires_grad = False
        fixed = adapter(base(x))
        adapter.weight.requires_grad = True
        return fixed.square().mean() + adapter(x).sin().mean()

    def frozen_by_one_of_two_names(base: nn.Module, adapter: nn.Linear, x: Tensor) -> Tensor:
        hidden = base(x).sin()
        adapter.requires_grad_(False)
        fixed = adapter(hidden).square().mean() + base(x).cos().mean()
        base.weight.requires_grad_(True)
        adapter.bias.requires_grad_(True)
        return fixed + adapter(hidden).sin().mean()


@pytest.mark.parametrize("step", [_Frozen.frozen_for_a_while, _Frozen.by_attribute, _Frozen.frozen_by_one_of_two_names])
def test_parameters_frozen_for_a_while(step: Callable[..., Tensor]) -> None:
    base, adapter, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(4, 6)
    if step is _Frozen.frozen_by_one_of_two_names:
        base.weight = adapter.weight
    weights = [*base.parameters(), *adapter.parameters()]
    assert_as_plain(lambda x: step(base, adapter, x), x, leaves=weights)
    assert all(weight.requires_grad for weight in weights)


@needs("2.14", "Dynamo refuses what peft asks of its layers before it switches an adapter off")
def test_the_adapter_of_peft_is_off_for_the_reference() -> None:
    peft = pytest.importorskip("peft")
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

    assert_as_plain(loss, x, leaves=weights)


FLAGS: dict[str, tuple[Callable[..., Any], str]] = {  # of a layer whose bias is frozen
    "left frozen": (lambda layer, x: layer.requires_grad_(False), "on weight, and leaves it so"),
    "thawed": (
        lambda layer, x: layer.bias.requires_grad_(True).requires_grad_(False),
        "on bias, which was frozen before it",
    ),
    "within a checkpoint": (
        lambda layer, x: checkpoint(lambda x: layer.weight.requires_grad_(False) * x, x, use_reentrant=False),
        "on weight, in a part that is a graph of its own, such as a checkpoint",
    ),
    "of the batch": (lambda layer, x: layer(x.requires_grad_()), r"pass it in with requires_grad_\(\)"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_stay_changed_and_what_is_thawed_are_refused(name: str) -> None:
    (change, words), layer = FLAGS[name], nn.Linear(4, 4)
    layer.bias.requires_grad_(False)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        change(layer, x)
        return loss

    assert_refused(step, torch.ones(2, 4), words=words)
    assert [p.requires_grad for p in layer.parameters()] == [True, False]
