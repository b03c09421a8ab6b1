"""Trains where memory has a hard limit: ``python -m tests.support.limited_process plain|BUDGET [BYTES]``.

The limit is on the process's own data (RLIMIT_DATA), ``BYTES`` above what it has once all is imported.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import checkmate
import checkmate.compiler
from benchmarks.common.own_seconds import count_own_seconds

LAYERS, CHANNELS, BATCH, SIZE = 24, 16, 20, 128
STEPS = 2


def data_bytes() -> int:
    """Of this process, as the limit counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def network() -> nn.Module:
    """Convolutions, normalizations and activations in a row: what they make outweighs the parameters by far."""
    layers: list[nn.Module] = []
    for i in range(LAYERS):
        layers += [nn.Conv2d(CHANNELS if i else 3, CHANNELS, 1), nn.GroupNorm(4, CHANNELS), nn.Tanh()]
    return nn.Sequential(*layers)


def main(budget: str, above: str | None = None) -> None:
    """Train a few steps, plainly or within a budget, and print each loss in all its digits."""
    torch.set_num_threads(1)
    if above is not None:
        limit = data_bytes() + int(above)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    module = network()
    images, targets = torch.randn(BATCH, 3, SIZE, SIZE), torch.randn(BATCH, CHANNELS, SIZE, SIZE)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return (module(x) - y).square().mean()

    step = plain if budget == "plain" else checkmate.compile(plain, budget=budget, time_limit=5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(images, targets)
        loss.backward()
        optimizer.step()
        print(float(loss).hex(), flush=True)  # noqa: T201


if __name__ == "__main__":
    count_own_seconds()
    main(*sys.argv[1:])
