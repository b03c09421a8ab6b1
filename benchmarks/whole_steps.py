"""Whole training steps with AdamW, forward, backward and update: bytes, seconds and bits of each way to run them.

    python -m benchmarks.whole_steps [NETWORK ...] [--size trained full] [--time-limit 20] [--rounds 7]

The ways: the plain loop; checkpoints around each block; an optimizer for each parameter, stepped by a hook as soon as
the gradient is there (`register_post_accumulate_grad_hook`), with and without checkpoints; `checkmate.compile` at its
smallest budget with the plain optimizer; and `checkmate.training_step` at its smallest budget, at the bytes of the
lowest peer, and keeping everything. Bytes are the most that PyTorch counts at any moment of a step, parameters,
buffers, batch and the optimizer's state included; for ours and plain PyTorch also by how much the peak resident set
of the process grows over ten steps, those bytes included. Steps of the plain loop and of a way take turns when they are
timed. ``same bits``: parameters, buffers and state after three steps are those of the plain loop.

Of the size "full": the smallest budgets of steps at the size people train, traced without running them and estimated
for an H100, with nothing in parts: of a planned forward and backward with the state that is to be reserved beside them,
and of the whole step, plain and with gradients clipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import optim

import checkmate
from benchmarks.arena import small_step
from benchmarks.common.resident import growth
from benchmarks.common.rows import Column, Row, latest
from benchmarks.common.runner import Benchmark, document, table_of
from benchmarks.common.timing import median_ratio, seconds_in_turn
from benchmarks.graphs import DEVICE, GRAPHS
from benchmarks.peers.settings import checkpointed
from benchmarks.peers.subjects import NETWORKS, Subject
from checkmate.backends.tensor_state import differing, tensors_within
from checkmate.errors import InfeasibleBudget
from checkmate.memory import measure_peak
from checkmate.solvers.search.min_budget import MinBudget
from checkmate.updates.updates import Updates

INTRO = """\
Made by `python -m benchmarks.whole_steps` at {commits} on {cpu}, one thread: AdamW, the networks of the comparison with
other ways to save memory. Counted: the most that PyTorch counts at any moment of ten steps, parameters, buffers, batch
and the optimizer's state included; ours is the plan's figure to the byte. Process: by how much the peak resident set of
the process grows over ten steps, with these. Hooks: an optimizer for each parameter, stepped as soon as its gradient is
there. Steps of a way and of the plain loop took turns, on a machine that was busy with other work. Numbers: parameters,
buffers and state after three steps."""
OF_FLOORS = """Smallest budgets at the size people train, estimated for an H100, nothing in parts: of forward and
backward planned by `checkmate.compile`, with the bytes of AdamW's state as reserve, and of the whole step, plain and
with gradients clipped by their norm:"""
TRAINED, FULL = "trained", "full"
SIZES = {"resnet50": (TRAINED, FULL), "gpt2": (TRAINED,), "vit": (TRAINED,), "vgg16": (TRAINED, FULL)}
FLOOR = "floor"
FLOORS: dict[str, Column] = {
    "network": "{model}",
    "state": "{state_bytes:bytes}",
    "forward and backward, state reserved": "{apart:bytes}",
    "whole step": "{whole:bytes}",
    "less": lambda row: f"{1 - row['whole'] / row['apart']:.1%}",
    "clipped": "{clipped:bytes}",
    "less, clipped": lambda row: f"{1 - row['clipped'] / row['apart']:.1%}",
}
STEPS = 10
Loop = Callable[[], Any]


@dataclass(frozen=True)
class Way:
    """A way to train: a whole step, and what it leaves in the optimizers, by parameter."""

    step: Loop
    state: Callable[[], list[Any]]
    plan: checkmate.Solution | None = None


def _adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-4)


def _state(optimizer: optim.Optimizer) -> list[Any]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def _plain(subject: Subject, step: Any) -> Way:
    optimizer = _adamw(subject.module.parameters())

    def loop() -> None:
        step(*subject.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Way(loop, partial(_state, optimizer))


def _by_hooks(subject: Subject, step: Any) -> Way:
    made = {parameter: _adamw([parameter]) for parameter in subject.module.parameters()}

    def update(parameter: Any) -> None:
        made[parameter].step()
        made[parameter].zero_grad(set_to_none=True)

    def loop() -> None:
        handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in made]
        try:
            step(*subject.batch).backward()
        finally:
            for handle in handles:
                handle.remove()

    return Way(loop, lambda: [state for optimizer in made.values() for state in _state(optimizer)])


def _compiled(subject: Subject, time_limit: float) -> Way:
    problem = checkmate.trace(subject.plain, *subject.batch)
    budget = checkmate.min_budget(problem, time_limit=time_limit).peak
    return _plain(subject, checkmate.compile(subject.plain, budget=budget, time_limit=time_limit, wait="best"))


def _ours(subject: Subject, budget: int, time_limit: float) -> Way:
    """A whole step at a budget; at the smallest where that is more."""
    optimizer = _adamw(subject.module.parameters())
    try:
        step = checkmate.training_step(subject.plain, optimizer, budget=budget, time_limit=time_limit, wait="best")
        step(*subject.batch)
    except InfeasibleBudget as error:
        return _ours(subject, error.min_budget, time_limit)
    return Way(lambda: step(*subject.batch), partial(_state, optimizer), step.plans[0])


def _trained(subject: Subject, make: Callable[[], Way]) -> tuple[Way, Any]:
    """A way, and all that three steps leave behind, from the state that a network is made in."""
    subject.restore()
    torch.manual_seed(1)
    way = make()
    for _ in range(3 if way.plan is None else 2):  # ours has run once, to plan
        way.step()
    return way, copy.deepcopy((subject.module.state_dict(), way.state()))


def rows(name: str, size: str, time_limit: float, rounds: int) -> list[Row]:
    """Measure all ways to train one network, or find the smallest budgets of one at full size."""
    torch.set_num_threads(1)
    if size == FULL:
        return [floor(name, time_limit)]
    subject = Subject.of(NETWORKS[name], torch.device("cpu"))
    whole = _ours(subject, 2**50, time_limit).plan
    assert whole is not None
    resident, keep_all = whole.problem.resident, whole.problem.keep_all_peak
    plain, expected = _trained(subject, lambda: _plain(subject, subject.plain))
    found: list[Row] = []

    def measure(way_name: str, make: Callable[[], Way]) -> None:
        torch._dynamo.reset()
        way, left = _trained(subject, make)
        peak = max(measure_peak(way.step).peak for _ in range(STEPS))
        seconds = seconds_in_turn({"plain": plain.step, "way": way.step}, rounds)
        plan = way.plan
        row: Row = {"model": name, "way": way_name, "peak": resident + peak, "same_bits": not differing(left, expected)}
        row["time_ratio"] = median_ratio(seconds["way"], seconds["plain"])
        row |= dict.fromkeys(("budget", "predicted_peak", "recomputed", "gap"))
        if plan is not None:
            row |= {"budget": plan.budget, "predicted_peak": plan.peak, "recomputed": plan.overhead, "gap": plan.gap}
        if plan is not None or way_name == "plain":
            row["process"] = resident + growth(subject.module, way.step, small_step())
        found.append(row)

    measure("plain", lambda: _plain(subject, subject.plain))
    measure("hooks", lambda: _by_hooks(subject, subject.plain))
    measure("checkpoint, each block", lambda: _plain(subject, checkpointed(subject)))
    measure("hooks + checkpoint, each block", lambda: _by_hooks(subject, checkpointed(subject)))
    lowest = min(row["peak"] for row in found)
    measure("checkmate.compile, smallest", lambda: _compiled(subject, time_limit))
    measure("checkmate.training_step, keep all", lambda: _ours(subject, keep_all, time_limit))
    measure("checkmate.training_step, bytes of the lowest peer", lambda: _ours(subject, lowest, time_limit))
    measure("checkmate.training_step, smallest", lambda: _ours(subject, resident + 1, time_limit))
    return found


def floor(name: str, time_limit: float) -> Row:
    """The smallest budgets of one step at full size."""
    with torch.device("meta"):
        step, batch = GRAPHS[name]()
    parameters = [t for t in tensors_within(step) if isinstance(t, torch.nn.Parameter)]

    def smallest(fn: Any) -> MinBudget:
        torch._dynamo.reset()
        problem = checkmate.trace(fn, *batch, profile=f"roofline:{DEVICE}")
        return checkmate.min_budget(replace(problem, next_split=None), time_limit=time_limit)

    def whole(**options: Any) -> MinBudget:
        return smallest(checkmate.training_step(step, _adamw(parameters), budget="1 TB", **options))

    state = Updates([_adamw(parameters)]).held_bytes
    apart, found, clipped = smallest(step), whole(), whole(clip_norm=1.0)
    row = {"model": name, "way": FLOOR, "state_bytes": state, "apart": apart.peak + state}
    row |= {"whole": found.peak, "whole_bound": found.bound}
    return row | {"clipped": clipped.peak, "clipped_bound": clipped.bound}


def markdown(rows: Sequence[Row]) -> str:
    """A document of the last row of each way to train a network."""
    last = latest((row for row in rows if row["way"] != FLOOR), "model", "way")
    floors = latest((row for row in rows if row["way"] == FLOOR), "model")
    commits = ", ".join(dict.fromkeys(row["commit"] for row in last or floors))
    intro = INTRO.format(commits=commits, cpu=rows[-1]["cpu"].removesuffix(" Processor"))
    return document("Whole training steps", intro, BENCHMARK.table(last), OF_FLOORS, table_of(FLOORS, floors))


BENCHMARK = Benchmark(
    __doc__,
    "whole_steps.jsonl",
    rows,
    {
        "network": "{model}",
        "way": "{way}",
        "budget": "{budget:bytes}",
        "counted": "{peak:bytes}|{whole:bytes}",
        "process": "{process:bytes}",
        "step / plain": "{time_ratio:.2f}",
        "numbers": lambda row: "" if "same_bits" not in row else "same bits" if row["same_bits"] else "differ",
    },
    names=SIZES,
    options={
        "size": (SIZES, "of the network: one that is trained here, or the smallest budgets at full size, estimated"),
        "time_limit": (20.0, "seconds to plan for one budget"),
        "rounds": (7, "of timed pairs of steps"),
    },
    page=markdown,
)

if __name__ == "__main__":
    BENCHMARK.run()
