"""Activations merged by hand, beside plans for the plain ones: swish, and batch normalization with a leaky ReLU.

    python -m benchmarks.merged [swish ...] [--setting h100 cpu] [--time-limit SECONDS]
    python -m benchmarks.merged --report     # from the rows: the tables of docs/merged.md

A ResNet-50 with its activations written plainly, and as a `torch.autograd.Function` by hand that keeps less
(`benchmarks.common.merged_forms`). Ours runs the plain one: within the bytes of each other form, and within the seconds
of each that takes no fewer than the plain one. For an H100, at batch 32 of 224 x 224, nothing runs: bytes and seconds
of all forms are those of their captured steps, each op once, seconds estimated. On the CPU a narrower one is trained,
at batch 16 of 64 x 64: peaks are those of PyTorch's allocator, and steps of all forms take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.merged_forms import FORMS, Form, ResNet50
from benchmarks.common.rows import Row, latest, plan_facts, read, renewed, shown
from benchmarks.common.runner import Benchmark
from benchmarks.common.timing import distance, median_ratio, nothing_on_disk, seconds_in_turn, step_and_back
from benchmarks.networks.batches import Batch, Step, classifier, images
from checkmate.backends.tensor_state import differing
from checkmate.core.answer import Table
from checkmate.demo.training import train
from checkmate.memory import measure_peak
from checkmate.units import format_bytes, format_seconds

PAGE = Path(__file__).parents[1] / "docs" / "merged.md"
OURS = "checkmate"
HALVINGS = 7  # of the bytes between the smallest budget and those of keeping everything
ROUNDING = 1e-9  # of seconds
TITLES = {"h100": "on an H100, estimated", "cpu": "on a CPU, measured"}
PRINTED = ("setting", "activation", "peak", "step", "bitwise")
HEADER = ("peak", "of plain", "step", "of plain", "run again")


Number = TypeVar("Number", int, float)
Turn = tuple[nn.Module, Step, Batch]


@dataclass(frozen=True)
class Size:
    """Of a network and its batch."""

    batch: int
    side: int  # of an image
    base: int  # channels of the first stage
    classes: int


SIZES = {"h100": Size(32, 224, 64, 1000), "cpu": Size(16, 64, 32, 10)}


def made(form: Form, size: Size, device: str) -> Turn:
    """The network, its step and a batch."""
    torch.manual_seed(0)
    with torch.device(device):
        module = ResNet50(form, size.base, size.classes)
        return module, classifier(module), images(size.batch, size.side, size.classes)


def estimated(activation: str, time_limit: float, size: Size = SIZES["h100"]) -> Iterator[Row]:
    """A row for each form, and for each plan of ours, from captured steps."""
    problems: dict[str, checkmate.Problem] = {}
    as_run: dict[str, checkmate.Problem] = {}  # by PyTorch, which writes over nothing
    for name, form in FORMS[activation].items():
        _, step, batch = made(form, size, "meta")
        problem = checkmate.trace(step, *batch, profile="roofline:h100")
        problems[name] = problem
        as_run[name] = replace(problem, profile=replace(problem.profile, ways=()))
        yield {"form": name, "peak": as_run[name].keep_all_peak, "step": as_run[name].keep_all_cost}
    for plain in filter(is_plain, problems):
        problem = problems[plain]
        yield _planned(_ours(plain, "nothing twice"), _within(problem, problem.keep_all_peak, time_limit))
        others = [name for name in as_run if name != plain]
        for what, budget in _different({f"bytes of '{name}'": as_run[name].keep_all_peak for name in others}):
            if budget < problem.keep_all_peak:
                yield _planned(_ours(plain, what), _within(problem, budget, time_limit))
        for what, seconds in _different({f"time of '{name}'": as_run[name].keep_all_cost for name in others}):
            if seconds > (1 + ROUNDING) * problem.keep_all_cost:
                yield _planned(_ours(plain, what), least_bytes(problem, seconds, time_limit))


def _different(named: Mapping[str, Number]) -> Iterator[tuple[str, Number]]:
    """Each number with the first of its names."""
    first: dict[Number, str] = {}
    for name, number in named.items():
        first.setdefault(number, name)
    yield from ((name, number) for number, name in first.items())


def is_plain(form: str) -> bool:
    """Whether a form is one that ours runs."""
    return form.startswith("plain")


def _ours(plain: str, what: str) -> str:
    return f"{OURS}{plain.removeprefix('plain')}, {what}"


def _within(problem: checkmate.Problem, budget: int, time_limit: float) -> checkmate.Solution:
    return checkmate.solve(problem, budget, time_limit=time_limit, progress=False)


def least_bytes(problem: checkmate.Problem, seconds: float, time_limit: float) -> checkmate.Solution:
    """Of the plans that take no more seconds, the one of fewest bytes that halving finds."""
    best = _within(problem, problem.keep_all_peak, time_limit)
    low, high = checkmate.min_budget(problem).peak - 1, problem.keep_all_peak
    for _ in range(HALVINGS):
        budget = (low + high) // 2
        found = checkmate.solve(problem, budget, time_limit=time_limit, start=best, progress=False)
        if found.peak is not None and found.cost <= seconds:
            best, high = found, found.peak
        else:
            low = budget
    return best


def _planned(name: str, solution: checkmate.Solution) -> Row:
    again = None if solution.schedule is None else int(solution.schedule.recomputed.sum())
    over = None if solution.plan is None else solution.plan.runs_over
    cost = None if solution.plan is None else solution.cost
    ran = {"runs_again": again, "runs_over": over, "budget": solution.budget, **plan_facts(solution)}
    return {"form": name, "peak": solution.peak, "step": cost, **ran}


def measured(activation: str, time_limit: float, rounds: int, size: Size = SIZES["cpu"]) -> Iterator[Row]:
    """The same for steps that run on a thread of a CPU; ours within the bytes that each other form was seen to take."""
    torch.set_num_threads(1)
    forms = FORMS[activation]
    turns = [made(form, size, "cpu") for form in forms.values()]
    expected = trained(made(forms["plain"], size, "cpu"))
    plain_steps = [(name, turn) for name, turn in zip(forms, turns, strict=True) if is_plain(name)]
    problems = {name: checkmate.trace(step, *batch) for name, (_, step, batch) in plain_steps}
    resident = next(iter(problems.values())).resident  # parameters and batch, the same for all
    rows = [{"form": name, **_measured(resident, turn, expected)} for name, turn in zip(forms, turns, strict=True)]
    seen = {row["form"]: row["peak"] for row in rows}
    for plain, problem in problems.items():
        least, most = checkmate.min_budget(problem).peak, problem.keep_all_peak
        asked = {"nothing twice": most, **{f"bytes of '{n}'": peak for n, peak in seen.items() if n != plain}}
        for what, budget in _different(asked):
            if not least <= budget <= min(most, seen[plain]):
                continue
            module, step, batch = made(forms[plain], size, "cpu")
            compiled = checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best")
            turns.append((module, compiled, batch))
            with nothing_on_disk():
                found = _measured(resident, turns[-1], expected)
            (solution,) = compiled.plans
            rows.append({**_planned(_ours(plain, what), solution), "predicted": solution.peak, **found})
    for row, seconds in zip(rows, in_turns(turns, rounds), strict=True):
        yield {**row, **seconds, "rounds": rounds}


def trained(turn: Turn) -> list[Tensor]:
    """All there is to compare after one step."""
    module, step, batch = turn
    return train(module, step, [batch], optimizer=torch.optim.SGD(module.parameters(), lr=0.01))


def _measured(resident: int, turn: Turn, expected: Sequence[Tensor]) -> Row:
    """The peak of a step, and whether what another one made is what is expected."""
    made_here = trained(turn)
    use = measure_peak(partial(step_and_back, *turn))
    same, off = not differing(made_here, expected), distance(made_here[:-1], expected[:-1])
    return {"peak": resident + use.peak, "bitwise": same, "distance": off}


def in_turns(turns: Sequence[Turn], rounds: int) -> list[Row]:
    """Median seconds of each step, and of its ratio to the first one's in the same round."""

    def before() -> None:
        for module, _, _ in turns:
            module.zero_grad(set_to_none=True)

    steps = {str(i): partial(step_and_back, *turn) for i, turn in enumerate(turns)}
    taken = [*seconds_in_turn(steps, rounds, before).values()]
    return [{"step": statistics.median(seconds), "ratio": median_ratio(seconds, taken[0])} for seconds in taken]


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """For each setting and activation that has rows its table in Markdown, by its first head."""
    found = {}
    last = latest(rows, "activation", "setting", "form")
    for setting in SIZES:
        for activation in FORMS:
            run = [row for row in last if (row["setting"], row["activation"]) == (setting, activation)]
            newest = max((row["run"] for row in run), default=None)
            run = [row for row in run if row["run"] == newest]
            if run:
                head = f"{activation}, {TITLES[setting]}"
                heads = (head, *HEADER, *(["numbers"] if setting == "cpu" else []))
                found[head] = Table(heads, [_cells(row, run[0])[: len(heads)] for row in run], HEADER).markdown()
    return found


