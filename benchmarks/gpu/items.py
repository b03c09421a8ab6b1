"""Items of `benchmarks.gpu`, each of which runs in a process of its own and yields rows."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

import checkmate
from benchmarks.common.apart import alone, apart
from benchmarks.common.rows import Row
from benchmarks.common.timing import finish, let_go, seconds_in_turn
from benchmarks.gpu.budgets import GROWING, NETWORKS, Network, Setting, limited_row, measured_plain, rows
from benchmarks.networks.batches import Step, tokens
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

    def setting(self, network: Network, amp: bool) -> Setting:
        """A network in one precision."""
        return Setting(network, self.device, amp, self.small)


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
    return rows(asked.setting(NETWORKS[name], amp), asked.pairs, asked.time_limit, host)


def limited(asked: Asked) -> Iterator[Row]:
    """Rows of GPT-2 in half of its memory, where plain PyTorch runs out of it and the planned step trains."""
    setting = asked.setting(NETWORKS["gpt2"], amp=False)
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
        module, step, batch = asked.setting(NETWORKS["gpt2"], amp=True).make()
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
    _, step, batch = asked.setting(NETWORKS[name], amp=True).make()
    compiled = checkmate.compile(step, budget="50%" if asked.device.type == "cuda" else "1 GB")
    began = time.perf_counter()
    compiled(*batch).backward()
    finish(asked.device)
    yield {"first_step_seconds": time.perf_counter() - began, "origin": compiled.plans[0].origin}


def largest_batch(asked: Asked) -> Iterator[Row]:
    """The largest batch that trains, and samples a second: plainly, with each block checkpointed, planned."""
    length, words, most = (64, 512, 8) if asked.small else (1024, 8192, 1024)
    make = asked.setting(GROWING, amp=True).make

    def rate(module: nn.Module, step: Step, optimizer: torch.optim.Optimizer, size: int) -> float:
        """Samples a second; 0 where it runs out of memory."""

        def train() -> None:
            step(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        try:
            with asked.device:
                batch = tokens(size, length, words)
            return size / min(seconds_in_turn({"it": train}, 2, device=asked.device)["it"])
        except torch.OutOfMemoryError:
            return 0.0
        finally:
            optimizer.zero_grad()
            let_go()

    def largest(way: str, step_of: Callable[[nn.Module, Step], Step]) -> Row:
        module, plain, _ = make()
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
    module, step, _ = make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    whole = checkmate.training_step(step, optimizer, budget=budget, time_limit=asked.time_limit)
    options: Any = {"budget": budget, "profile": profile, "time_limit": min(60.0, asked.seconds / 4)}
    with asked.device:
        found = checkmate.max_batch_size(lambda: whole, lambda n: tokens(n, length, words), largest=most, **options)
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
        seconds = _seconds(partial(torch.matmul, a, b), asked.device)
        yield {"product": n, "dtype": str(dtype), "flops_a_second": 2 * n**3 / seconds}
    a = torch.empty(1 << (20 if asked.small else 31), dtype=torch.uint8, device=asked.device)
    seconds = _seconds(a.clone, asked.device)
    yield {"copy": a.nbytes, "bytes_a_second": 2 * a.nbytes / seconds}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The fewest of nine calls."""
    with alone():
        return min(seconds_in_turn({"it": run}, 9, device=device)["it"])


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
