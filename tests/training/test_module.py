"""A compiled module is the same module, with another forward."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.processes import run_python

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
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
def compiled(net: Net) -> Any:
    return checkmate.compile(net, budget="1 MB")


def test_shares_everything_with_the_model(net: Net, compiled: Any) -> None:
    assert isinstance(compiled, Net)
    assert repr(compiled) == repr(net)
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert all(a is b for a, b in zip(compiled.parameters(), net.parameters(), strict=True))
    compiled.tag = "ours"
    compiled.eval()
    assert (net.tag, net.training, net.first.training) == ("ours", False, False)


def test_the_model_stays_as_it_was(net: Net) -> None:
    before = dict(vars(net))
    compiled = checkmate.compile(net, budget="1 MB")
    compiled(X).sum().backward()
    assert type(net) is Net
    assert vars(net).keys() == before.keys()
    assert net(X).grad_fn.name() != "CompiledFunctionBackward"


def test_training_and_evaluation(net: Net, compiled: Any) -> None:
    compiled(X).sum().backward()
    compiled.eval()
    assert_same_bits(compiled(X), net(X))
    with torch.no_grad():
        assert_same_bits(compiled(X, scale=2.0), net(X, scale=2.0))
    compiled.train()
    compiled(X).sum().backward()
    assert net.seen == 2
    assert len(compiled.plans) == 2  # training, and evaluation with gradients


def test_compiled_again_it_has_the_other_budget(net: Net) -> None:
    """A cell of a notebook may run again: ``model = checkmate.compile(model, ...)``."""
    torch.manual_seed(0)
    expected = net(X)
    compiled = checkmate.compile(checkmate.compile(net, budget="1 GB"), budget="1 MB")
    torch.manual_seed(0)
    assert_same_bits(compiled(X), expected)
    assert [plan.budget for plan in compiled.plans] == [1_000_000]
    assert compiled.seen == 2


def test_copy_is_compiled_and_independent(net: Net, compiled: Any) -> None:
    compiled(X)
    twin = copy.deepcopy(compiled)
    twin(X).sum().backward()
    assert len(compiled.plans) == len(twin.plans) == 1
    assert net.first.weight.grad is None
    assert twin.first.weight.grad is not None
    assert (twin.seen, net.seen) == (2, 1)


def saved_and_loaded(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_saved_and_loaded_it_keeps_its_budget(net: Net) -> None:
    compiled = checkmate.compile(net, budget="1 MB", method="checkpoint-all", reserve=1000)
    compiled(X).sum().backward()
    loaded = saved_and_loaded(compiled)
    assert isinstance(loaded, Net)
    assert (loaded.tag, loaded.seen) == ("mine", 1)
    assert_same_bits([*loaded.parameters()], [*net.parameters()])
    assert loaded.plans == []  # it plans at its first call
    loaded(X).sum().backward()
    assert (loaded.plans[0].budget, loaded.plans[0].method) == (999_000, "checkpoint-all")
    assert type(saved_and_loaded(net)) is Net  # what was given stays plain


@pytest.mark.slow
def test_in_another_process_it_is_compiled_too(net: Net, tmp_path: Path) -> None:
    torch.save(checkmate.compile(nn.Sequential(net.first, net.last), budget="999 kB"), tmp_path / "model.pt")
    load = f"import torch; model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    use = "model(torch.ones(8, 16)).sum().backward(); print(model.plans[0].budget)"
    assert run_python("-c", f"{load}; {use}").stdout == "999000\n"


class Forgetful(Net):
    """A module that says itself what a pickle holds."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tag": "forgotten", "lock": None}


def test_what_the_class_says_of_its_pickles_counts() -> None:
    net = Forgetful()
    net.lock = threading.Lock()
    loaded = pickle.loads(pickle.dumps(checkmate.compile(net, budget="999 kB")))
    assert (loaded.tag, loaded.lock, net.tag) == ("forgotten", None, "mine")
    loaded(X).sum().backward()
    assert loaded.plans[0].budget == 999_000


def test_a_module_that_knows_itself_is_pickled(compiled: Any) -> None:
    compiled.around = [compiled]
    loaded = pickle.loads(pickle.dumps(compiled))
    assert loaded.plans == loaded.around[0].plans == []
    assert vars(loaded) is vars(loaded.around[0])


def test_a_shallow_copy_is_compiled_and_shares_its_tensors(net: Net, compiled: Any) -> None:
    twin: Any = copy.copy(compiled)
    twin.tag = "another"
    assert compiled.tag == "mine"
    assert twin.first.weight is net.first.weight
    twin(X).sum().backward()
    assert twin.plans[0].budget == 1_000_000
    assert compiled.plans == []


def loss_of_ones(x: Tensor) -> Tensor:
    return (x * x).sin().sum()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, saved_and_loaded], ids=lambda f: f.__name__)
def test_a_step_of_a_function_keeps_its_budget(again: Callable[[Any], Any]) -> None:
    step = again(checkmate.compile(loss_of_ones, budget="999 kB", time_limit=1))
    step(torch.ones(3, requires_grad=True)).backward()
    assert step.plans[0].budget == 999_000


def test_a_step_of_a_function_without_a_name_is_not_pickled() -> None:
    step = checkmate.compile(lambda x: loss_of_ones(x), budget="999 kB")
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(step)


def test_hooks_of_the_module_itself(net: Net, compiled: Any) -> None:
    seen = []
    net.register_forward_hook(lambda module, args, output: seen.append("forward"))
    net.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    compiled(X).sum().backward()
    assert seen == ["forward", "backward"]


def test_forward_replaced_on_the_object(net: Net) -> None:
    net.forward = lambda x: x
    with pytest.raises(Unsupported, match="replaced on the object"):
        checkmate.compile(net, budget="1 MB")
