"""Models without data are traced as those with data, and nothing of them is allocated."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber

import checkmate
from benchmarks.networks import CASES
from checkmate.capture.meta_tensors import is_fake, meta_as
from checkmate.memory import record_allocations
from tests.support.sampling import long


@pytest.mark.parametrize("name", ["resnet18", long("vit"), long("gpt2-eager")])
def test_on_meta_as_with_data(name: str) -> None:
    module, step, batch = CASES[name].make(0)
    real = checkmate.trace(step, *batch, profile="roofline:laptop")
    with torch.device("meta"):
        module, step, batch = CASES[name].make(0)
    assert all(tensor.is_meta for tensor in [*module.parameters(), *batch])
    fake = checkmate.trace(step, *batch, profile="roofline:laptop")
    assert fake.graph == real.graph
    assert (fake.seconds == real.seconds).all()
    assert fake.resident == real.resident


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_as_with_data(inside: bool) -> None:
    _, step, batch = CASES["mlp"].make(0)
    real = checkmate.trace(step, *batch, profile="roofline:h100")
    with FakeTensorMode() as mode:
        _, step, batch = CASES["mlp"].make(0)
    with mode if inside else nullcontext():
        fake = checkmate.trace(step, *batch, profile="roofline:h100")
    assert fake.graph == real.graph


def test_what_the_model_asks_of_its_device_works() -> None:
    """Constants that a forward makes where its input is, and branches on the device."""
    with torch.device("meta"):
        layer, x = nn.Linear(10, 10), torch.ones(4, 10)

    def step(x: Tensor) -> Tensor:
        y = layer(x) + torch.arange(10, device=x.device)
        return (y if x.device.type == "cpu" else y.exp()).sum()

    targets = {op.target for op in checkmate.trace(step, x, profile="roofline:laptop").graph.ops}
    assert targets & {"aten.arange.default", "aten.arange.start_step"}
    assert "aten.exp.default" not in targets


def test_a_model_larger_than_the_machine_is_planned_without_allocating_it() -> None:
    """300 GB of parameters and activations; what is allocated are saved states of the random generator."""
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(20_000, 20_000) for _ in range(8))
        x = torch.ones(400_000, 20_000)

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = F.relu(layer(x))
        return x.sum()

    with record_allocations() as recording:
        problem = checkmate.trace(step, x, profile="roofline:h200")
    assert problem.resident == pytest.approx(8 * 1.6e9 + 32e9, rel=1e-4)
    assert problem.keep_all_peak > 300e9
    assert recording.bytes.cumsum().max(initial=0) < 1e5
    assert checkmate.solve(problem, int(0.8 * problem.keep_all_peak), method="next-use").plan is not None


def test_tensors_without_data_are_told_from_others() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    meta = torch.ones(3, device="meta")
    assert all(map(is_fake, (fake, meta, nn.Parameter(meta))))
    assert not any(map(is_fake, (torch.ones(3), 3)))


def test_pytorch_is_as_before_after_a_trace_that_fails() -> None:
    describe = MetaTensorDescriber.describe_tensor
    with torch.device("meta"):
        layer, x = nn.Linear(3, 3), torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        checkmate.trace(layer, x, profile="roofline:h100")
    assert MetaTensorDescriber.describe_tensor is describe
    with meta_as(torch.device("cpu")):
        assert MetaTensorDescriber.describe_tensor is not describe
    assert MetaTensorDescriber.describe_tensor is describe
