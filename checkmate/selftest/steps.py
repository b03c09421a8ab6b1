"""Checks of whole steps: predicted bytes and measured ones, what really fits, and networks within three budgets."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkmate.capture.ways.rounding_probes import same_bytes
from checkmate.compiler import compile as compiled_within
from checkmate.compiler import verify
from checkmate.errors import CheckmateError
from checkmate.memory import MemoryUse, measure_peak
from checkmate.profiling.roofline import DEVICES
from checkmate.selftest import networks
from checkmate.selftest.check import REPORT, Finding, Setting
from checkmate.selftest.kernels import data_sheet
from checkmate.solvers.search.min_budget import min_budget
from checkmate.tracing import trace
from checkmate.units import format_bytes

SHARES = (0.1, 0.5, 1.0)  # of the way from the smallest budget to keeping everything
PLAN_SECONDS, QUICK_SECONDS = 5.0, 1.0  # to plan for one budget
PAIRS = 5  # of plain and compiled steps that are timed


def _chain(setting: Setting) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """Values of 10 MiB, or of 160 for a device at full size: from 10 on the allocator takes each by itself."""
    torch.manual_seed(0)
    with setting.device:
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        rows = 5 << (10 if setting.device.type == "cpu" else 13 if setting.quick else 17)
        module, x = nn.Sequential(*layers), torch.randn(rows, 64)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = module(x).square().mean()
        return loss

    return module, step, x


def _budgets(setting: Setting, step: Callable[..., Tensor], *batch: Tensor) -> list[int]:
    problem = trace(step, *batch)
    least = min_budget(problem, time_limit=_plan_seconds(setting)).peak
    return [least + int(share * (problem.keep_all_peak - least)) for share in SHARES]


def _plan_seconds(setting: Setting) -> float:
    return QUICK_SECONDS if setting.quick else PLAN_SECONDS


def run_step(module: nn.Module, step: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """A forward and a backward, from no gradients; the loss."""
    module.zero_grad(set_to_none=True)
    loss = step(*batch)
    loss.backward()
    return loss.detach()


def _most(use: MemoryUse, resident: int) -> int:
    """Bytes at the peak, with what was there before: by the meter, or on the CPU by the plan."""
    return use.peak + (resident if use.before is None else use.before)


def predicted_bytes(setting: Setting) -> Finding:
    """Compile for three budgets, and hold what each plan predicts against what is asked for and taken."""
    module, step, x = _chain(setting)
    rows: list[dict[str, Any]] = []
    for budget in _budgets(setting, step, x):
        compiled = compiled_within(step, budget=budget, time_limit=_plan_seconds(setting), wait="best")
        run_step(module, compiled, x)
        module.zero_grad(set_to_none=True)
        plan = compiled.plans[0]
        use = measure_peak(partial(run_step, module, compiled, x), setting.device)
        asked = _most(use, plan.problem.resident)
        row = {"budget": budget, "predicted": plan.peak, "requested": asked}
        rows.append({**row, "allocated": use.allocated, "reserved": use.reserved})
    off = [row["requested"] - row["predicted"] for row in rows]
    shown = [
        ", ".join(f"{name} {format_bytes(row[name])}" for name in [*row][1:] if row[name] is not None) for row in rows
    ]
    advice = f"Set reserve= to {format_bytes(max(0, *off))} or more when you compile. {REPORT}"
    return Finding(max(off) <= 0, "; ".join(shown), advice, {"rows": rows})


def parts(setting: Setting) -> Finding:
    """Compute a loss whose logits are the most of a step in parts, and hold the bits against those of the whole."""
    torch.manual_seed(0)
    quick = setting.quick or setting.device.type == "cpu"
    words, count, width = (4096, 512, 32) if quick else (50257, 4096, 256)
    with setting.device:
        module = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, words))
        batch = torch.randint(words, (count,)), torch.randint(words, (count,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y)

    problem = trace(step, *batch)
    least = min_budget(problem, time_limit=_plan_seconds(setting)).peak
    whole = int(problem.unavoidable_bytes.max())
    compiled = compiled_within(step, budget=least, time_limit=_plan_seconds(setting), wait="best")
    run_step(module, compiled, *batch)
    module.zero_grad(set_to_none=True)
    said = compiled.plans[0].problem.splits
    report = verify(step, *batch, budget=least, time_limit=_plan_seconds(setting))
    bits = "the same bits" if not report.spread else f"plain PyTorch within its spread, {report.spread:.3g}"
    found = "; ".join(said) or "nothing runs in parts here: none that were tried kept the bits, or gained"
    found += f"; smallest budget {format_bytes(least)}, without parts {format_bytes(whole)} at least; {bits}"
    facts = {"splits": list(said), "least": least, "whole": whole, "resident": problem.resident}
    return Finding(True, found, REPORT, facts)


def capacity(setting: Setting) -> Finding:
    """Forbid the device beyond a planned peak: the planned step trains there, and the plain one has no memory."""
    device = setting.device
    if device.type != "cuda":
        return Finding(None, "PyTorch has no limit for memory on the CPU")
    module, step, x = _chain(setting)
    least, _, most = _budgets(setting, step, x)
    budget, limit = least + (most - least) // 4, least + (most - least) // 2
    expected = run_step(module, step, x)
    compiled = compiled_within(step, budget=budget, time_limit=_plan_seconds(setting), wait="best")
    total = torch.cuda.get_device_properties(device).total_memory
    _give_back(module)
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        plain = _fits(lambda: run_step(module, step, x))
        _give_back(module)
        ours = _fits(lambda: run_step(module, compiled, x))
        again = ours is not None and _fits(lambda: run_step(module, compiled, x))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    same = isinstance(again, Tensor) and same_bytes(again, expected)
    facts = {"limit": limit, "budget": budget, "plain": most, "plain fits": plain is not None, "ours fits": same}
    found = (
        f"limit {format_bytes(limit)}: plain PyTorch {'runs out of memory' if plain is None else 'FITS'}, a plan for "
        f"{format_bytes(budget)} {'trains, with the same loss' if same else 'DOES NOT TRAIN'}"
    )
    return Finding(plain is None and same, found, f"Leave more room: reserve= when you compile. {REPORT}", facts)


def _give_back(module: nn.Module) -> None:
    """Give back what is not in use: gradients, what an error held, and what the allocator keeps."""
    module.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def _fits(run: Callable[[], Tensor]) -> Tensor | None:
    """What a step gives; None where memory runs out."""
    try:
        return run()
    except torch.OutOfMemoryError:
        return None


def transformer(setting: Setting) -> Finding:
    """`within_budgets` a transformer."""
    return within_budgets("transformer", setting)


def bottlenecks(setting: Setting) -> Finding:
    """`within_budgets` convolutions and batch norms."""
    return within_budgets("bottlenecks", setting)


def within_budgets(network: str, setting: Setting) -> Finding:
    """Train a network within three budgets: bits, peak, and time against plain PyTorch."""
    module, step, batch = networks.make(network, setting)
    budgets, rows = _budgets(setting, step, *batch), []
    for budget in budgets:
        row: dict[str, Any] = {"budget": budget}
        try:
            report = verify(step, *batch, budget=budget, time_limit=_plan_seconds(setting))
            row |= {"predicted": report.predicted_peak, "measured": report.measured_peak, "plain": report.plain_peak}
            row |= {"allocated": report.allocated_peak, "plain repeats": report.repeats, "spread": report.spread}
            if budget == budgets[-1] or not setting.quick:
                compiled = compiled_within(step, budget=budget, time_limit=_plan_seconds(setting), wait="best")
                row |= paired_seconds(
                    setting.device, partial(run_step, module, step), partial(run_step, module, compiled), batch
                )
        except (CheckmateError, RuntimeError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    sheet = data_sheet(setting.device)
    estimated = float(trace(step, *batch, profile=f"roofline:{sheet}").seconds.sum())
    facts = {"rows": rows, "data_sheet": sheet, "estimated_seconds": estimated}
    plain = [row["plain seconds"] for row in rows if "plain seconds" in row]
    found = [_said(row) for row in rows]
    found += [f"plain / estimated for {DEVICES[sheet].name} {plain[-1] / estimated:.2f}"] if plain else []
    failed = any("error" in row or (row["measured"] or 0) > budget for row, budget in zip(rows, budgets, strict=True))
    return Finding(not failed, "; ".join(found), REPORT, facts)


def _said(row: dict[str, Any]) -> str:
    head = f"within {format_bytes(row['budget'])}"
    if "error" in row:
        return f"{head} {row['error'].splitlines()[0]}"
    bits = "the same bits" if not row["spread"] else f"plain PyTorch within its spread, {row['spread']:.3g}"
    timed = f", {row['ratio']:.2f} times plain" if "ratio" in row else ""
    return f"{head} {bits}, measured {format_bytes(row['measured'])}{timed}"


def paired_seconds(
    device: torch.device, plain: Callable[..., Tensor], ours: Callable[..., Tensor], batch: Any, pairs: int = PAIRS
) -> dict[str, float]:
    """Median seconds of a step of each, in turn, and the median of the ratios."""

    def seconds(run: Callable[..., Tensor]) -> float:
        _synchronize(device)
        began = time.perf_counter()
        run(*batch)
        _synchronize(device)
        return time.perf_counter() - began

    timed = [(seconds(plain), seconds(ours)) for _ in range(pairs + 1)][1:]  # the first warms up
    of_plain, of_ours = zip(*timed, strict=True)
    ratio = median(b / a for a, b in timed)
    return {"plain seconds": median(of_plain), "seconds": median(of_ours), "ratio": ratio}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
