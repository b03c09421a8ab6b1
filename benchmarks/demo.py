"""Train two networks on real data, each inside up to three byte budgets, and hold every promise against plain PyTorch.

    python -m benchmarks.demo [--steps N] [--quick]

Budgets are three quarters and half of what keeping everything takes, and 1.15 times the smallest that works.
The character model is GPT-2 of four layers, on the text of Python's own documentation topics. The convolutional one is
ResNet-18, and learns to name letters drawn in the typefaces that come with Matplotlib. Nothing is downloaded. The exit
status is 1 if a measured peak differs from the predicted one or exceeds its budget, or if one bit of the losses, the
gradients, the trained parameters and buffers or the random state differs from those of plain PyTorch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common import data
from benchmarks.common import timing as measuring
from benchmarks.common.rows import documented
from benchmarks.networks.batches import classifier, language_model
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.resnet import resnet18
from checkmate.backends.tensor_state import differing
from checkmate.core.table import Table
from checkmate.units import exact_bytes, format_bytes, format_seconds

SHARES = (0.75, 0.5)  # of the peak of keeping everything: budgets that people train at
TIGHT = 1.15  # times the smallest budget, the last one


@dataclass(frozen=True)
class Effort:
    """How long it may take."""

    lowest: float = 10.0  # seconds to look for the smallest budget
    plan: float = 6.0  # seconds to plan for one budget
    pairs: int = 8  # of timed steps


QUICK = Effort(lowest=2.0, plan=1.0, pairs=1)
LEGEND = """
budget          bytes allowed at any moment of forward and backward, parameters, buffers and batch included
predicted peak  what the plan says; measured peak: what the profiler saw PyTorch allocate
recomputed      time of what runs again, in proportion to a step in which nothing does, as measured op by op
gap             at most this share of the planned step could any other schedule save: proven
step, of plain  time of a step, and its ratio to plain PyTorch, timed in pairs
losses          against plain PyTorch: losses, gradients, parameters, buffers and random state after all steps
"""
HEADER = ("budget", "predicted peak", "measured peak", "recomputed", "gap", "step", "of plain", "losses")


@dataclass(frozen=True)
class Task:
    """A network to train: what it is, how to make it with its step, and the batches."""

    title: str
    make: Callable[[], tuple[nn.Module, measuring.Step]]
    batches: list[measuring.Batch]


@dataclass(frozen=True)
class Row:
    """What one budget gave."""

    budget: int
    predicted: int
    measured: int
    overhead: float
    gap: float
    seconds: float
    ratio: float
    bitwise: bool

    def broken(self) -> list[str]:
        """The promises that do not hold, in words."""
        found = []
        if self.measured > self.budget:
            found.append(
                f"the measured peak of {exact_bytes(self.measured)} exceeds the budget of {exact_bytes(self.budget)}"
            )
        if self.measured != self.predicted:
            found.append(
                f"the measured peak of {exact_bytes(self.measured)} is not the predicted {exact_bytes(self.predicted)}"
            )
        if not self.bitwise:
            found.append(f"at a budget of {exact_bytes(self.budget)} the numbers differ from plain PyTorch")
        return found

    def cells(self) -> list[str]:
        """The row as text."""
        return [
            format_bytes(self.budget),
            f"{self.predicted:_}",
            f"{self.measured:_}",
            f"{self.overhead:.1%}",
            f"{self.gap:.1%}",
            format_seconds(self.seconds),
            f"{self.ratio:.2f}x",
            "bitwise" if self.bitwise else "DIFFERENT",
        ]


def text_task(steps: int) -> Task:
    """GPT-2 on Python's documentation."""
    text, alphabet = data.documentation()

    def make() -> tuple[nn.Module, measuring.Step]:
        torch.manual_seed(0)
        module = GPT2(len(alphabet), positions=64, width=64, layers=4, heads=4, attention="eager")
        return module, language_model(module)

    title = f"GPT-2 of 4 layers, on {len(text):,} characters of Python's documentation, 16 passages of 64 a step"
    return Task(title, make, data.text_batches(text, steps, size=16, length=64))


def letters_task(steps: int) -> Task:
    """ResNet-18 on letters."""
    images, labels = data.letters(64)

    def make() -> tuple[nn.Module, measuring.Step]:
        torch.manual_seed(0)
        module = resnet18(len(data.LETTERS), base=16, channels=1)
        return module, classifier(module)

    title = f"ResNet-18, on {len(images):,} letters of {len(data.typefaces())} typefaces, 64 images of 64 x 64 a step"
    return Task(title, make, data.letter_batches(images, labels, steps, size=64))


def run(task: Task, effort: Effort) -> list[str]:
    """Train plainly, then inside each budget, and print the table; the promises that were broken, in words."""
    print(f"\n{task.title}", flush=True)
    module, step = task.make()
    problem = checkmate.trace(step, *task.batches[0])
    lowest, keep_all = checkmate.min_budget(problem, time_limit=effort.lowest).peak, problem.keep_all_peak
    expected = measuring.train(module, step, task.batches)
    plain = measuring.peak_of_step(module, step, task.batches[0]) + problem.resident
    losses = expected[0]
    print(
        f"{len(problem.graph.ops)} operations; plain PyTorch peaks at {exact_bytes(plain)}, "
        f"of which {exact_bytes(problem.resident)} are parameters and batch; loss {losses[0]:.3f} -> {losses[-1]:.3f} "
        f"in {len(losses)} steps\n"
    )
    tight = int(TIGHT * lowest)
    budgets = sorted({tight, *(max(tight, int(share * keep_all)) for share in SHARES)}, reverse=True)
    rows = [_row(task, budget, effort, expected) for budget in budgets]
    print(Table(HEADER, [row.cells() for row in rows], HEADER), flush=True)
    return [promise for row in rows for promise in row.broken()]


def _row(task: Task, budget: int, effort: Effort, expected: list[Tensor]) -> Row:
    module, plain = task.make()
    compiled = checkmate.compile(plain, budget=budget, time_limit=effort.plan, wait="best")
    found = measuring.train(module, compiled, task.batches)
    solution = compiled.plans[0]
    peak = measuring.peak_of_step(module, compiled, task.batches[0])
    _, seconds, ratio = measuring.paired_times(module, plain, compiled, task.batches[0], effort.pairs)
    return Row(
        budget,
        solution.peak or 0,
        solution.problem.resident + peak,
        solution.overhead,
        solution.gap,
        seconds,
        ratio,
        not differing(found, expected),
    )


def main() -> int:
    """Run both tasks."""
    parser = documented(__doc__)
    parser.add_argument("--steps", type=int, default=25, help="training steps of each run")
    parser.add_argument("--quick", action="store_true", help="a second for each plan, and each step timed once")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # where bytes and numbers repeat exactly
    began = time.perf_counter()
    print(LEGEND.strip(), flush=True)
    effort = QUICK if asked.quick else Effort()
    broken = [promise for make in (text_task, letters_task) for promise in run(make(asked.steps), effort)]
    print(f"\nAll of it took {time.perf_counter() - began:.0f} seconds on one thread.")
    for promise in broken:
        print(f"BROKEN: {promise}")
    if not broken:
        print(
            "Every measured peak is the predicted one and within its budget; every number is plain PyTorch's, bitwise."
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
