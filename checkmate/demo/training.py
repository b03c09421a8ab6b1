"""Train a network plainly, then within up to three byte budgets, and check every promise against plain PyTorch.

There are two networks, with data that needs no download: the text that ships with Python, and patterns in noise.
Budgets are three quarters and half of what keeping everything takes, and 1.15 times the smallest that works. A promise
is broken where a measured peak differs from the predicted one or exceeds its budget, or where one bit of the losses,
the gradients, the trained parameters and buffers or the random state differs from those of plain PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from checkmate.backends.tensor_state import differing
from checkmate.compiler import compile as compiled_within
from checkmate.core.answer import Column, table
from checkmate.memory import measure_peak
from checkmate.solvers.search.min_budget import min_budget
from checkmate.tracing import trace
from checkmate.units import exact_bytes, format_bytes, format_seconds

Step = Callable[..., Tensor]
Batch = tuple[Tensor, ...]
PATTERNS = 10  # among which the residual network tells
STEPS = 25  # to train in each run
SHARES = (0.75, 0.5)  # of the peak of keeping everything: budgets that people train at
TIGHT = 1.15  # times the smallest budget, the last one


@dataclass(frozen=True)
class Task:
    """A network to train: its description, step and batches."""

    title: str
    network: Callable[[], nn.Module]
    batches: list[Batch]

    def make(self) -> tuple[nn.Module, Step]:
        """The network, with the same parameters each time, and the step that gives its loss."""
        torch.manual_seed(0)
        module = self.network()
        return module, step_of(module)


def text_task(steps: int) -> Task:
    """A transformer that reads Python's documentation."""
    text, alphabet = documentation()
    network = partial(Transformer, len(alphabet), positions=64, width=64, layers=4, heads=4)
    data = f"{len(text):,} characters of Python's documentation, 16 passages of 64 a step"
    return Task(f"A transformer of 4 layers, on {data}", network, text_batches(text, steps, size=16, length=64))


def patterns_task(steps: int) -> Task:
    """A residual network that names patterns."""
    network = partial(Bottlenecks, (2, 2, 2, 2), width=16, classes=PATTERNS, channels=1)
    title = "A residual network of 26 layers, on ten patterns in noise, 16 images of 64 x 64 a step"
    return Task(title, network, pattern_batches(steps, size=16, pixels=64))


def step_of(module: nn.Module) -> Step:
    """The step of a network, which ends in the cross entropy."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x).flatten(0, -2), y.flatten())

    return step


class Transformer(nn.Module):
    """A language model in the manner of GPT-2: tokens in, logits out."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, positions) int64 to (batch, positions, vocabulary)."""
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, 0.1
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.queries_keys_values(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        return x + F.dropout(self.narrower(F.gelu(self.wider(self.second(x)))), self.dropout)


class Bottlenecks(nn.Module):
    """A network in the manner of ResNet-50, with this many blocks in each stage: images in, logits out."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(_Bottleneck(channels, width << stage, stride=2 if stage and not i else 1))
                channels = 4 * (width << stage)
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        return self.head(self.body(x).mean((2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        wider = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.beside = wider if stride > 1 or channels != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = y.relu() if i < 2 else y
        return (y + self.beside(x)).relu()


def documentation() -> tuple[Tensor, str]:
    """(N,) int64: the characters of Python's documentation topics as indices into the alphabet, and the alphabet."""
    text = "\n".join(topics[topic] for topic in sorted(topics))
    alphabet = "".join(sorted({*text}))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), alphabet


def text_batches(text: Tensor, count: int, size: int, length: int) -> list[Batch]:
    """Batches of random passages, (size, length) each, and the character after each of theirs."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - length, (count, size), generator=generator)
    passages = text[starts[..., None] + torch.arange(length + 1)]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in passages]


def pattern_batches(count: int, size: int, pixels: int) -> list[Batch]:
    """Batches of patterns in noise: (size, 1, pixels, pixels) float32, and (size,) int64, which pattern each is."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(PATTERNS, 1, 4, 4, generator=generator), (pixels, pixels))
    labels = torch.randint(PATTERNS, (count, size), generator=generator)
    noise = torch.randn(count, size, 1, pixels, pixels, generator=generator)
    return [(patterns[row] + row_noise, row) for row, row_noise in zip(labels, noise, strict=True)]


class Effort(NamedTuple):
    """Seconds and steps for the demo."""

    lowest: float = 10.0  # seconds to look for the smallest budget
    plan: float = 6.0  # seconds to plan for one budget
    pairs: int = 8  # of timed steps


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
        above = [f"{peak} exceeds the budget of {budget}"] * (self.measured > self.budget)
        other = [f"{peak} is not the predicted {exact_bytes(self.predicted)}"] * (self.measured != self.predicted)
        return above + other + [f"at a budget of {budget} the numbers differ from plain PyTorch"] * (not self.bitwise)


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
    module: nn.Module, step: Step, batches: Sequence[Batch], seed: int = 0, optimizer: optim.Optimizer | None = None
) -> list[Tensor]:
    """Train a step for each batch, by default with a new Adam.

    Returns all there is to compare, copied to the CPU: losses, gradients, state, random state.
    """
    torch.manual_seed(seed)
    optimizer = optimizer or optim.Adam(module.parameters(), lr=2e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    results = [t.detach().to("cpu", copy=True) for t in (torch.stack(losses), *grads, *module.state_dict().values())]
    module.zero_grad(set_to_none=True)
    return [*results, torch.get_rng_state()]


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
    plain, losses = peak_of_step(module, step, task.batches[0]) + problem.resident, expected[0]
    peaks = f"peaks at {exact_bytes(plain)}, of which {exact_bytes(problem.resident)} are parameters and batch"
    trained = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"
    say(f"{len(problem.graph.ops)} operations; plain PyTorch {peaks}; {trained}\n")
    # The budgets, each on a new network with the same parameters.
    tight, rows = int(TIGHT * lowest), list[Row]()
    for budget in sorted({tight, *(max(tight, int(share * keep_all)) for share in SHARES)}, reverse=True):
        module, step = task.make()
        compiled = compiled_within(step, budget=budget, time_limit=effort.plan, wait="best")
        actual = train(module, compiled, task.batches)
        solution = compiled.plans[0]
        peak = solution.problem.resident + peak_of_step(module, compiled, task.batches[0])
        steps = partial(run_step, module, step), partial(run_step, module, compiled)
        times = paired_seconds(torch.device("cpu"), *steps, task.batches[0], effort.pairs)
        figures = solution.overhead, solution.gap, times["seconds"], times["ratio"]
        rows.append(Row(task.title, budget, solution.peak or 0, peak, *figures, not differing(actual, expected)))
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

    times = [(seconds(plain), seconds(ours)) for _ in range(pairs + 1)][1:]  # the first warms up
    of_plain, of_ours = zip(*times, strict=True)
    return {"plain seconds": median(of_plain), "seconds": median(of_ours), "ratio": median(b / a for a, b in times)}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