def _cells(row: Row, plain: Row) -> list[str]:
    peak, step = row["peak"], row["step"]
    ratio = None if step is None else row.get("ratio", step / plain["step"])
    numbers = "–"
    if "bitwise" in row:
        numbers = "same bits" if row["bitwise"] else f"differ by {row['distance']:.0e}"
    return [
        f"**{row['form']}**" if row["form"].startswith(OURS) else row["form"],
        row["status"] if peak is None else format_bytes(peak),
        shown(None if peak is None else peak / plain["peak"], ".1%"),
        "–" if step is None else format_seconds(step),
        shown(ratio, ".3f"),
        shown(row.get("runs_again"), "d", missing=""),
        numbers,
    ]


def rows(name: str, setting: str, time_limit: float, rounds: int) -> Iterator[Row]:
    """All forms of an activation in one setting."""
    run = time.time()
    made = estimated(name, time_limit) if setting == "h100" else measured(name, time_limit, rounds)
    for row in made:
        yield {"setting": setting, "activation": name, "run": str(run), **row}


def _line(row: Row) -> list[str]:
    return [row["form"], *(str(row.get(key, "")) for key in PRINTED)]


def report(file: Path) -> None:
    """Renew the tables of the page."""
    PAGE.write_text(renewed(PAGE, tables(read(file))))


BENCHMARK = Benchmark(
    __doc__,
    "merged.jsonl",
    rows,
    ("form", *PRINTED),
    _line,
    names=FORMS,
    options={
        "setting": (("h100", "cpu"), "estimated and measured"),
        "time_limit": (60.0, "seconds for each plan"),
        "rounds": (60, "timed steps of each form"),
    },
    report=report,
)

if __name__ == "__main__":
    BENCHMARK.run()
