"""Train a network plainly, then within up to three byte budgets, and check every promise against plain PyTorch.

Budgets are three quarters and half of what keeping everything takes, and 1.15 times the smallest that works. A promise
is broken where a measured peak differs from the predicted one or exceeds its budget, or where one bit of the losses,
the gradients, the trained parameters and buffers or the random state differs from those of plain PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from checkmate.backends.tensor_state import differing
from checkmate.compiler import compile as compiled_within
from checkmate.core.answer import Column, table
from checkmate.demo.tasks import Batch, Step, Task
from checkmate.memory import measure_peak
from checkmate.solvers.search.min_budget import min_budget
from checkmate.tracing import trace
from checkmate.units import exact_bytes, format_bytes, format_seconds

SHARES = (0.75, 0.5)  # of the peak of keeping everything: budgets that people train at
TIGHT = 1.15  # times the smallest budget, the last one


@dataclass(frozen=True)
class Effort:
    """Seconds and steps for the demo."""

    lowest: float = 10.0  # seconds to look for the smallest budget
    plan: float = 6.0  # seconds to plan for one budget
    pairs: int = 8  # of timed steps


FULL = Effort()
QUICK = Effort(lowest=2.0, plan=1.0, pairs=1)
LEGEND = """
budget          bytes allowed at any moment of forward and backward, parameters, buffers and batch included
predicted peak  what the plan says; measured peak: what the profiler saw PyTorch allocate
recomputed      time of what runs again, in proportion to a step in which nothing does, as measured op by op
gap             at most this share of the planned step could any other schedule save: proven
step, of plain  time of a step, and its ratio to plain PyTorch, timed in pairs
losses          against plain PyTorch: losses, gradients, parameters, buffers and random state after all steps
"""


@dataclass(frozen=True)
class Row:
    """The result of one budget."""

    task: str
    budget: int
    predicted: int
    measured: int
    overhead: float
    gap: float
    seconds: float
    ratio: float
    bitwise: bool

    def broken(self) -> list[str]:
        """The broken promises, in words."""
        budget, peak = exact_bytes(self.budget), f"the measured peak of {exact_bytes(self.measured)}"
        promises = (
            (self.measured <= self.budget, f"{peak} exceeds the budget of {budget}"),
            (self.measured == self.predicted, f"{peak} is not the predicted {exact_bytes(self.predicted)}"),
            (self.bitwise, f"at a budget of {budget} the numbers differ from plain PyTorch"),
        )
        return [broken for holds, broken in promises if not holds]


_COLUMNS = (
    Column("budget", "budget", format_bytes),
    Column("predicted peak", "predicted", "{:_}".format),
    Column("measured peak", "measured", "{:_}".format),
    Column("recomputed", "overhead", "{:.1%}".format),
    Column("gap", "gap", "{:.1%}".format),
    Column("step", "seconds", format_seconds),
    Column("of plain", "ratio", "{:.2f}x".format),
    Column("losses", lambda row: "bitwise" if row.bitwise else "DIFFERENT", str),
)


def train(
    module: nn.Module,
    step: Step,
    batches: Sequence[Batch],
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Train a step for each batch, by default with a new Adam.

    Returns all there is to compare, copied to the CPU: losses, gradients, state, random state.
    """
    torch.manual_seed(seed)
    optimizer = optimizer or torch.optim.Adam(module.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    results = [torch.stack(losses), *grads, *module.state_dict().values()]
    on_host = [tensor.detach().to("cpu", copy=True) for tensor in results]
    module.zero_grad(set_to_none=True)
    return [*on_host, torch.get_rng_state()]


def run_step(module: nn.Module, step: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """Run a forward and a backward, from no gradients; give the loss."""
    module.zero_grad(set_to_none=True)
    loss = step(*batch)
    loss.backward()
    return loss.detach()


def peak_of_step(module: nn.Module, step: Step, batch: Batch) -> int:
    """Peak bytes that a second step allocates, from no gradients; it leaves none."""
    run_step(module, step, *batch)
    module.zero_grad(set_to_none=True)
    peak = measure_peak(partial(run_step, module, step, *batch)).peak
    module.zero_grad(set_to_none=True)
    return peak


def train_within_budgets(task: Task, effort: Effort, say: Callable[[str], object]) -> list[Row]:
    """Train plainly, then within each budget; report the findings as text."""
    say(f"\n{task.title}")
    module, step = task.make()
    # Plain PyTorch: losses, parameters and its peak.
    problem = trace(step, *task.batches[0])
    lowest, keep_all = min_budget(problem, time_limit=effort.lowest).peak, problem.keep_all_peak
    expected = train(module, step, task.batches)
    plain = peak_of_step(module, step, task.batches[0]) + problem.resident
    losses = expected[0]
    say(
        f"{len(problem.graph.ops)} operations; plain PyTorch peaks at {exact_bytes(plain)}, "
        f"of which {exact_bytes(problem.resident)} are parameters and batch; loss {losses[0]:.3f} -> {losses[-1]:.3f} "
        f"in {len(losses)} steps\n"
    )
    # The budgets, each on a new network with the same parameters.
    tight = int(TIGHT * lowest)
    budgets = sorted({tight, *(max(tight, int(share * keep_all)) for share in SHARES)}, reverse=True)
    rows: list[Row] = []
    for budget in budgets:
        module, step = task.make()
        compiled = compiled_within(step, budget=budget, time_limit=effort.plan, wait="best")
        found = train(module, compiled, task.batches)
        solution = compiled.plans[0]
        peak = solution.problem.resident + peak_of_step(module, compiled, task.batches[0])
        steps = partial(run_step, module, step), partial(run_step, module, compiled)
        times = paired_seconds(torch.device("cpu"), *steps, task.batches[0], effort.pairs)
        spent = solution.overhead, solution.gap, times["seconds"], times["ratio"]
        rows.append(Row(task.title, budget, solution.peak or 0, peak, *spent, not differing(found, expected)))
    say(str(table(_COLUMNS, rows)))
    return rows


def paired_seconds(
    device: torch.device, plain: Callable[..., Tensor], ours: Callable[..., Tensor], batch: Any, pairs: int
) -> dict[str, float]:
    """Median seconds of a step of each, alternating, and the median of the ratios."""

    def seconds(run: Callable[..., Tensor]) -> float:
        _synchronize(device)
        began = time.perf_counter()
        run(*batch)
        _synchronize(device)
        return time.perf_counter() - began

    timed = [(seconds(plain), seconds(ours)) for _ in range(pairs + 1)][1:]  # the first warms up
    of_plain, of_ours = zip(*timed, strict=True)
    return {"plain seconds": median(of_plain), "seconds": median(of_ours), "ratio": median(b / a for a, b in timed)}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
