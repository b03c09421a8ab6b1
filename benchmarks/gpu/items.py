"""Items of `benchmarks.gpu`, each of which runs in a process of its own and yields rows."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.rows import Row
from benchmarks.common.timing import finish
from benchmarks.gpu.alone import alone
from benchmarks.gpu.budgets import NETWORKS, Setting, limited_row, measured_plain, rows
from benchmarks.networks.batches import Batch, Step, language_model, tokens
from benchmarks.networks.gpt2 import GPT2
from benchmarks.peers import comparison as peers
from benchmarks.peers.subjects import on_a_gpu
from checkmate.core.files import VARIABLE as CACHE

PEER_KNOBS = ("each block", "keeps matmuls", "4 segments", "dp 0.2", "dp 0.5", "dp 0.8", "dp 1")
PEER_SHARES, PEER_SHARES_SMALL = (0.0, 0.1, 0.4, 1.0), (0.1, 1.0)
ROOM = 0.92  # of the device's memory, for a budget
PRECISIONS = {"float32": False, "bfloat16": True}


@dataclass(frozen=True)
class Asked:
    """How items run."""

    device: torch.device
    small: bool  # networks for a try without a GPU
    pairs: int  # of timed steps
    time_limit: float  # seconds to plan for one budget
    seconds: float  # that an item has


@dataclass(frozen=True)
class Item:
    """A part of the benchmark."""

    run: Callable[[Asked], Iterable[Row]]
    seconds: float  # that it may take on an H100
    alone: bool = False  # it needs the whole device
    triton: bool = False  # its kernels are Triton's


def run_item(name: str, asked: Asked, environment: dict[str, str]) -> Iterator[Row]:
    """The rows of an item, in its process."""
    os.environ.update(environment)
    if ITEMS[name].triton and (reason := without_triton(asked.device)):
        yield {"left_out": reason}
    else:
        yield from ITEMS[name].run(asked)


def without_triton(device: torch.device) -> str:
    """Why Triton cannot compile for a device; empty where it can."""
    if device.type == "cpu":
        return "Triton compiles nothing for the CPU"
    try:
        import triton

        triton.runtime.driver.active.get_current_target()
    except (ImportError, AssertionError, RuntimeError, OSError) as error:  # without a driver, or with an old one
        said = str(error).splitlines()
        return f"Triton cannot compile here: {type(error).__name__}: {said[0] if said else ''}"
    return ""


def within_budgets(name: str, amp: bool, host: str | None, asked: Asked) -> Iterator[Row]:
    """Bytes, bits and seconds of a network within budgets."""
    setting = Setting(NETWORKS[name], asked.device, amp, asked.small)
    return rows(setting, asked.pairs, asked.time_limit, host)


def limited(asked: Asked) -> Iterator[Row]:
    """With the memory that PyTorch may take halved, plain GPT-2 runs out of it, and the planned step trains."""
    setting = Setting(NETWORKS["gpt2"], asked.device, False, asked.small)
    yield limited_row(setting, measured_plain(setting), asked.time_limit)


def beside_peers(name: str, asked: Asked) -> Iterable[Row]:
    """PyTorch's own ways to save memory, at equal peaks."""
    options = peers.Options(
        asked.device,
        only=("peers", "ours") if without_triton(asked.device) else ("peers", "ours", "inductor"),
        shares=PEER_SHARES_SMALL if asked.small else PEER_SHARES,
        time_limit=asked.time_limit,
        minutes=asked.seconds / 60 / 10,  # twice: to find the best peers, and with ours among them
        rounds=(2, 2) if asked.small else (3, 15),
        deadline=time.monotonic() + 0.75 * asked.seconds,
        takes=lambda setting: setting.knob in (PEER_KNOBS[:2] if asked.small else PEER_KNOBS),
    )
    with alone():
        return peers.compare(on_a_gpu(small=asked.small)[name], options, lambda said: None)


def whole_steps(asked: Asked) -> Iterator[Row]:
    """`training_step` with AdamW, which compares itself with plain PyTorch; once without a number of bytes."""
    for fused, share in ((False, None), (asked.device.type == "cuda", 0.2)):
        torch._dynamo.reset()
        module, step, batch = Setting(NETWORKS["gpt2"], asked.device, True, asked.small).make()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused)
        about: dict[str, Any] = {"clip_norm": 1.0, "time_limit": asked.time_limit, "verify": True}
        trained = checkmate.training_step(step, optimizer, "fit" if share is None else f"{share:.0%}", **about)
        losses = [float(trained(*batch)) for _ in range(3)]
        plan = trained.plans[0]
        yield {"fused": fused, "budget": plan.budget, "predicted": plan.peak, "losses": losses, "plan": str(plan)}


def second_start(asked: Asked) -> Iterator[Row]:
    """Seconds of the first step, and of that of a later start, with costs and plans on disk."""
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first", "second", "third"):
            for name in ("gpt2", "resnet50"):
                for row in apart(partial(_started, name, asked), environment={CACHE: folder}):
                    yield {"network": name, "start": start, **row}


def _started(name: str, asked: Asked) -> Iterator[Row]:
    _, step, batch = Setting(NETWORKS[name], asked.device, True, asked.small).make()
    compiled = checkmate.compile(step, budget="50%" if asked.device.type == "cuda" else "1 GB")
    began = time.perf_counter()
    compiled(*batch).backward()
    finish(asked.device)
    yield {"first_step_seconds": time.perf_counter() - began, "origin": compiled.plans[0].origin}


