"""Seconds until a script trains: started for the first time, a second time, and with a smaller batch after a larger.

    python -m benchmarks.start [NETWORK ...] [--threads 1] [--share 0.25] [--time-limit 60] [--peers]
                               [--first] [--out benchmarks/results/start.jsonl]

Each start is a process of its own; both share a cache folder that is empty before the first. A row says how long the
imports took; for the whole batch, and for the smaller one after it, how long the first step took in all, measuring and
planning within it, and a second step, and what the plans are like; and how long planning takes for the smaller batch
from nothing. With ``--peers`` it says the same of the first step with other backends of `torch.compile`.

``--first`` is about the first step with the whole batch only, beside plain PyTorch and ``aot_eager``: how long it takes
from `compile` on, cold and from the cache, and where the seconds go. Its seconds are those that the process computes,
which other programs change less than those of the clock.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.common.rows import Row, add_names, append, documented, origin
from benchmarks.common.timing import budget_at
from benchmarks.networks import CASES, CLASSES, Case, Step, language_model
from benchmarks.networks.gpt2 import GPT2
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.unet import AttentionUNet
from checkmate.backends import eager, step_problem
from checkmate.backends.planner import Planner
from checkmate.core.files import VARIABLE
from checkmate.core.table import Table

RESULTS = Path(__file__).parent / "results" / "start.jsonl"
NETWORKS = ("resnet18", "gpt2-sdpa", "resnet50", "gpt2-4")
FIRST = ("resnet50-wide", "gpt2-12", "unet-attention", "bert-4")  # with ``--first``
PEERS = ("inductor", "aot_eager")
PLAIN = "plain PyTorch"
SMALLER = 0.8  # of the batch
HEADER = (
    "network", "threads", "ops", "batch", "first step", "again", "measured", "planned", "again", "from nothing",
    "second step", "gap", "again",
)  # fmt: skip
FIRST_HEADER = (
    "network", "step by", "start", "import", "first step", "Dynamo", "AOTAutograd", "measuring", "planning", "code",
    "second step",
)  # fmt: skip
IN_A_PROCESS = """
import sys, time
clock = time.process_time if sys.argv[-1] == "first" else time.perf_counter
began = clock()
import torch
if sys.argv[1] == "checkmate":
    import checkmate
