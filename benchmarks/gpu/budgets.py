"""A network within budgets on one GPU: bytes, bits and seconds beside plain PyTorch's, a row for each budget.

Budgets lie between the smallest that works (share 0) and keeping everything (share 1). Peaks are bytes of the device as
PyTorch's allocator counts them, whatever they belong to; the state of Adam is there from the start. Where plain PyTorch
does not repeat its own numbers, the row says by how much its runs differ, and the compiled step from the nearest.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.apart import alone
from benchmarks.common.rows import Row, plan_facts
from benchmarks.common.timing import budget_at, distance, let_go, nothing_on_disk, paired_times, step_and_back
from benchmarks.networks.batches import Batch, Step, classifier, images, language_model, tokens
from benchmarks.networks.convolutional import resnet18, resnet50
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.linear import ViT
from benchmarks.networks.pixels import UNet
from checkmate.backends.tensor_state import differing
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.demo.training import train
from checkmate.errors import CheckmateError
from checkmate.memory import MemoryUse, measure_peak

SHARES = (0.1, 0.4, 0.7)
PLAIN_RUNS = 3
LEAST_SECONDS, LEAST_SECONDS_SMALL = 10.0, 1.0  # to look for the smallest budget


@dataclass(frozen=True)
class Network:
    """A network to train: the module, its batch, and the step of it, at full size and at one for a test on the CPU."""

    make: Callable[[], tuple[nn.Module, Batch]]
    make_small: Callable[[], tuple[nn.Module, Batch]]
    step: Callable[[nn.Module], Step] = classifier


def _gpt2(vocabulary: int, positions: int, width: int, layers: int, heads: int, batch: int) -> tuple[nn.Module, Batch]:
    module = GPT2(vocabulary, positions, width, layers, heads, attention="sdpa")
    return module, tokens(batch, positions, vocabulary)


def _llama(small: bool, *, flex: bool = False, triton: bool = False) -> tuple[nn.Module, Batch]:
    """Eight layers of TinyLlama, with `flex_attention` or with norms by Triton."""
    from benchmarks.networks.llama import Llama

    if triton:
        from benchmarks.networks.triton_norm import TritonRMSNorm
    sizes: dict[str, Any] = {"width": 64, "inner": 128, "heads": 4, "groups": 2, "words": 512} if small else {}
    length = 128 if small else 2048
    module = Llama(*([TritonRMSNorm] if triton else []), flex=flex, length=length, layers=2 if small else 8, **sizes)
    (words,) = tokens(4, length, sizes.get("words", 32000))
    return module, (words[:, :-1].contiguous(), words[:, 1:].contiguous())


NETWORKS = {
    "gpt2": Network(
        lambda: _gpt2(50257, 1024, 768, layers=12, heads=12, batch=8),
        lambda: _gpt2(1024, 128, 64, layers=1, heads=2, batch=64),  # more than the allocator takes at a time, 20 MiB
        language_model,
    ),
    "resnet50": Network(
        lambda: (resnet50(1000), images(64, 224, 1000)), lambda: (resnet18(10, base=4), images(2, 32, 10))
    ),
    "vit": Network(
        lambda: (ViT(224, 16, width=768, layers=12, heads=12, classes=1000), images(64, 224, 1000)),
        lambda: (ViT(32, 8, width=64, layers=2, heads=2, classes=10), images(8, 32, 10)),
    ),
    "unet": Network(
        lambda: (UNet(20, depth=4, base=64), images(8, 384, 20, pixels=True)),
        lambda: (UNet(4, depth=2, base=4), images(2, 32, 4, pixels=True)),
    ),
    **{  # each gives its loss
        f"llama {kind}": Network(
            partial(_llama, False, **{kind: True}), partial(_llama, True, **{kind: True}), lambda module: module
        )
        for kind in ("flex", "triton")
    },
}

GROWING = Network(  # the largest batch of it is looked for
    lambda: _gpt2(8192, 1024, 1024, layers=24, heads=16, batch=1),
    lambda: _gpt2(512, 64, 64, layers=2, heads=1, batch=1),
    language_model,
)


@dataclass(frozen=True)
class Setting:
    """Facts that all rows of one network and precision have in common."""

    network: Network
    device: torch.device
    amp: bool
    small: bool

    def make(self) -> tuple[nn.Module, Step, Batch]:
        """The module, its plain step and a batch: each time the same."""
        torch.manual_seed(0)
        with self.device:
            module, batch = self.network.make_small() if self.small else self.network.make()
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
        "difference": min(distance(found, run) for run in plain),
        "plain_spread": max(distance(a, b) for i, a in enumerate(plain) for b in plain[:i]),
    }


def peak_of(use: MemoryUse, resident: int) -> int:
    """Bytes at the peak: on CUDA all that is on the device, on the CPU what the step knows."""
    return use.peak + (resident if use.before is None else use.before)


def measured_plain(setting: Setting) -> Row:
    """The plain step: its peak, what tracing finds, and the outcome of a few runs."""
    module, step, batch = setting.make()
    optimizer = adam(module)
    with alone():
        began = time.perf_counter()
        problem = checkmate.trace(step, *batch)
        traced = time.perf_counter() - began
    runs = [outcome(module, step, batch, optimizer)]
    use = measure_peak(partial(step_and_back, module, step, batch), setting.device)
    seconds = LEAST_SECONDS_SMALL if setting.small else LEAST_SECONDS
    facts = {
        "ops": len(problem.graph.ops),
        "resident": problem.resident,
        "min_budget": checkmate.min_budget(problem, time_limit=seconds).peak,
        "keep_all_peak": problem.keep_all_peak,
        "runs_once": sorted({f"{op.target}: {op.pinned}" for op in problem.graph.ops if op.pinned}),
        "ops_by_kind": _by_kind(problem, step, batch),
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


def rows(setting: Setting, pairs: int, time_limit: float, host: str | None = None) -> Iterator[Row]:
    """A row for each budget; what fails in one is a row with the error."""
    plain = measured_plain(setting)
    for share in SHARES:
        torch._dynamo.reset()
        try:
            yield budget_row(setting, plain, share, pairs, time_limit, host)
        except (CheckmateError, RuntimeError) as error:
            yield {"share": share, "error": f"{type(error).__name__}: {error}"}


def budget_row(setting: Setting, plain: Row, share: float, pairs: int, time_limit: float, host: str | None) -> Row:
    """Measure a network within one budget; ``host``: bytes of a second memory for it."""
    facts = plain["facts"]
    budget = budget_at(share, facts["min_budget"], facts["keep_all_peak"])
    row: Row = {**facts, "share": share, "budget": budget, "pairs": pairs}
    module, step, batch = setting.make()
    optimizer = adam(module)
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best", host_budget=host)
    began = time.perf_counter()
    with nothing_on_disk():
        found = outcome(module, compiled, batch, optimizer)
    row["first_two_steps_seconds"] = time.perf_counter() - began  # capture again, plan, write code, two steps
    row |= compare(found, plain["runs"])
    let_go()
    held = torch.cuda.memory_reserved(setting.device) if setting.device.type == "cuda" else None
    use = measure_peak(partial(step_and_back, module, compiled, batch), setting.device)
    solution = compiled.plans[0]
    measured, predicted = peak_of(use, solution.problem.resident), solution.peak
    assert predicted is not None  # compile raises where there is no plan
    assert solution.plan is not None
    row |= {"predicted_peak": predicted, "measured_peak": measured, "reserved": use.reserved}
    row["planned_bytes"] = predicted - solution.problem.resident  # beyond what is there before the step
    row["reserved_growth"] = None if use.reserved is None or held is None else use.reserved - held
    row |= {"off": abs(measured - predicted) / predicted, "within": measured <= budget}
    row |= {**plan_facts(solution), "runs_again": _runs_again(solution)}
    row |= {"host": str(solution.problem.host), "sent_values": len(solution.plan.sent)} if host else {}
    with alone():
        theirs, ours, ratio = paired_times(module, step, compiled, batch, pairs, setting.device)
    return {**row, "plain_seconds": theirs, "compiled_seconds": ours, "time_ratio": ratio}


def _by_kind(problem: Problem, step: Step, batch: Batch) -> dict[str, list[float]]:
    """For each kind of op how many there are, and their seconds as measured, and as estimated for an H100."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for column, one in ((1, problem), (2, checkmate.trace(step, *batch, profile="roofline:h100"))):
        for op, seconds in zip(one.graph.ops, one.seconds.tolist(), strict=True):
            found[op.target][0] += column == 1
            found[op.target][column] += seconds
    return dict(found)