def largest_batch(asked: Asked) -> Iterator[Row]:
    """The largest batch that trains, and samples a second: plainly, with each block checkpointed, planned."""
    layers, width, length, words = (2, 64, 64, 512) if asked.small else (24, 1024, 1024, 8192)
    most = 8 if asked.small else 1024

    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        with asked.device:
            module = GPT2(words, length, width, layers, heads=width // 64, attention="sdpa")
        loss = language_model(module)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast(asked.device.type, torch.bfloat16):
                return loss(*batch)

        return module, step

    def rate(module: nn.Module, step: Step, optimizer: torch.optim.Optimizer, size: int) -> float:
        """Samples a second; 0 where it runs out of memory."""
        try:
            with asked.device:
                batch: Batch = tokens(size, length, words)
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                step(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                finish(asked.device)
                seconds.append(time.perf_counter() - began)
            return size / min(seconds)
        except torch.OutOfMemoryError:
            return 0.0
        finally:
            optimizer.zero_grad()
            gc.collect()
            if asked.device.type == "cuda":
                torch.cuda.empty_cache()

    def largest(way: str, step_of: Callable[[nn.Module, Step], Step]) -> Row:
        module, plain = make()
        step, optimizer = step_of(module, plain), torch.optim.AdamW(module.parameters(), lr=1e-5)
        low, high, rates = 0, 1, dict[int, float]()
        while high <= most and (found := rate(module, step, optimizer, high)):
            rates[high] = found
            low, high = high, 2 * high
        while high - low > max(1, low // 16) and high <= most:
            middle = (low + high) // 2
            if found := rate(module, step, optimizer, middle):
                low, rates[middle] = middle, found
            else:
                high = middle
        return {"way": way, "largest": low, "samples_a_second": rates}

    def checkpointed(module: nn.Module, step: Step) -> Step:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

        blocks = {type(block) for block in module.modules() if type(block).__name__.endswith("Block")}
        checkpoint_wrapper.apply_activation_checkpointing(module, check_fn=lambda part: type(part) in blocks)
        return step

    def planned(module: nn.Module, step: Step) -> Step:
        return checkmate.compile(step, budget=budget, time_limit=asked.time_limit, wait="best")

    total = torch.cuda.get_device_properties(asked.device).total_memory if asked.device.type == "cuda" else 10**9
    budget = int(ROOM * total)
    for way, step_of in (("plain", lambda module, step: step), ("each block", checkpointed), ("planned", planned)):
        torch._dynamo.reset()
        with alone():
            yield largest(way, step_of)
    profile = "roofline:h100" if asked.device.type == "cpu" else "measure"
    module, step = make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    whole = checkmate.training_step(step, optimizer, budget=budget, time_limit=asked.time_limit)
    with asked.device:
        found = checkmate.max_batch_size(
            lambda: whole, lambda n: tokens(n, length, words), budget=budget, profile=profile, largest=most,
            time_limit=min(60.0, asked.seconds / 4),
        )  # fmt: skip
    yield {"way": "planned, by its plans", "largest": found.size, "keep_all": found.keep_all, "budget": budget}


def machine(asked: Asked) -> Iterator[Row]:
    """Bytes that the libraries keep for each thread, and rates of a product and of a copy."""
    if asked.device.type == "cuda":
        held = [torch.cuda.memory_allocated()]
        x = torch.ones(64, 64, device=asked.device)

        def take(*_: object) -> None:
            torch.addmm(x[0], x, x)
            held.append(torch.cuda.memory_allocated())

        take()
        leaf = torch.ones(1, device=asked.device, requires_grad=True)
        leaf.register_hook(take)
        leaf.sum().backward()
        yield {"workspaces": "bytes held: before, after addmm, after addmm in a backward", "bytes": held}
    n = 256 if asked.small else 8192
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(n, n, device=asked.device).to(dtype) for _ in range(2))
        with alone():
            seconds = min(_seconds(partial(torch.matmul, a, b), asked.device) for _ in range(9))
        yield {"product": n, "dtype": str(dtype), "flops_a_second": 2 * n**3 / seconds}
    a = torch.empty(1 << (20 if asked.small else 31), dtype=torch.uint8, device=asked.device)
    with alone():
        seconds = min(_seconds(a.clone, asked.device) for _ in range(9))
    yield {"copy": a.nbytes, "bytes_a_second": 2 * a.nbytes / seconds}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    finish(device)
    began = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - began


ITEMS = {
    "machine": Item(machine, 60),
    **{
        f"{name} {precision}": Item(partial(within_budgets, name, amp, None), 200, triton="llama" in name)
        for precision, amp in PRECISIONS.items()
        for name in NETWORKS
    },
    "pinned memory": Item(partial(within_budgets, "gpt2", True, "10 GB"), 160),
    "whole steps": Item(whole_steps, 160),
    "second start": Item(second_start, 160),
    **{f"peers {name}": Item(partial(beside_peers, name), 200) for name in on_a_gpu(small=True)},
    "limit": Item(limited, 100, alone=True),
    "largest batch": Item(largest_batch, 150, alone=True),
}
