"""The certificate passes what is right and catches what is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate import rewrite, runtime


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(24, 16), torch.randint(4, (24,))


def _tight(step: object, batch: tuple[Tensor, ...]) -> int:
    return checkmate.trace(step, *batch).min_budget()


def test_passes_and_leaves_no_trace(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    twin = copy.deepcopy(net)
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    compiled = checkmate.compile(step, budget=_tight(step, batch), verify=True)
    torch.manual_seed(5)
    compiled(*batch).backward()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


def test_modules_are_verified_too(net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    compiled = checkmate.compile(net, budget=_tight(net, batch[:1]), verify=True)
    assert compiled(batch[0]).shape == (24, 4)
    assert net[1].num_batches_tracked == 1


def test_redrawn_dropout_is_caught(
    net: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "scale_mask", lambda mask, p, dtype: torch.rand(mask.shape).lt(p).to(dtype).div_(p))
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    with pytest.raises(checkmate.VerificationError, match=r"differs|random"):
        checkmate.compile(step, budget="1 MB", verify=True)(*batch)


def test_a_wrong_gradient_is_caught(
    net: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_a_bit(module: torch.fx.GraphModule) -> object:
        run = boxed(module)

        def wrong(inputs: list) -> object:
            results = list(run(inputs))
            if any(n.meta.get("autograd_backward") for n in module.graph.nodes):
                results = [r if r is None else torch.nextafter(r, torch.full_like(r, 9.0)) for r in results]
            return tuple(results)

        wrong._boxed_call = True
        return wrong

    boxed = runtime.boxed
    monkeypatch.setattr("checkmate.backend.boxed", off_by_a_bit)
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    with pytest.raises(checkmate.VerificationError, match="gradient"):
        checkmate.compile(step, budget="1 MB", verify=True)(*batch)


def test_a_peak_above_the_budget_is_caught(
    net: nn.Module, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def hoarding(module: torch.fx.GraphModule) -> object:
        run = boxed(module)

        def hoard(inputs: list) -> object:
            held.append(torch.zeros(200_000))
            return run(inputs)

        hoard._boxed_call = True
        return hoard

    boxed = runtime.boxed
    monkeypatch.setattr("checkmate.backend.boxed", hoarding)
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    with pytest.raises(checkmate.VerificationError, match="peak"):
        checkmate.compile(step, budget="500 kB", verify=True)(*batch)
