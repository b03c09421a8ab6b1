"""Compiled against plain training steps on one GPU: one row for each network, precision and budget.

    python -m benchmarks.gpu [NETWORK ...] [--minutes 8] [--out benchmarks/results/gpu.jsonl]

ResNet-50, U-Net, GPT-2 of 12 layers and a ViT, untrained, in float32 and in bfloat16 by autocast, with the state of
Adam there from the start. Budgets lie between the smallest that works (share 0) and keeping everything (share 1). Peaks
are bytes of the device as PyTorch's allocator counts them, whatever they belong to. *Of planned* is by how much the
bytes that it has of the device grow over a step, from an empty cache, in proportion to what the plan takes beyond what
is there before. Nothing is downloaded.

Where plain PyTorch does not repeat its own numbers, the row says by how much its runs differ, and the compiled step
from the nearest of them. ``--device cpu --quick`` runs small versions of two of the networks on the CPU.

``--peers`` compares with PyTorch's own ways to save memory instead, as `benchmarks.peers` does on the CPU, on GPT-2
medium, ResNet-50 with a batch of 256 and a U-Net with one of 32, in the same eight minutes.

``--host "64 GB"`` has values wait in pinned memory of the host (on the CPU, in a file), and the rows say how many.

One row more is a demonstration: with the fraction of the device's memory that PyTorch may take set half way between
the least and the most that GPT-2 needs, plain PyTorch runs out of memory, and the planned step trains.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common import timing as measuring
from benchmarks.common.rows import Row, add_names, append, documented, origin, plan_facts
from benchmarks.networks.batches import Batch, Step, classifier, images, language_model, tokens
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.unet import UNet
from benchmarks.networks.vit import ViT
from benchmarks.peers import comparison as peers
from benchmarks.peers import report as peers_report
from benchmarks.peers.subjects import on_a_gpu
from checkmate.backends.tensor_state import differing
from checkmate.core.table import Table
from checkmate.demo.training import train
from checkmate.memory import MemoryUse, measure_peak

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
PEER_KNOBS = ("each block", "keeps matmuls", "4 segments", "dp 0.2", "dp 0.5", "dp 0.8", "dp 1")
PEER_SHARES = (0.0, 0.1, 0.4, 1.0)
SHARES = (0.1, 0.4, 0.7)
PLAIN_RUNS = 3
LEAST_SECONDS, LEAST_SECONDS_SMALL = 10.0, 1.0  # to look for the smallest budget
LIMITED = "gpt2"  # trained within a hard limit too
HEADER = (
    "network", "precision", "share", "budget", "predicted", "measured", "off", "reserved", "of planned",
    "within", "of plain", "numbers", "plan",
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """What to train: the module, its batch, and the step of it, at full size and at one for a test on the CPU."""

    make: Callable[[], tuple[nn.Module, Batch]]
    make_small: Callable[[], tuple[nn.Module, Batch]] | None = None
    step: Callable[[nn.Module], Step] = classifier


def _gpt2(vocabulary: int, positions: int, width: int, layers: int, heads: int, batch: int) -> tuple[nn.Module, Batch]:
    module = GPT2(vocabulary, positions, width, layers, heads, attention="sdpa")
    return module, tokens(batch, positions, vocabulary)


NETWORKS = {
    "resnet50": Network(lambda: (resnet50(1000), images(64, 224, 1000))),
    "gpt2": Network(
        lambda: _gpt2(50257, 1024, 768, layers=12, heads=12, batch=8),
        lambda: _gpt2(1024, 128, 64, layers=1, heads=2, batch=64),  # more than the allocator takes at a time, 20 MiB
        language_model,
    ),
    "vit": Network(lambda: (ViT(224, 16, width=768, layers=12, heads=12, classes=1000), images(64, 224, 1000))),
    "unet": Network(
        lambda: (UNet(20, depth=4, base=64), images(8, 384, 20, pixels=True)),
        lambda: (UNet(4, depth=2, base=4), images(2, 32, 4, pixels=True)),
    ),
}


@dataclass(frozen=True)
class Setting:
    """What all rows of one network and precision have in common."""

    network: Network
    device: torch.device
    amp: bool
    small: bool

    def make(self) -> tuple[nn.Module, Step, Batch]:
        """The module, its plain step and a batch: each time the same."""
        torch.manual_seed(0)
        with self.device:
            make = self.network.make_small if self.small else None
            module, batch = (make or self.network.make)()
        loss = self.network.step(module)

        def step(*batch: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16) if self.amp else nullcontext():
                return loss(*batch)

        return module, step, batch


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Adam with its state in place: a step along gradients of zero, which moves nothing."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def outcome(module: nn.Module, step: Step, batch: Batch, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Losses, last gradients, parameters and buffers after two steps; copies on the CPU."""
    *results, _random_state = train(module, step, [batch] * 2, seed=1, optimizer=optimizer)
    return results


