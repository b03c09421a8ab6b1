"""A compiled module is the same module, with another forward."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from tests.bits import assert_same_bits


class Net(nn.Module):
    """Linear layers, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.tag = "mine"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.training:
            self.seen += 1
        return self.last(F.dropout(torch.relu(self.first(x)), 0.1, self.training)) * scale


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 16)


def test_shares_everything_with_the_model(net: Net) -> None:
    compiled = checkmate.compile(net, budget="1 MB")
    assert isinstance(compiled, Net)
    assert repr(compiled) == repr(net)
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert all(a is b for a, b in zip(compiled.parameters(), net.parameters(), strict=True))
    compiled.tag = "ours"
    assert net.tag == "ours"
    compiled.eval()
    assert not net.training
    assert not net.first.training


def test_the_model_stays_as_it_was(net: Net, x: Tensor) -> None:
    before = dict(vars(net))
    compiled = checkmate.compile(net, budget="1 MB")
    compiled(x).sum().backward()
    assert type(net) is Net
    assert vars(net).keys() == before.keys()
    assert net(x).grad_fn.name() != "CompiledFunctionBackward"


def test_training_and_evaluation(net: Net, x: Tensor) -> None:
    compiled = checkmate.compile(net, budget="1 MB")
    compiled(x).sum().backward()
    compiled.eval()
    assert_same_bits(compiled(x), net(x))
    with torch.no_grad():
        assert_same_bits(compiled(x, scale=2.0), net(x, scale=2.0))
    compiled.train()
    compiled(x).sum().backward()
    assert net.seen == 2
    assert len(compiled.plans) == 2  # training, and evaluation with gradients


def test_load_state_dict(net: Net, x: Tensor) -> None:
    compiled = checkmate.compile(net, budget="1 MB").eval()
    other = Net().eval()
    compiled(x)
    compiled.load_state_dict(other.state_dict())
    assert_same_bits(compiled(x), other(x))


def test_copy_is_compiled_and_independent(net: Net, x: Tensor) -> None:
    compiled = checkmate.compile(net, budget="1 MB")
    compiled(x)
    twin = copy.deepcopy(compiled)
    twin(x).sum().backward()
    assert len(compiled.plans) == len(twin.plans) == 1
    assert net.first.weight.grad is None
    assert twin.first.weight.grad is not None
    assert twin.seen == 2
    assert net.seen == 1


def test_saved_as_it_was_given(net: Net, x: Tensor) -> None:
    compiled = checkmate.compile(net, budget="1 MB").eval()
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is Net
    assert_same_bits(loaded(x), compiled(x))


def test_hooks_of_the_module_itself(net: Net, x: Tensor) -> None:
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append("forward"))
    net.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    checkmate.compile(net, budget="1 MB")(x).sum().backward()
    assert seen == ["forward", "backward"]


def test_frozen_parameters_have_no_gradient(net: Net, x: Tensor) -> None:
    net.first.requires_grad_(False)
    compiled = checkmate.compile(net, budget="1 MB")
    compiled(x).sum().backward()
    assert net.first.weight.grad is None
    net.first.requires_grad_(True)
    compiled(x).sum().backward()
    assert net.first.weight.grad is not None


def test_forward_replaced_on_the_object(net: Net) -> None:
    net.forward = lambda x: x
    with pytest.raises(checkmate.Unsupported, match="replaced on the object"):
        checkmate.compile(net, budget="1 MB")
