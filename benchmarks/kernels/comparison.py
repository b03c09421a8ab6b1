"""Seconds and peaks of steps by PyTorch's kernels and by fused ones, beside torch.compile, on the CPU.

    python -m benchmarks.kernels [NETWORK ...] [--rounds 7] [--time-limit 5]
    python -m benchmarks.kernels --report     # from the rows: results/kernels.md, and the picture

Ways are plain PyTorch, `torch.compile`, that with its activation memory budget or with checkpoints around blocks, and
ours with each value of ``kernels``: keeping everything, at half of what plain PyTorch takes, within the measured peaks
of torch.compile without a budget and with the least one, and at the smallest budget that works. Each trains on one
thread in a process of its own, and keeps its pages of memory: steps take turns between the processes. Those that keep
everything are started twice, on an empty folder for what is kept on disk and on a full one, with nothing else running.

A row has the peak as PyTorch's allocator counts it, parameters and batch included; the median of the seconds of a step,
and of its ratios to plain PyTorch's next to it; the seconds of the first step, ``cold`` and ``warm``; what differs from
plain PyTorch; and of a smallest budget its ratio to that of PyTorch's own kernels, ``of_eager``. A network takes some
minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.common.apart import EndedEarly, apart
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import distance, median_ratio, seconds_in_turn, step_and_back
from benchmarks.kernels import report
from benchmarks.kernels.report import BUDGETS, CHECKPOINTS, COMPILED, HALF, KEEP, OURS, PLAIN, SMALLEST, TIGHT
from benchmarks.networks.batches import Batch, Step, images, language_model, tokens
from benchmarks.networks.convolutional import PAPER, MobileNetV2, resnet18
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.linear import ViT
from benchmarks.networks.llama import Llama
from benchmarks.networks.pixels import UNet
from benchmarks.peers.settings import EAGER, Setting, checkpointed, inductor, ours
from benchmarks.peers.subjects import Network, Subject, networks_at
from checkmate.backends.tensor_state import differing
from checkmate.capture.fusion.kernels import Kernels
from checkmate.core.files import VARIABLE
from checkmate.demo.training import peak_of_step
from checkmate.errors import InfeasibleBudget
from checkmate.memory import CPU

THEIRS: dict[str, Setting] = {
    PLAIN: EAGER,
    COMPILED: inductor(),
    **{f"{COMPILED}, budget {share}": inductor(share) for share in BUDGETS},
    CHECKPOINTS: inductor(build=checkpointed),
}
WORDS, CLASSES, LENGTH = 1000, 10, 256
CONTEXT = multiprocessing.get_context("forkserver")  # what it has imported it gives to all
PATIENCE = 600.0  # seconds without a word from a process
LEAST = 1000  # bytes, in which nothing fits
JOBS = 2  # processes that start at once where nothing is timed


def _llama() -> tuple[nn.Module, Batch]:
    model = Llama(length=LENGTH, layers=4, width=256, inner=704, heads=4, groups=4, words=WORDS)
    (words,) = tokens(4, LENGTH, WORDS)
    return model, (words[:, :-1].contiguous(), words[:, 1:].contiguous())


def _gpt2() -> tuple[nn.Module, Batch]:
    model = GPT2(WORDS, LENGTH, width=256, layers=4, heads=4, attention="sdpa")
    return model.eval(), tokens(4, LENGTH, WORDS)  # Inductor would have to draw as PyTorch does


def _bert() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes))
    return model.eval(), (torch.randint(WORDS, (8, LENGTH // 2)), torch.randint(CLASSES, (8,)))


def _own_loss(module: nn.Module) -> Step:
    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = module(*batch)
        return loss

    return step


def _in_bfloat16(module: nn.Module) -> Step:
    def step(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = module(*batch)
        return loss

    return step


def _of_logits(module: nn.Module) -> Step:
    def step(words: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(module(words).logits, target)

    return step


_ALL = (
    Network("llama", _llama, lambda module: [*module.blocks], loss=_own_loss),
    Network("llama-bf16", _llama, lambda module: [*module.blocks], loss=_in_bfloat16),
    Network("gpt2", _gpt2, lambda module: [*module.transformer.transformer.h], loss=language_model),
    Network("bert", _bert, lambda module: [*module.bert.encoder.layer], loss=_of_logits),
    Network(
        "vit",
        lambda: (ViT(64, 8, width=192, layers=4, heads=3, classes=CLASSES), images(16, 64, CLASSES)),
        lambda module: [*module.blocks],
    ),
    Network(
        "resnet18",
        lambda: (resnet18(CLASSES, base=16), images(32, 64, CLASSES)),
        lambda module: [*module.stages],
    ),
    Network(
        "mobilenet",
        lambda: (MobileNetV2(CLASSES, width=0.5, table=PAPER[:3]), images(16, 64, CLASSES)),
        lambda module: [*module.features],
    ),
    Network(
        "unet",
        lambda: (UNet(CLASSES, depth=3, base=16), images(4, 64, CLASSES, pixels=True)),
        lambda module: [*module.down, *module.up],
    ),
)
NETWORKS = {network.name: network for network in _ALL}


def _left_by(step: Step, subject: Subject) -> list[Tensor]:
    """The loss and the gradients of a step."""
    torch.manual_seed(1)
    loss = step(*subject.batch)
    loss.backward()
    return [loss.detach().clone(), *(p.grad for p in subject.module.parameters() if p.grad is not None)]


def train(
    where: str, name: str, way: str, budget: int | None, time_limit: float, folder: Path, turn: Any
) -> Iterator[Row | None]:
    """Take the first step in this process, give its row, and take one more at each turn; None after each.

    Args:
        where: a dict of networks by name, as another process finds it: ``module:name``.
        name: of the network.
        way: of `THEIRS`, or a value of ``kernels`` for ours.
        budget: bytes, for ours.
        time_limit: seconds to plan.
        folder: of the plain numbers, written by the plain way; what ways keep on disk is in folders there.
        turn: a semaphore to wait for before each step; None for no more than the first.
    """
    torch.set_num_threads(1)
    kept = str(folder / way.partition(",")[0])
    os.environ |= {VARIABLE: kept, "TORCHINDUCTOR_CACHE_DIR": kept}
    subject = Subject.of(networks_at(where)[name], CPU)
    resident = sum(t.nbytes for t in {*subject.module.parameters(), *subject.module.buffers(), *subject.batch})
    setting = THEIRS[way] if way in THEIRS else ours(cast(int, budget), time_limit, kernels=cast(Kernels, way))
    with setting.config():
        step = setting.build(subject)
        began = time.perf_counter()
        try:
            left = _left_by(step, subject)
        except InfeasibleBudget as refusal:
            yield {"refused": str(refusal), "smallest": refusal.min_budget}
            return
        row: Row = {"first_step_seconds": time.perf_counter() - began}
        if way == PLAIN:
            torch.save(left, folder / "plain.pt")
        expected = torch.load(folder / "plain.pt")
        row |= {"same_bits": not differing(left, expected), "difference": distance(left, expected)}
        del left, expected
        row["peak"] = resident + peak_of_step(subject.module, step, subject.batch)
        if plans := getattr(step, "plans", None):
            row |= {"planned": plans[0].peak, "recomputed": plans[0].overhead, "ops": len(plans[0].problem.graph.ops)}
        yield row
        while turn is not None and turn.acquire():
            step_and_back(subject.module, step, subject.batch)
            yield None


class _Process:
    """A process in which a network trains in one way: a step at each call."""

    def __init__(self, *asked: Any, stays: bool = True) -> None:
        self._turn = CONTEXT.Semaphore(0) if stays else None
        self._told = apart(partial(train, *(*asked, self._turn)), patience=PATIENCE, method="forkserver")
        try:
            self.first: Row = cast(Row, next(self._told))
        except EndedEarly as end:
            self.first = {"error": str(end)[:300]}

    def __call__(self) -> None:
        assert self._turn is not None
        self._turn.release()
        next(self._told)

    def close(self) -> None:
        self._told.close()


class _Ways:
    """The ways to train a network: what is known of each, and those that train."""

    def __init__(self, begin: Callable[..., _Process]) -> None:
        self._begin = begin
        self.rows, self.steps = dict[str, Row](), dict[str, _Process]()

    def start(self, way: str, of: str, budget: int | None = None) -> Row:
        """Have a process take the first step, and keep it for more if that worked."""
        process = self._begin(of, budget)
        print(f"{way}: {process.first}"[:300], file=sys.stderr, flush=True)
        self.rows[way] = {"budget": budget, **process.first}
        if "peak" in process.first:
            self.steps[way] = process
        else:
            process.close()
        return self.rows[way]

    def start_twice(self, way: str, of: str, budget: int | None = None) -> Row:
        """Start it on an empty folder and on a full one: the seconds of both."""
        with closing(self._begin(of, budget, stays=False)) as process:
            cold = process.first.get("first_step_seconds")
        row = self.start(way, of, budget)
        row |= {"cold": cold, "warm": row.get("first_step_seconds")}
        return row

    def start_within(self, kernels: Kernels, what: str, budget: int) -> None:
        """Start one of ours; where its budget has room for everything, its row is that of the one that keeps all."""
        kept = self.rows[f"{kernels}, {KEEP}"]
        if kept.get("planned", budget) < budget:
            self.rows[f"{kernels}, {what}"] = {"budget": budget, "timed_with": f"{kernels}, {KEEP}"}
        else:
            self.start(f"{kernels}, {what}", kernels, budget)

    def start_smallest(self, kernels: Kernels) -> None:
        """Have a budget that nothing fits refused, and start at the smallest that the refusal names."""
        with closing(self._begin(kernels, LEAST, stays=False)) as process:
            self.start(f"{kernels}, {SMALLEST}", kernels, process.first["smallest"])


def rows_of(name: str, rounds: int, time_limit: float, where: str = f"{__name__}:NETWORKS") -> Iterator[Row]:
    """Give a row for each way to train a network."""
    CONTEXT.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, ThreadPoolExecutor(JOBS) as pool:

        def begin(of: str, budget: int | None, *, stays: bool = True) -> _Process:
            process = _Process(where, name, of, budget, time_limit, Path(folder), stays=stays)
            stack.callback(process.close)
            return process

        ways = _Ways(begin)
        # With nothing beside: those whose first steps are timed.
        whole = ways.start(PLAIN, PLAIN)["peak"]
        ways.start_twice(COMPILED, COMPILED)
        for kernels in OURS:
            ways.start_twice(f"{kernels}, {KEEP}", kernels, 2 * whole)
        # Two at once: others of torch.compile, and ours within their peaks.
        _each(pool, ways.start, [(way, way) for way in THEIRS if way not in ways.rows])
        peaks = {way: ways.rows[way]["peak"] for way in (COMPILED, TIGHT) if "peak" in ways.rows[way]}
        within = [(k, what, budget) for what, budget in {HALF: whole // 2, **peaks}.items() for k in OURS]
        _each(pool, ways.start_within, within)
        _each(pool, ways.start_smallest, [(kernels,) for kernels in OURS])
        seconds = seconds_in_turn(ways.steps, rounds)
    for way, row in ways.rows.items():
        timed = row.get("timed_with", way)
        found = {**ways.rows[timed], **row}
        if SMALLEST in way:
            found["of_eager"] = row["budget"] / ways.rows[f"{OURS[0]}, {SMALLEST}"]["budget"]
        if timed in seconds:
            found["seconds"] = statistics.median(seconds[timed])
            found["ratio"] = median_ratio(seconds[timed], seconds[PLAIN])
        yield {"model": name, "way": way, "threads": 1, "rounds": rounds, "time_limit": time_limit, **found}


def _each(pool: ThreadPoolExecutor, start: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> None:
    for done in [pool.submit(start, *case) for case in cases]:
        done.result()


BENCHMARK = Benchmark(
    __doc__,
    "kernels.jsonl",
    rows_of,
    {
        "network": "{model}",
        "way": "{way}",
        "peak": "{peak:bytes}",
        "of plain": "{ratio:.2f}",
        "cold": "{cold:seconds}",
        "warm": "{warm:seconds}",
        "numbers": report.numbers,
    },
    names=NETWORKS,
    options={"rounds": (7, "of timed steps"), "time_limit": (5.0, "seconds for each plan")},
    page=report.markdown,
    report=report.draw,
)
