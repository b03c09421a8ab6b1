"""Train a model in a file under a memory limit that its parameters and states exceed, beside plain PyTorch without one.

    python -m benchmarks.second_memory.in_file [--quick]

Layers in a row are made on meta, mapped by ``checkmate.in_file`` and filled one by one, and trained by AdamW, all in a
control group of Linux (cgroup) with a limit of bytes; who may not make one cannot run this. Plain PyTorch trains the
same in a process without a limit. Peaks are anonymous memory of the process, looked at every few milliseconds, beyond
what it had after its imports: in the first two calls, which capture and plan, and in the later ones. Pages of the file
are not among them: the kernel takes these away where memory is short. The disk is that of ``--folder``. Rows go to
benchmarks/results/in_file.jsonl.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.resident import status
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from checkmate.units import format_bytes, parse_bytes

BATCH, CAPTURED = 64, 2  # rows; calls in which a step is captured: states come to be in the first one
GROUPS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # of versions 1 and 2
EVERY = 0.005  # seconds


def measure(*, layers: int, width: int, limit: str, budget: str, steps: int, folder: str) -> Iterator[Row]:
    """Yield the row of a model."""
    how: dict[str, Any] = {"layers": layers, "width": width, "steps": steps}
    (plain,) = apart(partial(trained, **how))
    with TemporaryDirectory(dir=folder) as there:
        group = limited(parse_bytes(limit))
        try:
            (ours,) = apart(partial(trained, **how, budget=budget, there=there, group=group))
        finally:
            group.rmdir()
    same = plain.pop("digest") == ours.pop("digest")
    yield {"limit_bytes": parse_bytes(limit), "same_bits": same, "plain_seconds": plain["seconds"], **ours}


def limited(limit: int) -> Path:
    """A control group whose processes have so many bytes in all, for them to enter."""
    for root, name in GROUPS.items():
        group = Path(root, f"checkmate-{os.getpid()}")
        if not Path(root, "cgroup.procs").exists():
            continue
        group.mkdir()
        if (group / name).exists():
            (group / name).write_text(str(limit))
            return group
        group.rmdir()
    raise OSError("No control group with a limit can be made here. Run this as root, where Linux has cgroups.")


def trained(
    *, layers: int, width: int, steps: int, budget: str = "", there: str = "", group: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Train some steps; yield what they took, and the digest of losses, parameters and states."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    before = status("RssAnon")
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))
    model = checkmate.in_file(model, there) if budget else model.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02, generator=draw)
    x = torch.randn(BATCH, width, generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def plain_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = plain_step
    if budget:
        options: dict[str, Any] = {"host": f"file:{there}", "host_budget": "100 GB"}
        step = checkmate.training_step(loss_fn, optimizer, budget=budget, wait="best", **options)
    losses, seconds, peaks = [], [], []
    with Watch() as watch:
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(step(x))
            seconds.append(time.perf_counter() - began)
            peaks.append(watch.restart() - before)
    row: dict[str, Any] = {"seconds": median(seconds[CAPTURED:]), "first_seconds": sum(seconds[:CAPTURED])}
    if budget:
        (use,) = step.memory().second_memories
        (plan,) = step.plans
        row |= {"budget_bytes": plan.budget, "planned_peak": plan.peak, "homes_bytes": plan.problem.homes_bytes}
        row |= {"first_peak": max(peaks[:CAPTURED]), "peak": max(peaks[CAPTURED:]), "imports_bytes": before}
        row |= {"sent": use.sent, "fetched": use.fetched, "waited": use.waited}
    states = [part for p in model.parameters() for part in optimizer.state[p].values()]
    digest = sha256()
    for t in (*losses, *model.parameters(), *states):
        digest.update(t.detach().numpy().tobytes())
    yield {**row, "digest": digest.hexdigest()}


class Watch:
    """The most anonymous memory that this process has, while its block runs."""

    def __enter__(self) -> Watch:
        self._most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def restart(self) -> int:
        """The peak so far, in bytes; begin anew."""
        most, self._most = self._most, 0
        return most

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            self._most = max(self._most, status("RssAnon"))


BENCHMARK = Benchmark(
    about=__doc__,
    file="in_file.jsonl",
    measure=measure,
    columns={
        "at home": lambda row: format_bytes(row["homes_bytes"]),
        "limit": lambda row: format_bytes(row["limit_bytes"]),
        "budget": lambda row: format_bytes(row["budget_bytes"]),
        "peak": lambda row: format_bytes(row["peak"]),
        "first calls": lambda row: format_bytes(row["first_peak"]),
        "imports": lambda row: format_bytes(row["imports_bytes"]),
        "bits": lambda row: "same" if row["same_bits"] else "others",
        "step s": lambda row: f"{row['seconds']:.1f}",
        "plain s": lambda row: f"{row['plain_seconds']:.1f}",
    },
    options={
        "layers": (12, "of the model"),
        "width": (4096, "of each layer"),
        "limit": ("1 GiB", "of the control group"),
        "budget": ("400 MB", "of a step"),
        "steps": (5, "calls"),
        "folder": (".", "on the disk that is the second memory"),
    },
    quick={"layers": 40, "width": 1024, "limit": "800 MB", "budget": "60 MB", "steps": 4},
)

if __name__ == "__main__":
    BENCHMARK.run()
