"""Activations merged by hand, beside plans for the plain ones: swish, and batch normalization with a leaky ReLU.

    python -m benchmarks.merged [swish ...] [--time-limit SECONDS]
    python -m benchmarks.merged --report     # from the rows: the tables of docs/merged.md

A ResNet-50 with its activations written plainly, and as a `torch.autograd.Function` by hand that keeps less
(`benchmarks.common.merged_forms`). Ours runs the plain one within the bytes of each other form. The network is narrow,
and trained on one thread of the CPU: peaks are those of PyTorch's allocator, and steps of all forms take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import checkmate
from benchmarks.common.merged_forms import FORMS, Form, ResNet50
from benchmarks.common.rows import Column, Row, latest, plan_facts, read, renewed
from benchmarks.common.runner import Benchmark, table_of
from benchmarks.common.timing import distance, median_ratio, nothing_on_disk, seconds_in_turn, step_and_back
from benchmarks.networks.batches import Batch, Step, classifier, images
from checkmate.backends.tensor_state import differing
from checkmate.core.answer import Table
from checkmate.demo.training import train
from checkmate.memory import measure_peak

PAGE = Path(__file__).parents[1] / "docs" / "merged.md"
OURS = "checkmate"
Turn = tuple[nn.Module, Step, Batch]


@dataclass(frozen=True)
class Size:
    """Of a network and its batch."""

    batch: int
    side: int  # of an image
    base: int  # channels of the first stage
    classes: int


def made(form: Form, size: Size) -> Turn:
    """The network, its step and a batch."""
    torch.manual_seed(0)
    module = ResNet50(form, size.base, size.classes)
    return module, classifier(module), images(size.batch, size.side, size.classes)


def measured(activation: str, time_limit: float, rounds: int, size: Size) -> Iterator[Row]:
    """A row for each form, and for each plan within the bytes that another form was seen to take."""
    torch.set_num_threads(1)
    forms = FORMS[activation]
    turns = {name: made(form, size) for name, form in forms.items()}
    expected = trained(made(forms["plain"], size))
    plain_steps = {name: turn for name, turn in turns.items() if name.startswith("plain")}
    problems = {name: checkmate.trace(step, *batch) for name, (_, step, batch) in plain_steps.items()}
    resident = problems["plain"].resident  # parameters and batch, the same for all
    rows = {name: _measured(resident, turn, expected) for name, turn in turns.items()}
    seen = {name: row["peak"] for name, row in rows.items()}
    for plain, problem in problems.items():
        least, most = checkmate.min_budget(problem).peak, problem.keep_all_peak
        asked = {"nothing twice": most, **{f"bytes of '{n}'": peak for n, peak in seen.items() if n != plain}}
        for what, budget in _different(asked).items():
            if not least <= budget <= min(most, seen[plain]):
                continue
            module, step, batch = made(forms[plain], size)
            compiled = checkmate.compile(step, budget=budget, time_limit=time_limit, wait="best")
            name = f"{OURS}{plain.removeprefix('plain')}, {what}"
            turns[name] = module, compiled, batch
            with nothing_on_disk():
                found = _measured(resident, turns[name], expected)
            rows[name] = {**_planned(compiled.plans[0]), **found}
    seconds = in_turns(turns, rounds)
    for name, row in rows.items():
        yield {"form": name, **row, **seconds[name], "rounds": rounds}


def _different(named: Mapping[str, int]) -> dict[str, int]:
    """Each number with the first of its names."""
    first: dict[int, str] = {}
    for name, number in named.items():
        first.setdefault(number, name)
    return {name: number for number, name in first.items()}


def _planned(solution: checkmate.Solution) -> Row:
    again = None if solution.schedule is None else int(solution.schedule.recomputed.sum())
    over = None if solution.plan is None else solution.plan.runs_over
    ran = {"runs_again": again, "runs_over": over, "budget": solution.budget, **plan_facts(solution)}
    return {**ran, "predicted": solution.peak}


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


def in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, Row]:
    """Median seconds of each step, and of its ratio to the first one's in the same round."""

    def before() -> None:
        for module, _, _ in turns.values():
            module.zero_grad(set_to_none=True)

    taken = seconds_in_turn({name: partial(step_and_back, *turn) for name, turn in turns.items()}, rounds, before)
    first = next(iter(taken.values()))
    return {n: {"step": statistics.median(of), "ratio": median_ratio(of, first)} for n, of in taken.items()}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """For each activation that has rows the table of its last run in Markdown, by its first head."""
    found = {}
    for activation in FORMS:
        run = [row for row in latest(rows, "activation", "form") if row["activation"] == activation]
        run = [row for row in run if row["run"] == max(row["run"] for row in run)]
        if run:
            head = f"{activation}, on a CPU, measured"
            found[head] = _table(head, run, plain=run[0]["peak"]).markdown()
    return found


def _table(head: str, rows: Sequence[Row], plain: int) -> Table:
    columns: dict[str, Column] = {
        head: lambda row: f"**{row['form']}**" if row["form"].startswith(OURS) else row["form"],
        "peak": "{peak:bytes}|{status}",
        "to plain": lambda row: f"{row['peak'] / plain:.1%}" if row["peak"] else "–",
        "step": "{step:seconds}|–",
        "step / plain": "{ratio:.3f}|–",
        "run again": "{runs_again}",
        "numbers": _numbers,
    }
    return table_of(columns, rows)


def _numbers(row: Row) -> str:
    if "bitwise" not in row:
        return "–"
    return "same bits" if row["bitwise"] else f"differ by {row['distance']:.0e}"


def rows(name: str, time_limit: float, rounds: int) -> Iterator[Row]:
    """All forms of an activation."""
    about = {"setting": "cpu", "activation": name, "run": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    yield from (about | row for row in measured(name, time_limit, rounds, Size(batch=16, side=64, base=32, classes=10)))


def report(file: Path) -> None:
    """Renew the tables of the page."""
    PAGE.write_text(renewed(PAGE, tables(read(file))))


BENCHMARK = Benchmark(
    __doc__,
    "merged.jsonl",
    rows,
    {key: f"{{{key}}}" for key in ("form", "activation", "peak", "step", "bitwise")},
    names=FORMS,
    options={
        "time_limit": (60.0, "seconds for each plan"),
        "rounds": (60, "timed steps of each form"),
    },
    report=report,
)

if __name__ == "__main__":
    BENCHMARK.run()