def _runs_again(solution: Solution) -> dict[str, int]:
    """For each kind of op how often one runs again."""
    assert solution.schedule is not None
    found: Counter[str] = Counter()
    for op, again in zip(solution.problem.graph.ops, solution.schedule.recomputed.tolist(), strict=True):
        found[op.target] += again
    return dict(+found)


def limited_row(setting: Setting, plain: Row, time_limit: float) -> Row:
    """Train plainly and within a budget where PyTorch may take no more of the device than the budget and a margin."""
    facts, total = plain["facts"], torch.cuda.get_device_properties(setting.device).total_memory
    least, most = facts["min_budget"], facts["plain_peak"]
    budget, limit = least + (most - least) // 4, least + (most - least) // 2
    let_go()
    torch.cuda.set_per_process_memory_fraction(limit / total, setting.device)
    try:
        try:
            module, step, batch = setting.make()
            outcome(module, step, batch, adam(module))
            died = False
        except torch.OutOfMemoryError:
            died = True
        module = step = batch = None  # type: ignore[assignment]  # what the failed step held
        let_go()
        module, step, batch = setting.make()
        compiled = checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best")
        found = outcome(module, compiled, batch, adam(module))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
    return {
        "limit": limit,
        "budget": budget,
        "plain_peak": most,
        "plain_ran_out_of_memory": died,
        "losses": found[0].tolist(),
        "plain_losses": plain["runs"][0][0].tolist(),
        **compare(found, plain["runs"]),
    }
