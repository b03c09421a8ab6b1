"""What an optimizer takes while it steps, found on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from checkmate.fitting.stand_ins import update_bytes


class _ReadsNumbers(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].grad.sum().item()
        return super().step(closure)


def test_what_reads_numbers_is_not_taken_to_need_nothing() -> None:
    """No number is there without data: then it is twice what is updated at a time."""
    parameters = [nn.Parameter(torch.ones(n)) for n in (10, 30)]
    reading = _ReadsNumbers(parameters, lr=0.1)
    assert update_bytes([reading], at_once=False) == 2 * 30 * 4
    assert update_bytes([reading], at_once=True) == 2 * 40 * 4
    assert update_bytes([optim.SGD(parameters, lr=0.1, foreach=False)], at_once=False) < 2 * 30 * 4
