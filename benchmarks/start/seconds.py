"""Seconds until a script trains: started for the first time, a second time, and with a smaller batch after a larger.

    python -m benchmarks.start [NETWORK ...] [--threads 1] [--share 0.25] [--time-limit 60] [--peers] [--first]
    python -m benchmarks.start [NETWORK ...] --times 1.02 1.1 1.2 1.5 2

Each start is a process of its own; a cold and a warm one share a cache folder that is empty before. A row is one batch
of a start, the whole one or, after it, the smaller: how long the imports took; the first step in all, and where its
seconds went, to Dynamo, AOTAutograd, measuring, planning and code; a second step; and what the plan is like. The start
"alone" has the smaller batch only, from nothing. With ``--peers`` other backends of `torch.compile` start, too.

``--first`` is about the first step with the whole batch only, beside plain PyTorch and ``aot_eager``. Its seconds are
those that the process computes, which other programs change less than those of the clock. docs/figures.md has
resnet50-wide, gpt2-12, unet-attention and bert-4.

With ``--times`` the budget is so many times the smallest, and a row is the first step of one start, in seconds of the
process's own: planning includes the splits that are captured, tried and measured for it.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.rows import Row, shown
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import budget_at
from benchmarks.networks import CASES, CLASSES, Case
from benchmarks.networks.batches import Batch, Step, images, language_model, tokens
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.unet import AttentionUNet
from benchmarks.start.script import started
from checkmate.backends import compilation, step_problem
from checkmate.backends.planner import Planner
from checkmate.core.files import VARIABLE

OURS, PLAIN = "checkmate", "plain PyTorch"
SMALLER = 0.8  # of the batch
PARTS = ("import", "step", "dynamo", "aot", "measure", "plan", "code", "second_step")
HEADER = (
    "network", "step by", "start", "batch", "import", "first step", "Dynamo", "AOTAutograd", "measuring", "planning",
    "code", "second step", "gap",
)  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=4)).train()


def _noise() -> Batch:
    return torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)


def _sentences() -> Batch:
    return torch.randint(30522, (8, 128)), torch.randint(2, (8,))


def _gpt2() -> nn.Module:
    return GPT2(vocabulary=1024, positions=128, width=192, layers=12, heads=6, attention="sdpa")


_MORE = (
    Case("resnet50-wide", lambda: resnet50(CLASSES), lambda: images(8, 96, CLASSES)),
    Case("gpt2-12", _gpt2, lambda: tokens(4, 128, 1024), language_model),
    Case("unet-attention", AttentionUNet, _noise, lambda unet: lambda x, noise: F.mse_loss(unet(x), noise)),
    Case("bert-4", _bert, _sentences, lambda bert: lambda x, target: F.cross_entropy(bert(x).logits, target)),
)
KNOWN = {**CASES, **{case.name: case for case in _MORE}}


def steps(backend: str, name: str, sizes: list[float], budget: int, time_limit: float) -> Iterator[Row]:
    """Train two steps with each of these parts of the batch; what they took. In a process that has just begun."""
    _, plain, batch = KNOWN[name].make(0)
    spent: Counter[str] = Counter()
    step: Any = plain
    if backend == OURS:
        _adds_up(compilation.Backend, "__call__", "backend", spent)
        _adds_up(compilation, "problem_of", "measure", spent)
        _adds_up(Planner, "_plan", "plan", spent)
        _adds_up(step_problem, "emit", "code", spent)
        _adds_up(compilation, "writing_over", "code", spent)
        step = checkmate.compile(plain, budget=budget, time_limit=time_limit)
    elif backend != PLAIN:
        step = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)
    for size in sizes:
        some = tuple(tensor[: int(size * len(tensor))] for tensor in batch)
        spent.clear()
        try:
            first, second = _seconds(step, some), _seconds(step, some)
        except checkmate.InfeasibleBudget as refusal:  # bytes that a trial decides differ from start to start
            yield {"batch": len(some[0]), "refused": str(refusal)}
            return
        row: Row = {"batch": len(some[0]), "step_seconds": first, "second_step_seconds": second}
        if backend == OURS:
            solution = step.plans[-1]
            row |= {f"{part}_seconds": spent[part] for part in ("measure", "plan", "code")}
            row["dynamo_seconds"] = first - second - spent["backend"]
            row["aot_seconds"] = spent["backend"] - spent["measure"] - spent["plan"] - spent["code"]
            row |= {"ops": len(solution.problem.graph.ops), "overhead": solution.overhead, "gap": solution.gap}
            row |= {"peak": solution.peak, "from": solution.origin or None}
        yield row


def _adds_up(owner: Any, name: str, part: str, spent: Counter[str]) -> None:
    run: Callable[..., Any] = getattr(owner, name)

    @wraps(run)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - began  # type: ignore[assignment]

    setattr(owner, name, timed)


def _seconds(step: Step, batch: Batch) -> float:
    began = time.perf_counter()
    step(*batch).backward()
    return time.perf_counter() - began


@cache
def ends_of(name: str) -> tuple[int, int]:
    """Bytes of the smallest budget of a network, and of keeping everything."""
    _, step, batch = KNOWN[name].make(0)
    problem = checkmate.trace(step, *batch)
    return checkmate.min_budget(problem).peak, problem.keep_all_peak


def rows(
    name: str, threads: int, share: float, times: float, time_limit: float, peers: bool, first: bool
) -> Iterator[Row]:
    """All starts of one network; with ``times`` the first step of one."""
    torch.set_num_threads(threads)
    least, most = ends_of(name)
    budget = int(times * least) if times else budget_at(share, least, most)
    at: Row = {"times": times, "smallest": least} if times else {"share": share}
    about: Row = {"model": name, **at, "budget": budget, "time_limit": time_limit}
    about |= {"threads": threads, "own_seconds": first or bool(times)}
    if times:
        asked = {"backend": OURS, "name": name, "budget": budget, "time_limit": time_limit}
        work = partial(started, ["torch", OURS], True, threads, sizes=[1.0], **asked)
        with tempfile.TemporaryDirectory() as folder:
            for row in apart(work, environment={VARIABLE: folder}):
                yield {**about, "by": OURS, "start": "cold", **row}
        return
    others = (PLAIN, "aot_eager") if first else ("inductor", "aot_eager") if peers else ()
    whole, both = [1.0], [1.0] if first else [1.0, SMALLER]
    starts = [(OURS, {"cold": both, "warm": both}), *((other, {"cold": whole, "warm": whole}) for other in others)]
    for backend, sizes_of in starts if first else [*starts, (OURS, {"alone": [SMALLER]})]:
        packages = ["torch", OURS] if backend == OURS else ["torch"]
        asked = {"backend": backend, "name": name, "budget": about["budget"], "time_limit": time_limit}
        with tempfile.TemporaryDirectory() as folder:
            for start, sizes in sizes_of.items():
                work = partial(started, packages, first, threads, sizes=sizes, **asked)
                for row in apart(work, environment={VARIABLE: folder, "TORCHINDUCTOR_CACHE_DIR": folder}):
                    yield {**about, "by": backend, "start": start, **row}


def _cells(row: Row) -> list[str]:
    seconds = [shown(row.get(f"{part}_seconds"), ".2f", " s", missing="") for part in PARTS]
    return [
        row["model"],
        row["by"],
        f"{row['times']} x smallest" if row.get("times") else row["start"],
        str(row["batch"]),
        *seconds,
        shown(row.get("gap"), ".2%", missing=""),
    ]


BENCHMARK = Benchmark(
    __doc__,
    "start.jsonl",
    rows,
    HEADER,
    _cells,
    names=KNOWN,
    default=("resnet18", "gpt2-sdpa", "resnet50", "gpt2-4"),
    options={
        "threads": ((1,), "of PyTorch"),
        "times": ((0.0,), "the smallest budget, in place of a share: first steps only"),
        "share": (0.25, "of the way from the smallest budget to keeping everything"),
        "time_limit": (60.0, "seconds to plan; that of checkmate.compile"),
        "peers": (False, "other backends of torch.compile, too"),
        "first": (False, "first steps only, in seconds of the process's own"),
    },
)
