"""Ranks that train together, over gloo on the CPU: scenes that each of them plays, one after the other."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.common.own_seconds import count_own_seconds
from tests.support.processes import ROOT, own_cache, start_ranks

PATIENCE = timedelta(minutes=5)  # with ranks that wait for each other in vain


class Net(nn.Module):
    """Blocks that add to what they read, batch norm and dropout, and the loss, so that it is within the plan."""

    def __init__(self, width: int = 64, blocks: int = 2, classes: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.norm, self.drop, self.head = nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(F.gelu(block(x)))
        return F.cross_entropy(self.head(self.norm(x)), y)


def batch(size: int = 64, width: int = 64) -> tuple[Tensor, Tensor]:
    """Draw another one on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(size, width, generator=generator), torch.randint(9, (size,), generator=generator)


def play(scenes: Sequence[Callable[[], None]], ranks: int, folder: Path) -> None:
    """Play all scenes in one process for each rank: starting several takes longer than they do."""
    start_ranks(_play, ranks, ranks, scenes, str(folder))


def _play(rank: int, ranks: int, scenes: Sequence[Callable[[], None]], folder: str) -> None:
    os.environ["CHECKMATE_CACHE_DIR"] = own_cache(f"{folder}/{rank}")  # each measures for itself
    logging.getLogger("checkmate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    count_own_seconds()
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=PATIENCE)
    for scene in scenes:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = True
        try:
            scene()
        except Exception as error:
            raise AssertionError(scene.__name__) from error
    if dist.is_initialized():
        dist.destroy_process_group()


def torchrun(*arguments: str, folder: Path) -> str:
    """Start ``torchrun`` with two ranks in a folder, and give what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def everywhere(thing: object) -> list[Any]:
    """List what each rank has for it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def local(tree: Any) -> Any:
    """Shards with their placements, in place of what holds them."""
    return torch.utils._pytree.tree_map_only(DTensor, lambda t: (t.to_local().clone(), str(t.placements)), tree)