def compare(found: list[Tensor], plain: list[list[Tensor]]) -> Row:
    """Whether plain runs repeat their bits, whether these are the compiled step's, and how far all are apart."""
    return {
        "plain_repeats": all(not differing(plain[0], run) for run in plain[1:]),
        "bitwise": any(not differing(found, run) for run in plain),
        "difference": min(measuring.distance(found, run) for run in plain),
        "plain_spread": max(measuring.distance(a, b) for i, a in enumerate(plain) for b in plain[:i]),
    }


def peak_of(use: MemoryUse, resident: int) -> int:
    """Bytes at the peak: on CUDA all that is on the device, on the CPU what the step knows."""
    return use.peak + (resident if use.before is None else use.before)


def measured_plain(setting: Setting) -> Row:
    """The plain step: its peak, what tracing finds, and the outcome of a few runs."""
    module, step, batch = setting.make()
    optimizer = adam(module)
    began = time.perf_counter()
    problem = checkmate.trace(step, *batch)
    traced = time.perf_counter() - began
    runs = [outcome(module, step, batch, optimizer)]
    use = measure_peak(partial(measuring.step_and_back, module, step, batch), setting.device)
    seconds = LEAST_SECONDS_SMALL if setting.small else LEAST_SECONDS
    facts = {
        "ops": len(problem.graph.ops),
        "resident": problem.resident,
        "min_budget": checkmate.min_budget(problem, time_limit=seconds).peak,
        "keep_all_peak": problem.keep_all_peak,
        "trace_seconds": traced,  # capture, and each distinct op measured
        "plain_peak": peak_of(use, problem.resident),
        "plain_reserved": use.reserved,
    }
    for _ in range(PLAIN_RUNS - 1):
        del module, step, batch, optimizer
        module, step, batch = setting.make()
        optimizer = adam(module)
        runs.append(outcome(module, step, batch, optimizer))
    return {"facts": facts, "runs": runs}


def row(setting: Setting, plain: Row, share: float, pairs: int, time_limit: float, host: str | None = None) -> Row:
    """Measure a network within one budget; ``host``: bytes of a second memory for it."""
    facts = plain["facts"]
    budget = measuring.budget_at(share, facts["min_budget"], facts["keep_all_peak"])
    module, step, batch = setting.make()
    optimizer = adam(module)
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best", host_budget=host)
    began = time.perf_counter()
    with measuring.nothing_on_disk():
        found = outcome(module, compiled, batch, optimizer)
    first_steps = time.perf_counter() - began
    held = reserved_now(setting.device)
    use = measure_peak(partial(measuring.step_and_back, module, compiled, batch), setting.device)
    solution = compiled.plans[0]
    measured, predicted = peak_of(use, solution.problem.resident), solution.peak
    assert predicted is not None  # compile raises where there is no plan
    assert solution.plan is not None
    elsewhere = {"host": str(solution.problem.host), "sent_values": len(solution.plan.sent)} if host else {}
    finish = partial(torch.cuda.synchronize, setting.device) if setting.device.type == "cuda" else lambda: None
    plain_seconds, compiled_seconds, ratio = measuring.paired_times(module, step, compiled, batch, pairs, finish)
    return {
        **facts,
        "share": share,
        "budget": budget,
        "predicted_peak": predicted,
        "measured_peak": measured,
        "reserved": use.reserved,
        "planned_bytes": predicted - solution.problem.resident,  # what the step takes beyond what is there before it
        "reserved_growth": None if use.reserved is None or held is None else use.reserved - held,
        "off": abs(measured - predicted) / predicted,
        "within": measured <= budget,
        **plan_facts(solution),
        **elsewhere,
        "plain_seconds": plain_seconds,
        "compiled_seconds": compiled_seconds,
        "time_ratio": ratio,
        "pairs": pairs,
        "first_two_steps_seconds": first_steps,  # capture again, plan, write code, two steps
        **compare(found, plain["runs"]),
    }


