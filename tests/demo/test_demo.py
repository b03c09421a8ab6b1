"""The demo keeps its promises, and notices where one is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkmate.demo import training
from checkmate.demo.training import (
    Row,
    documentation,
    pattern_batches,
    patterns_task,
    text_batches,
    text_task,
)
from tests.support.bits import assert_same_bits
from tests.support.processes import run_fresh_python

KEPT = Row(
    "digits", budget=100, predicted=90, measured=90, overhead=0.1, gap=0.05, seconds=1.0, ratio=1.1, bitwise=True
)


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_keeps_its_promises() -> None:
    printed = run_fresh_python("-m", "checkmate", "demo", "--steps", "2", "--quick").stdout
    assert printed.count("  bitwise\n") >= 5
    assert "every number is plain PyTorch's" in printed


def test_broken_promises_are_noticed() -> None:
    assert KEPT.broken() == []
    assert "exceeds the budget" in replace(KEPT, predicted=101, measured=101).broken()[0]
    assert "is not the predicted" in replace(KEPT, measured=91).broken()[0]
    assert "differ from plain PyTorch" in replace(KEPT, bitwise=False).broken()[0]


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.usefixtures("one_thread")
def test_the_command_ends_with_what_was_found(bitwise: bool, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    monkeypatch.setattr(training, "train_within_budgets", lambda *args: [replace(KEPT, bitwise=bitwise)])
    out, err = shell("demo --json --steps 1", 0 if bitwise else 1)
    found = json.loads(out)
    assert [row["bitwise"] for row in found["rows"]] == [bitwise] * 2
    assert len(found["broken"]) == (0 if bitwise else 2)
    assert ("differ from plain PyTorch" in err) is not bitwise


def test_the_data_is_there() -> None:
    text, alphabet = documentation()
    assert int(text.max()) == len(alphabet) - 1
    ((passages, next_ones),) = text_batches(text, count=1, size=3, length=8)
    assert passages.shape == (3, 8)
    assert_same_bits([passages[:, 1:]], [next_ones[:, :-1]])


def test_patterns_are_told_apart_beneath_the_noise() -> None:
    ((images, labels),) = pattern_batches(count=1, size=64, pixels=32)
    assert images.shape == (64, 1, 32, 32)
    for label in labels.unique():
        alike, others = images[labels == label].mean(0), images[labels != label].mean(0)
        nearer = (images[labels == label] - others).square().mean() - (images[labels == label] - alike).square().mean()
        assert float(nearer) > 0


@pytest.mark.parametrize("task", [text_task, patterns_task])
def test_a_task_gives_the_same_network_each_time(task: object) -> None:
    made = task(1)
    (module, step), (again, _) = made.make(), made.make()
    assert_same_bits(module.state_dict(), again.state_dict())
    assert step(*made.batches[0]).dtype == torch.float32
