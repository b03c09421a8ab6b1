"""Seconds until a script trains: the first step of a script that is started for the first time, and a second time.

    python -m benchmarks.start [NETWORK ...] [--share 0.25] [--time-limit 60]
    python -m benchmarks.start [NETWORK ...] --times 1.02 1.1 1.2 1.5 2
    python -m benchmarks.start lstm-400 --share 1

Each start is a process of its own; a cold and a warm one share a cache folder that is empty before. A row is a start of
plain PyTorch, of ``aot_eager`` or of ours: how long the imports took; the first step in all, and where its seconds
went, to Dynamo, AOTAutograd, measuring, planning and code; a second step; and what the plan is like. Where ``times`` is
not 0 the budget is so many times the smallest, and there is one row, the first step of one start: planning includes the
splits that are captured, tried and measured for it. The loop of 400 tokens is for the seconds of its capture, with
room for everything. All seconds are those that the process computes, which other
programs change less than those of the clock. Older rows have a smaller batch after the larger, and seconds of the
clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import checkmate
from benchmarks.common.apart import apart
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import add_up, budget_at
from benchmarks.networks import CASES, CLASSES, Case
from benchmarks.networks.batches import images, language_model, tokens
from benchmarks.networks.convolutional import resnet50
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.pixels import AttentionUNet
from benchmarks.networks.recurrent import HandWrittenLSTM
from benchmarks.start.script import started
from checkmate.backends import compilation, step_problem
from checkmate.backends.planner import Planner
from checkmate.core.files import VARIABLE
from checkmate.errors import InfeasibleBudget

LOOP = "lstm-400"  # a loop in Python over as many tokens
OURS, PLAIN, PEER = "checkmate", "plain PyTorch", "aot_eager"
PARTS = {  # whose seconds a row has, by their heads
    "import": "import",
    "first step": "step",
    "Dynamo": "dynamo",
    "AOTAutograd": "aot",
    "measuring": "measure",
    "planning": "plan",
    "code": "code",
    "second step": "second_step",
}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=4)).train()


def _gpt2() -> nn.Module:
    return GPT2(vocabulary=1024, positions=128, width=192, layers=12, heads=6, attention="sdpa")


_MORE = (
    Case("resnet50-wide", lambda: resnet50(CLASSES), lambda: images(8, 96, CLASSES)),
    Case("gpt2-12", _gpt2, lambda: tokens(4, 128, 1024), language_model),
    Case(
        "unet-attention",
        AttentionUNet,
        lambda: (torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)),
        lambda unet: lambda x, noise: F.mse_loss(unet(x), noise),
    ),
    Case(
        "bert-4",
        _bert,
        lambda: (torch.randint(30522, (8, 128)), torch.randint(2, (8,))),
        lambda bert: lambda x, target: F.cross_entropy(bert(x).logits, target),
    ),
    Case(LOOP, lambda: HandWrittenLSTM(64, 32), lambda: tokens(2, 400, 64), language_model),
)
KNOWN = {**CASES, **{case.name: case for case in _MORE}}
NEAR = (1.02, 1.1, 1.2, 1.5, 2.0)  # times the smallest budget
CLOSE = ("resnet18", "mobilenet", "gpt2-sdpa", "vit", "gpt2-4", "unet", "resnet50")  # are started at each of these
TIMES = {**dict.fromkeys(KNOWN, (0.0,)), **dict.fromkeys(CLOSE, NEAR), "bert-4": (0.0, *NEAR)}


def steps(backend: str, name: str, budget: int, time_limit: float) -> Iterator[Row]:
    """Train two steps; what they took. In a process that has just begun."""

    def seconds() -> float:
        began = time.perf_counter()
        step(*batch).backward()
        return time.perf_counter() - began

    _, plain, batch = KNOWN[name].make(0)
    spent = dict.fromkeys(("backend", "measure", "plan", "code"), 0.0)
    step: Any = plain
    if backend == OURS:
        add_up(compilation.Backend, "compile", spent, "backend").start()
        add_up(step_problem, "problem_of", spent, "measure").start()
        add_up(Planner, "plan", spent, "plan").start()
        add_up(step_problem, "emit", spent, "code").start()
        add_up(compilation, "writing_over", spent, "code").start()
        step = checkmate.compile(plain, budget=budget, time_limit=time_limit)
    elif backend != PLAIN:
        step = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)
    try:
        first, second = seconds(), seconds()
    except InfeasibleBudget as refusal:  # bytes that a trial decides differ from start to start
        yield {"batch": len(batch[0]), "refused": str(refusal)}
        return
    row: Row = {"batch": len(batch[0]), "step_seconds": first, "second_step_seconds": second}
    if backend == OURS:
        solution = step.plans[-1]
        row |= {f"{part}_seconds": spent[part] for part in ("measure", "plan", "code")}
        row["dynamo_seconds"] = first - second - spent["backend"]
        row["aot_seconds"] = spent["backend"] - spent["measure"] - spent["plan"] - spent["code"]
        row |= {"ops": len(solution.problem.graph.ops), "overhead": solution.overhead, "gap": solution.gap}
        row |= {"peak": solution.peak, "from": solution.origin or None}
    yield row


def rows(name: str, times: float, share: float, time_limit: float) -> Iterator[Row]:
    """All starts of one network; with ``times`` one."""
    torch.set_num_threads(1)
    _, step, batch = KNOWN[name].make(0)
    problem = checkmate.trace(step, *batch)
    most = problem.keep_all_peak
    least = most if share == 1 and not times else checkmate.min_budget(problem).peak
    budget = int(times * least) if times else budget_at(share, least, most)
    at: Row = {"times": times, "smallest": least} if times else {"share": share}
    about = {"model": name, **at, "budget": budget, "time_limit": time_limit, "threads": 1, "own_seconds": True}
    for backend in (OURS,) if times else (OURS, PLAIN, PEER):
        packages = ["torch", OURS] if backend == OURS else ["torch"]
        asked = {"backend": backend, "name": name, "budget": budget, "time_limit": time_limit}
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold",) if times else ("cold", "warm"):
                work = partial(started, packages, **asked)
                for row in apart(work, environment={VARIABLE: folder, "TORCHINDUCTOR_CACHE_DIR": folder}):
                    yield {**about, "by": backend, "start": start, **row}


BENCHMARK = Benchmark(
    __doc__,
    "start.jsonl",
    rows,
    {
        "network": "{model}",
        "step by": "{by}",
        "start": lambda row: f"{row['times']} x smallest" if row.get("times") else row["start"],
        "batch": "{batch}",
        **{head: f"{{{part}_seconds:.2f}} s" for head, part in PARTS.items()},
        "gap": "{gap:.2%}",
    },
    names=KNOWN,
    default=(*(case.name for case in _MORE), *CLOSE),
    options={
        "times": (TIMES, "the smallest budget; 0 for a share"),
        "share": (0.25, "of the way from the smallest budget to keeping everything"),
        "time_limit": (60.0, "seconds to plan; that of checkmate.compile"),
    },
)