def reserved_now(device: torch.device) -> int | None:
    """Bytes that PyTorch's allocator has of a device once it has given back what nothing lies in; None on the CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def limited_row(setting: Setting, plain: Row, time_limit: float) -> Row:
    """Train plainly and within a budget where PyTorch may take no more of the device than the budget and a margin."""
    facts, total = plain["facts"], torch.cuda.get_device_properties(setting.device).total_memory
    least, most = facts["min_budget"], facts["plain_peak"]
    budget, limit = least + (most - least) // 4, least + (most - least) // 2
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total, setting.device)
    try:
        try:
            module, step, batch = setting.make()
            outcome(module, step, batch, adam(module))
            died = False
        except torch.OutOfMemoryError:
            died = True
        module = step = batch = None  # type: ignore[assignment]  # what the failed step held
        gc.collect()
        torch.cuda.empty_cache()
        module, step, batch = setting.make()
        optimizer = adam(module)
        found = outcome(
            module, checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best"), batch, optimizer
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
    losses = found[0].tolist(), plain["runs"][0][0].tolist()
    return {
        "limit": limit,
        "budget": budget,
        "plain_peak": most,
        "plain_ran_out_of_memory": died,
        "losses": losses[0],
        "plain_losses": losses[1],
        **compare(found, plain["runs"]),
    }


def _cells(row: Row) -> list[str]:
    name = [row["network"], row["precision"]]
    if "error" in row:
        return [*name, f"{row.get('share', '')}", *["-"] * 8, "ERROR", row["error"].splitlines()[0][:60]]
    if "limit" in row:
        died = "plain ran out of memory" if row["plain_ran_out_of_memory"] else "PLAIN FITS"
        same = "same losses" if row["losses"] == row["plain_losses"] else "OTHER LOSSES"
        limit = f"limit {row['limit'] / 1e6:,.1f} MB"
        return [*name, "", f"{row['budget'] / 1e6:,.1f} MB", limit, *["-"] * 6, died, same]
    apart = f"{row['difference']:.1e} off, plain {row['plain_spread']:.1e}"
    return [
        *name,
        f"{row['share']:g}",
        *(f"{row[key] / 1e6:,.1f} MB" for key in ("budget", "predicted_peak", "measured_peak")),
        f"{row['off']:.2%}",
        "-" if row["reserved"] is None else f"{row['reserved'] / 1e6:,.1f} MB",
        "-" if row["reserved_growth"] is None else f"{row['reserved_growth'] / row['planned_bytes']:.3f}",
        "yes" if row["within"] else "NO",
        f"{row['time_ratio']:.3f}x",
        "same bits" if row["bitwise"] else apart,
        f"{row['plan_seconds']:.1f} s",
    ]


def origin_of(device: torch.device) -> Row:
    """Where and when a row was made, with the GPU and what drives it."""
    facts: Row = {**origin(), "device": str(device)}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["gpu_bytes"] = torch.cuda.get_device_properties(device).total_memory
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return facts


def measured_rows(args: argparse.Namespace) -> Iterator[Row]:
    """All rows that were asked for, as far as the time allows; what fails is a row with the error."""
    deadline, longest = time.monotonic() + 60 * args.minutes, 0.0
    names = [name for name in args.names if NETWORKS[name].make_small or not args.quick]
    # each network once, its precision in turn, before any a second time
    turns = [(name, (i + turn) % 2 == 1) for turn in (0, 1) for i, name in enumerate(names)]
    for name, amp in turns:
        about = {"network": name, "precision": "bfloat16" if amp else "float32"}
        setting, plain = Setting(NETWORKS[name], args.device, amp, args.quick), None
        for share in SHARES:
            if time.monotonic() + longest > deadline:
                print(f"no time left for {name} in {about['precision']} at {share:g}", file=sys.stderr, flush=True)
                continue
            began = time.monotonic()
            torch._dynamo.reset()
            try:
                plain = plain or measured_plain(setting)
                yield {**about, **row(setting, plain, share, args.pairs, args.time_limit, args.host)}
            except (checkmate.CheckmateError, RuntimeError) as error:
                yield {**about, "share": share, "error": f"{type(error).__name__}: {error}"}
            longest = max(longest, time.monotonic() - began)
        left = time.monotonic() + longest <= deadline
        if left and name == LIMITED and plain and not amp and args.device.type == "cuda":
            torch._dynamo.reset()
            try:
                yield {**about, **limited_row(setting, plain, args.time_limit)}
            except (checkmate.CheckmateError, RuntimeError) as error:
                yield {**about, "error": f"{type(error).__name__}: {error}"}


def compared_with_peers(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of `benchmarks.peers` on one GPU: an equal part of the time for each, a fifth of it for steps."""
    networks = on_a_gpu(small=args.quick)
    end = time.monotonic() + 60 * args.minutes
    for left, network in zip(range(len(networks), 0, -1), networks.values(), strict=True):
        seconds = (end - time.monotonic()) / left
        options = peers.Options(
            args.device,
            only=("peers", "ours", "inductor") if args.device.type == "cuda" else ("peers", "ours"),
            shares=PEER_SHARES[1::2] if args.quick else PEER_SHARES,
            time_limit=args.time_limit,
            minutes=seconds / 60 / 10,  # twice: to find the best peers, and with ours among them
            rounds=(2, 2) if args.quick else (3, 15),
            deadline=time.monotonic() + 0.75 * seconds,
            takes=lambda setting: setting.knob in (PEER_KNOBS[:2] if args.quick else PEER_KNOBS),
        )
        yield from peers.compare(network, options, partial(print, f"{network.name}:", file=sys.stderr, flush=True))
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Measure, append the rows to the file, print them as a table; fails if a row does."""
    parser = documented(__doc__)
    add_names(parser, NETWORKS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--quick", action="store_true", help="small versions of two networks, few pairs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no row is begun that may end later")
    parser.add_argument("--pairs", type=int, default=10, help="timed pairs of steps")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds to plan for one budget")
    parser.add_argument("--host", metavar="BYTES", help="of a second memory, where values may wait; '64 GB', say")
    parser.add_argument("--peers", action="store_true", help="compare with other ways to save memory instead")
    parser.add_argument("--out", type=Path, help="by default gpu.jsonl, or gpu_peers.jsonl, of benchmarks/results")
    args = parser.parse_args()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here. --device cpu --quick runs small versions of the networks on the CPU.")
    if args.device.type == "cuda" and args.device.index is None:
        args.device = torch.device("cuda", torch.cuda.current_device())
    if args.quick:
        args.pairs, args.time_limit, args.minutes = 2, 1.0, max(args.minutes, 60.0)
    about, cells, failed = origin_of(args.device), [], 0
    args.out = args.out or (RESULTS.with_name("gpu_peers.jsonl") if args.peers else RESULTS)
    if args.peers:
        for found in compared_with_peers(args):
            append(args.out, {**about, **found})
        peers_report.render(args.out)
        return
    for found in measured_rows(args):
        append(args.out, {**about, **found})
        failed += "error" in found
        cells.append(_cells(found))
        print("  ".join(cells[-1]), flush=True)
    print(f"\n{about.get('gpu', about['cpu'])}, PyTorch {about['torch']}\n{Table(HEADER, cells, HEADER[1:])}")
    if failed:
        sys.exit(f"{failed} of {len(cells)} rows failed; {args.out} has the errors.")


if __name__ == "__main__":
    main()
