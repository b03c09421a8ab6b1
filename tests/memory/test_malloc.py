"""What malloc keeps of freed memory is given back, before a step first runs."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from benchmarks.common.resident import status
from checkmate.memory import malloc


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the pages that glibc's malloc keeps are looked at")
def test_pages_between_what_is_alive_are_given_back() -> None:
    malloc.trim()
    blocks = [torch.ones(100_000, dtype=torch.uint8) for _ in range(400)]  # too small to be mapped by themselves
    before = status("VmRSS")
    del blocks[:-1]  # the last is behind them
    malloc.trim()
    assert before - status("VmRSS") >= 20_000_000
    assert blocks[0].sum() == 100_000


def test_where_there_is_no_such_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert malloc.trim() is False


def test_malloc_gives_back_what_capturing_left_before_the_first_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, happened = nn.Linear(8, 8), list[str]()

    @torch.library.custom_op("checkmate_malloc::runs", mutates_args=())
    def runs(x: torch.Tensor) -> torch.Tensor:
        happened.append("op")
        return x.clone()

    runs.register_fake(torch.empty_like)
    runs.register_autograd(lambda ctx, grad: grad)

    def trim() -> bool:
        happened.append("trim")
        return True

    monkeypatch.setattr(malloc, "trim", trim)
    step: Any = checkmate.compile(lambda x: runs(model(x)).sum(), budget="1 MB", cache=False)
    for _ in range(2):
        step(torch.ones(4, 8)).backward()
    assert happened.count("trim") == 1
    assert happened[-3:] == ["trim", "op", "op"]
