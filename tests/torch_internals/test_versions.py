"""On a version of PyTorch that has not been tried each captured graph is compared with plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import checkmate
from checkmate import compiler, training
from checkmate.torch_internals import versions
from tests.support.bits import assert_same_bits

OPTIONS: dict[str, Any] = {"budget": "1 MB", "cache": False}


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(versions, "TRIED", ("1.12", "1.13"))
    versions.is_tried.cache_clear()
    yield
    versions.is_tried.cache_clear()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_the_running_version_is_tried() -> None:
    assert versions.is_tried()


@pytest.mark.usefixtures("untried")
def test_each_graph_is_compared_and_trains_as_if_it_were_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared = Mock(side_effect=compiler.compare_with_plain)
    monkeypatch.setattr(compiler, "compare_with_plain", compared)
    small, large = torch.randn(4, 8), torch.randn(6, 8)
    found = []
    with caplog.at_level(logging.WARNING):
        for verify in (None, False):
            net = _net()
            step = checkmate.compile(lambda x, net=net: net(x).square().sum(), verify=verify, **OPTIONS)
            torch.manual_seed(1)
            for x in (small, small, large, small):
                step(x).backward()
            found.append([*(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()])
    assert compared.call_count == 2
    assert caplog.text.count("has been tried on PyTorch 1.12 to 1.13, not on") == 1
    assert_same_bits(*found)


@pytest.mark.usefixtures("untried")
def test_without_memory_for_a_plain_step_it_trains_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "compare_with_plain", Mock(side_effect=torch.OutOfMemoryError("no more")))
    net = _net()
    checkmate.compile(lambda x: net(x).sum(), **OPTIONS)(torch.randn(4, 8)).backward()
    assert "no memory for a plain step" in caplog.text
    assert net[0].weight.grad is not None


@pytest.mark.usefixtures("untried")
def test_a_whole_step_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, compared = _net(), Mock(side_effect=training.compare_whole)
    monkeypatch.setattr(training, "compare_whole", compared)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = checkmate.training_step(lambda x: net(x).square().sum(), optimizer, **OPTIONS)
    for _ in range(2):
        step(torch.randn(4, 8))
    assert compared.call_count == 1
