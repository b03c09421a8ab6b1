"""On a version of PyTorch that has not been tried each captured graph is compared with plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate import compiler, training
from checkmate.torch_internals import versions
from tests.support.bits import assert_same_bits


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(versions, "TRIED", ("1.12", "1.13"))
    versions.is_tried.cache_clear()
    yield
    versions.is_tried.cache_clear()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the steps that were compared."""
    seen: list[Any] = []
    plain = compiler.compare_with_plain

    def comparing(*args: Any) -> Any:
        seen.append(args[3])
        return plain(*args)

    monkeypatch.setattr("checkmate.compiler.compare_with_plain", comparing)
    return seen


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_the_running_version_is_tried() -> None:
    assert versions.is_tried()


@pytest.mark.usefixtures("untried")
def test_each_graph_is_compared_and_trains_as_if_it_were_not(
    compared: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    small, large = torch.randn(4, 8), torch.randn(6, 8)
    found = []
    with caplog.at_level(logging.WARNING):
        for verify in (None, False):
            net = _net()
            step = checkmate.compile(
                lambda x, net=net: net(x).square().sum(), budget="1 MB", verify=verify, cache=False
            )
            torch.manual_seed(1)
            for x in (small, small, large, small):
                step(x).backward()
            found.append([*(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()])
    assert len(compared) == 2
    assert caplog.text.count("has been tried on PyTorch 1.12 to 1.13, not on") == 1
    assert_same_bits(*found)


@pytest.mark.usefixtures("untried")
def test_without_memory_for_a_plain_step_it_trains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("checkmate.compiler.compare_with_plain", failing)
    net = _net()
    checkmate.compile(lambda x: net(x).sum(), budget="1 MB", cache=False)(torch.randn(4, 8)).backward()
    assert "no memory for a plain step" in caplog.text
    assert net[0].weight.grad is not None


@pytest.mark.usefixtures("untried")
def test_a_whole_step_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, compared = _net(), []
    plain = training.compare_whole
    monkeypatch.setattr("checkmate.training.compare_whole", lambda *args: compared.append(plain(*args)))
    step = checkmate.training_step(
        lambda x: net(x).square().sum(), torch.optim.SGD(net.parameters(), lr=0.1), budget="1 MB", cache=False
    )
    for _ in range(2):
        step(torch.randn(4, 8))
    assert len(compared) == 1
