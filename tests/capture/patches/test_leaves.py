"""Functions given one tensor twice, and intermediates that become leaves, as plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from tests.support.plainly import assert_as_plain
from tests.support.versions import needs

pytestmark = pytest.mark.usefixtures("one_thread")
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


class _Steps:
    """With leaves that a step makes, and with one tensor given twice."""

    def of_an_intermediate(x: Tensor) -> Tensor:
        y = x.sin() * 1.7
        return (_Product.apply(y, y, y) * y.exp()).sum() + (y.tanh() * _Product.apply(x, y, x)).sum()

    def of_an_input(x: Tensor) -> Tensor:
        return (_Product.apply(x, x, x) * x.exp()).sum() + (x.tanh() * _Product.apply(x.cos(), x, x)).sum()

    def after_frozen_layers(x: Tensor) -> Tensor:
        """As a model does that is trained by adapters, with checkpoints."""
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
        """As models do that are trained with checkpoints: a view of an input, and what the step makes."""
        given = x.detach()[:, None]
        given.requires_grad = True
        bias = torch.zeros(50)
        bias.requires_grad = True
        return (x.sin()[:, None] * given + bias).square().sum()

    def attention_with_values_of_another_width(x: Tensor) -> Tensor:
        """As in multi-head latent attention, whose keys carry the positions too."""
        q, k, v = x[:24, :48].reshape(2, 6, 3, 32).transpose(1, 2).split([12, 12, 8], -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    def of_a_view_made_before(x: Tensor) -> Tensor:
        """A view of what is then multiplied by what needs a gradient."""
        made = torch.ones(40, 50)
        view = made.view(2000)
        made.mul_(x)
        return _Product.apply(view, x.view(2000), x.view(2000)).sum()


MAKES_A_LEAF = ("after_frozen_layers", "handed_on", "assigned")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=FOLLOWED if n in MAKES_A_LEAF else ()) for n in vars(_Steps) if n[0] != "_"],
)
def test_the_bits_of_plain_pytorch(name: str) -> None:
    assert_as_plain(getattr(_Steps, name), torch.randn(40, 50, requires_grad=True), profile="measure")


class _Asked:
    """Something asks for the gradient of a leaf."""

    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        (y := x.sin().requires_grad_()).register_hook(lambda grad: grad * 2)
        return model(y).sum()

    def kept(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().requires_grad_()
        return model(y).sum(), y.view(-1)

    def kept_of_a_part(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(_Asked.kept, model, x, use_reentrant=False)

    def alone(model: nn.Module, x: Tensor) -> Tensor:
        return x.sin().requires_grad_().sum()


HOOK_SEEN = needs("2.13", "it is planned: nobody sees what the hook gives")


@FOLLOWED
@pytest.mark.parametrize(
    ("step", "words"),
    [
        pytest.param(_Asked.hooked, "by a hook or outside", marks=HOOK_SEEN),
        (_Asked.kept, "by a hook or outside"),
        (_Asked.kept_of_a_part, "by a hook or outside"),
        (_Asked.alone, "which trains nothing"),
    ],
)
def test_a_leaf_whose_gradient_is_asked_for_is_refused(step: Callable[..., Any], words: str) -> None:
    model = nn.Linear(5, 2)
    with pytest.raises(checkmate.Unsupported, match=rf"test_leaves.py:\d+: .*{words}"):
        checkmate.compile(lambda x: step(model, x), budget="1 MB", time_limit=1)(torch.randn(3, 5))


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

    assert_as_plain(loss, x, leaves=weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layer, x: layer.requires_grad_(False), "on weight, and leaves it so"),
        (lambda layer, x: layer.bias.requires_grad_(True).requires_grad_(False), "on bias, which was frozen before it"),
        (
            lambda layer, x: checkpoint(lambda x: layer.weight.requires_grad_(False) * x, x, use_reentrant=False),
            "on weight, in a part that is a graph of its own, such as a checkpoint",
        ),
        (lambda layer, x: layer(x.requires_grad_()), r"pass it in with requires_grad_\(\)"),  # frozen by nobody
    ],
    ids=["left frozen", "thawed", "within a checkpoint", "of the batch"],
)
def test_flags_that_stay_changed_and_what_is_thawed_are_refused(change: Callable[..., Any], said: str) -> None:
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)

    def step(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        change(layer, x)
        return loss

    with pytest.raises(checkmate.Unsupported, match=said):
        checkmate.compile(step, budget="1 MB")(torch.ones(2, 4))
    assert [p.requires_grad for p in layer.parameters()] == [True, False]
