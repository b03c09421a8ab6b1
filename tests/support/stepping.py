"""Train a few steps and keep everything that must agree bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Trained:
    """Results of a few training steps."""

    losses: list[Tensor]
    grads: list[dict[str, Tensor | None]]  # of each step, by parameter
    state: dict[str, Tensor]  # parameters and buffers in the end
    random_state: Tensor
    peaks: list[int]  # bytes above the level at entry, of each step after the first


def grads_of(module: nn.Module) -> list[Tensor | None]:
    """Copy the gradients of all parameters."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def left_by(step: Callable[..., Any], net: nn.Module, *batch: Tensor) -> tuple[Any, ...]:
    """The loss of a step, gradients, buffers and random state."""
    torch.manual_seed(1)
    loss = step(*batch)
    loss.backward()
    left = loss, [p.grad for p in net.parameters()], copy.deepcopy([*net.buffers()]), torch.get_rng_state()
    net.zero_grad()
    return left


def train(module: nn.Module, step: Step, batch: tuple[Tensor, ...], *, steps: int = 3, seed: int = 7) -> Trained:
    """SGD with momentum. The first step is not metered: a compiled one plans in it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses, grads, peaks = [], [], []
    torch.manual_seed(seed)

    def forward_backward() -> Tensor:
        loss = step(*batch)
        loss.backward()
        return loss

    for i in range(steps):
        if i == 0:
            loss = forward_backward()
        else:
            use = measure_peak(forward_backward)
            loss = use.result
            peaks.append(use.peak)
            del use
        losses.append(loss.detach().clone())
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Trained(losses, grads, state, torch.get_rng_state(), peaks)


def assert_same(found: Trained, expected: Trained) -> None:
    """Loss, gradients, parameters, buffers and random state are equal bit for bit."""
    assert_same_bits(*({**vars(trained), "peaks": None} for trained in (found, expected)))
