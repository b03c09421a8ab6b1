"""Train where memory has a hard limit, 5 % above what the plan says: plain PyTorch, the planned step, and its arena.

    python -m benchmarks.hard_limit [--steps 100] [--share 0.6]

Each way trains in a process of its own under a limit (RLIMIT_DATA: the kernel counts all that a process has mapped
privately and may write, and refuses what would go beyond). The limit leaves 1.05 times what the plan takes beyond what
is resident, over what the process has when its code is loaded and it rests: it has run a small batch by then, and an
earlier process has made the plan. For plain PyTorch, and for the planned step by PyTorch's allocator, the limit is set
before the first step at full size: malloc would keep what it had got by then. For the arena it is set after two, in
which nothing is learned: the first finds out what is allocated, in a mapping with room to spare, and from the second
on addresses are planned. All are held against plain PyTorch under a limit of four times as much.

A row says for each way how much its peak resident set grows where nothing limits it, how many steps it trained within
the limit, and what ended it. Linux only.
"""

from __future__ import annotations

import hashlib
import itertools
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.own_seconds import count_own_seconds
from benchmarks.common.resident import give_back, growth, status
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.memory import native

KINDS = ("plain", "allocator", "arena")
MARGIN, PLENTY = 1.05, 4.0  # times what the plan says
SETTLING = {"plain": 0, "allocator": 0, "arena": 2}  # steps at full size before there is a limit
ROWS, SMALL = 72_000, 100  # of a batch
GAIN = 2.4  # of a layer with what follows it: the variance stays what it is
WIDTHS = (8, 20, 12, 28, 16, 36, 10, 24, 40, 14, 32, 18, 22, 12, 26, 36, 16, 30, 20, 8)


class Training:
    """A way to train, in this process: narrow layers of many widths for many rows, much to hold, little to compute.

    Args:
        kind: of `KINDS`.
        budget: bytes, for the planned step.
    """

    def __init__(self, kind: Any, budget: int) -> None:
        count_own_seconds()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(WIDTHS):
            linear = nn.Linear(before, after, bias=False)
            nn.init.normal_(linear.weight, std=(GAIN / before) ** 0.5)  # or little arrives at the end
            layers += [linear, nn.Hardswish(), nn.Hardswish()]
        self.module = nn.Sequential(*layers)
        self.batch = torch.randn(ROWS, WIDTHS[0])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.step: Any = self.loss
        if kind != "plain":
            self.step = checkmate.compile(self.loss, budget=budget, time_limit=5, memory=kind, wait="best")
        if kind == "arena" and (failure := native.wait()) is not None:
            sys.exit(f"No arena: {failure}.")

    def loss(self, x: Tensor) -> Tensor:
        """The step: an autoencoder, whose code is as wide as what it reads."""
        return (self.module(x) - x).square().mean()

    def run(self, batch: Tensor) -> float:
        """A forward and a backward from no gradients."""
        self.optimizer.zero_grad()
        loss = self.step(batch)
        loss.backward()
        return float(loss.detach())

    def at_rest(self, steps: int) -> int:
        """The process's data when all code has run, on a small batch and in some steps at full size: bytes."""
        for batch in (*[self.batch[:SMALL]] * 2, *[self.batch] * steps):
            self.run(batch)
        self.optimizer.zero_grad()
        give_back()
        arenas = () if self.step == self.loss else self.step.memory().rows
        return status("VmData") - sum(use.arena for use in arenas if use.planned == self.planned)

    @property
    def planned(self) -> int:
        """Bytes that the plan at full size takes beyond what is resident."""
        return max(plan.peak - plan.problem.resident for plan in self.step.plans)

    def train(self, steps: int) -> Iterator[Row]:
        """The loss of each step, in all its digits, as it is done."""
        for _ in range(steps):
            loss = self.run(self.batch)
            self.optimizer.step()
            yield {"loss": loss.hex()}

    def digest(self) -> str:
        """A hash of the bits of all parameters and their last gradients."""
        tensors = [t for p in self.module.parameters() for t in (p, p.grad) if t is not None]
        return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def plan(share: float) -> Iterator[Row]:
    """Make the plan, which other processes find on disk."""
    kept_all = Training("plain", 0)
    budget = int(share * checkmate.trace(kept_all.loss, kept_all.batch).keep_all_peak)
    training = Training("allocator", budget)
    training.at_rest(1)
    yield {"budget": budget, "planned": training.planned}


def grow(kind: str, budget: int) -> Iterator[Row]:
    """Growth of the resident set where nothing limits it."""
    training = Training(kind, budget)
    small = Training(kind, budget)  # when it runs, the arena of the other gives back its pages
    small.batch = small.batch[:SMALL]
    yield {"growth": growth(training.module, lambda: training.run(training.batch), lambda: small.run(small.batch))}


def limited(kind: str, budget: int, above: int, steps: int) -> Iterator[Row]:
    """Train within so many bytes above what the process has at rest."""
    training = Training(kind, budget)
    at_rest = training.at_rest(SETTLING[kind])
    resource.setrlimit(resource.RLIMIT_DATA, (at_rest + above, at_rest + above))
    yield {"at_rest": at_rest, "limit": at_rest + above}
    yield from training.train(steps)
    yield {"digest": training.digest(), "data_at_the_end": status("VmData")}


def told(call: Callable[..., Iterator[Row]], *arguments: Any) -> Row:
    """Facts that one of these tells in a process of its own: ``losses`` in a list, and the ``error`` that ended it."""
    losses: list[str] = []
    facts: Row = {"error": None}
    try:
        for row in apart(partial(call, *arguments)):
            losses += [row["loss"]] if "loss" in row else []
            facts |= {} if "loss" in row else row
    except EndedEarly as end:
        facts["error"] = str(end)
    return {"losses": losses, **facts}


def rows(steps: int, share: float) -> Iterator[Row]:
    """A row for each way."""
    planned = told(plan, share)
    if planned["error"] is not None:
        raise SystemExit(planned["error"])
    budget, bytes_ = planned["budget"], planned["planned"]
    expected = told(limited, "plain", 0, int(PLENTY * bytes_), steps)
    about = {"steps": steps, "share": share, "budget": budget, "planned_bytes": bytes_, "margin": MARGIN}
    for kind in KINDS:
        done = told(limited, kind, budget, int(MARGIN * bytes_), steps)
        same = all(done.get(key) == expected[key] for key in ("losses", "digest"))
        grown = told(grow, kind, budget)["growth"]
        trained = len(done.pop("losses"))
        yield {"way": kind, **about, "growth": grown, "trained": trained, "bitwise": same, **done}


BENCHMARK = Benchmark(
    __doc__,
    "hard_limit.jsonl",
    rows,
    {
        "way": "{way}",
        "growth / planned": lambda row: f"{row['growth'] / row['planned_bytes']:.3f}",
        "steps in the limit": "{trained}",
        "numbers": lambda row: "same bits" if row["bitwise"] else "–",
        "ended by": lambda row: (row["error"] or "").rpartition("DefaultCPUAllocator: ")[2],
    },
    options={"steps": (100, "to train"), "share": (0.6, "of the bytes of keeping everything, for the plan")},
)

if __name__ == "__main__":
    BENCHMARK.run()