imported = clock() - began
time.perf_counter = clock
from benchmarks import start
start.once(imported, *sys.argv[1:])
"""


def _resnet50(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module = resnet50(CLASSES)

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(module(x), target)

    return module, step, (torch.randn(8, 3, 96, 96), torch.randint(CLASSES, (8,)))


def _gpt2(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module = GPT2(vocabulary=1024, positions=128, width=192, layers=12, heads=6, attention="sdpa")
    return module, language_model(module), (torch.randint(1024, (4, 129)),)


def _unet(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    module = AttentionUNet()

    def step(noisy: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(module(noisy), noise)

    return module, step, (torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64))


def _bert(seed: int) -> tuple[nn.Module, Step, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    module = BertForSequenceClassification(BertConfig(num_hidden_layers=4)).train()

    def step(tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(module(tokens).logits, target)

    return module, step, (torch.randint(30522, (8, 128)), torch.randint(2, (8,)))


_MORE = {"resnet50-wide": _resnet50, "gpt2-12": _gpt2, "unet-attention": _unet, "bert-4": _bert}
KNOWN = {**CASES, **{name: Case(name, make) for name, make in _MORE.items()}}


class _Measured(logging.Handler):
    """Adds up the seconds that the library says it measured ops for."""

    seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Measured") and isinstance(record.args, tuple):
            self.seconds += float(str(record.args[1]))


def starts(name: str, budget: int, time_limit: float, *, whole: bool = True) -> list[Row]:
    """Train a step with the whole batch and one with the smaller one; what each took. In a process that just began."""
    _, step, batch = KNOWN[name].make(0)
    batches = [batch] * whole + [tuple(tensor[: int(SMALLER * len(tensor))] for tensor in batch)]
    measured = _Measured()
    logging.getLogger("checkmate.profiling").addHandler(measured)
    logging.getLogger("checkmate.profiling").setLevel(logging.INFO)
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit)
    rows = []
    for some in batches:
        measured.seconds = 0.0
        first, second = _seconds(compiled, some), _seconds(compiled, some)
        solution = compiled.plans[-1]
        rows.append(
            {
                "batch": len(some[0]),
                "ops": len(solution.problem.graph.ops),
                "step_seconds": first,
                "measure_seconds": measured.seconds,
                "plan_seconds": solution.seconds,
                "second_step_seconds": second,
                "overhead": solution.overhead,
                "gap": solution.gap,
                "peak": solution.peak,
                "from": solution.origin or None,
            }
        )
    return rows


def first_step(name: str, budget: int, time_limit: float) -> Row:
    """Train a step with the whole batch; where the seconds of the first one went. In a process that just began."""
    _, step, batch = KNOWN[name].make(0)
    spent: Counter[str] = Counter()
    _adds_up(eager.Backend, "__call__", "backend", spent)
    _adds_up(eager, "problem_of", "measure", spent)
    _adds_up(Planner, "_plan", "plan", spent)
    _adds_up(step_problem, "emit", "code", spent)
    _adds_up(eager, "writing_over", "code", spent)
    compiled = checkmate.compile(step, budget=budget, time_limit=time_limit)
    first, second = _seconds(compiled, batch), _seconds(compiled, batch)
    solution = compiled.plans[-1]
    return {
        "batch": len(batch[0]),
        "ops": len(solution.problem.graph.ops),
        "step_seconds": first,
        "dynamo_seconds": first - second - spent["backend"],
        "aot_seconds": spent["backend"] - spent["measure"] - spent["plan"] - spent["code"],
        **{f"{part}_seconds": spent[part] for part in ("measure", "plan", "code")},
        "second_step_seconds": second,
        "from": solution.origin or None,
    }


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


def peer(name: str, backend: str) -> list[Row]:
    """Train a step with another backend; what it took. In a process that just began."""
    _, step, batch = KNOWN[name].make(0)
    compiled = step if backend == PLAIN else torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    first, second = _seconds(compiled, batch), _seconds(compiled, batch)
    return [{"batch": len(batch[0]), "step_seconds": first, "second_step_seconds": second}]


def _seconds(step: Step, batch: tuple[Tensor, ...]) -> float:
    began = time.perf_counter()
    step(*batch).backward()
    return time.perf_counter() - began


def once(imported: float, backend: str, threads: str, name: str, *options: str) -> None:
    """Print what one start took, as JSON; ``imported``: seconds of the imports."""
    torch.set_num_threads(int(threads))
    if backend == "checkmate":
        budget, time_limit, *alone = options
        if alone == ["first"]:
            rows = [first_step(name, int(budget), float(time_limit))]
        else:
            rows = starts(name, int(budget), float(time_limit), whole=not alone)
    else:
        rows = peer(name, backend)
    print(json.dumps([{**row, "import_seconds": imported, "threads": torch.get_num_threads()} for row in rows]))


def budget_of(name: str, share: float) -> int:
    """The budget at a share of the way from the smallest to keeping everything."""
    _, step, batch = KNOWN[name].make(0)
    problem = checkmate.trace(step, *batch)
    return budget_at(share, checkmate.min_budget(problem).peak, problem.keep_all_peak)


def _in_a_process(folder: str, *arguments: object) -> list[Row]:
    """What `once` prints, in a process whose caches are in this folder."""
    command = [sys.executable, "-c", IN_A_PROCESS, *map(str, arguments)]
    environment = {**os.environ, VARIABLE: folder, "TORCHINDUCTOR_CACHE_DIR": folder}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: list[Row] = json.loads(run.stdout.splitlines()[-1])
    return found


def _cold_and_warm(*arguments: object) -> dict[str, list[Row]]:
    with tempfile.TemporaryDirectory() as folder:
        return {start: _in_a_process(folder, *arguments) for start in ("cold", "warm")}


def row(name: str, threads: int, share: float, time_limit: float, peers: bool) -> Row:
    """All starts of one network."""
    torch.set_num_threads(threads)
    budget = budget_of(name, share)
    ours = ("checkmate", threads, name, budget, time_limit)
    found: Row = _cold_and_warm(*ours)
    with tempfile.TemporaryDirectory() as folder:
        found["smaller_from_nothing"] = _in_a_process(folder, *ours, "alone")[0]
    if peers:
        found["peers"] = {backend: _cold_and_warm(backend, threads, name) for backend in PEERS}
    return {"model": name, "share": share, "budget": budget, "time_limit": time_limit, "threads": threads, **found}


def first_row(name: str, threads: int, share: float, time_limit: float) -> Row:
    """The first steps of one network by all: seconds that their processes computed."""
    torch.set_num_threads(threads)
    budget = budget_of(name, share)
    found: Row = {"checkmate": _cold_and_warm("checkmate", threads, name, budget, time_limit, "first")}
    for backend in (PLAIN, "aot_eager"):
        found[backend] = _cold_and_warm(backend, threads, name, "first")
    known = {"model": name, "share": share, "budget": budget, "time_limit": time_limit, "threads": threads}
    return {**known, "seconds": "own", "first": found}


def _first_cells(row: Row) -> list[list[str]]:
    parts = ("import", "step", "dynamo", "aot", "measure", "plan", "code", "second_step")
    return [
        [row["model"], backend, start, *(f"{run[f'{p}_seconds']:.1f}" if f"{p}_seconds" in run else "" for p in parts)]
        for backend, both in row["first"].items()
        for start, (run,) in both.items()
        if (backend, start) != (PLAIN, "warm")
    ]


def _cells(row: Row) -> list[list[str]]:
    lines = []
    for first, second, nothing in zip(row["cold"], row["warm"], [None, row["smaller_from_nothing"]], strict=True):
        seconds = [first["step_seconds"], second["step_seconds"], first["measure_seconds"]]
        seconds += [first["plan_seconds"], second["plan_seconds"], nothing and nothing["plan_seconds"]]
        seconds += [first["second_step_seconds"]]
        shown = ["" if s is None else f"{s:.2f} s" for s in seconds]
        gaps = [f"{start['gap']:.2%}" for start in (first, second)]
        lines.append([row["model"], str(row["threads"]), str(first["ops"]), str(first["batch"]), *shown, *gaps])
    for backend, both in row.get("peers", {}).items():
        (first,), (second,) = both["cold"], both["warm"]
        shown = [f"{start['step_seconds']:.2f} s" for start in (first, second)]
        later = f"{first['second_step_seconds']:.2f} s"
        lines.append([backend, str(row["threads"]), "", str(first["batch"]), *shown, *[""] * 4, later, "", ""])
    return lines


def main() -> None:
    """Measure what was asked for, append the rows to the file, and print them as a table."""
    parser = documented(__doc__)
    add_names(parser, KNOWN, NETWORKS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, default=0.25, help="of the way from the smallest budget to keeping all")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds to plan; that of checkmate.compile")
    parser.add_argument("--peers", action="store_true", help=f"time the starts with {' and '.join(PEERS)}, too")
    parser.add_argument("--first", action="store_true", help=f"first steps only, by default of {', '.join(FIRST)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about, measured = origin(), []
    names = FIRST if args.first and args.names == [*NETWORKS] else args.names
    header = FIRST_HEADER if args.first else HEADER
    for threads in args.threads:
        for name in names:
            if args.first:
                found = first_row(name, threads, args.share, args.time_limit)
                measured += _first_cells(found)
            else:
                found = row(name, threads, args.share, args.time_limit, args.peers)
                measured += _cells(found)
            append(args.out, {**about, **found})
    print(Table(header, measured, header[3 if args.first else 1 :]))


if __name__ == "__main__":
    main()
