"""The sentences and figures of the page: four figures first, the facts of the problem, a caption for each picture."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np

from checkmate.core.solution import Solution, Status, format_gap
from checkmate.inspection.addresses import Addresses
from checkmate.inspection.timeline import Timeline
from checkmate.units import format_bytes, format_seconds
from checkmate.version import __version__

if TYPE_CHECKING:
    from checkmate.solvers.frontier import Row


def title(solution: Solution) -> str:
    """The title of the page: the step, its budget, and the source of its costs."""
    problem = solution.problem
    source = re.split("[,;]", problem.profile.source)[0]
    costs = "" if source == "given" else f", {source}"
    return f"checkmate: {problem.name or 'a step'} within {format_bytes(solution.budget)}{costs}"


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def answer(solution: Solution) -> Iterator[tuple[str, str, str]]:
    """The first figures of the page, for readers who know neither solver nor schedule: name, figure and meaning."""
    assert solution.schedule is not None
    problem, peak = solution.problem, solution.peak or 0
    all_of_it, ops = format_bytes(problem.keep_all_peak), len(problem.graph.ops)
    share = f"{peak / problem.keep_all_peak:.1%} of {all_of_it}" if problem.keep_all_peak else all_of_it
    yield "Peak memory", format_bytes(peak), f"{share}, which plain PyTorch takes: it keeps everything"
    yield "Budget", format_bytes(solution.budget), f"{format_bytes(solution.budget - peak)} of it left at the peak"
    again = f"{int((solution.schedule.recomputed > 0).sum()):,} of {_counted(ops, 'op')} run again"
    steps = f"{format_seconds(solution.cost)} a step, {format_seconds(problem.keep_all_cost)} with each op once"
    only = solution.spent_on == "recomputation"
    why = again if only else f"{again}; {solution.spent_on}"
    if guessed := len(problem.profile.estimated):
        steps = f"estimated{'' if guessed == ops else f' for {guessed:,} of the ops'}, {steps}"
    yield "Recomputation" if only else "Time added", f"{solution.overhead:+.2%}", f"{steps}: {why}"
    if solution.status is Status.OPTIMAL:
        proof = "proven: no schedule within the budget takes less time"
    else:
        proof = "of the step is the most that a better schedule could save: proven"
    yield "Gap", format_gap(solution.gap), proof


def facts(solution: Solution) -> Iterator[tuple[str, str]]:
    """The facts of the problem: name and text."""
    problem, graph = solution.problem, solution.problem.graph
    forward = graph.forward_length
    yield "ops", f"{len(graph.ops):,}: {forward:,} in the forward, {len(graph.ops) - forward:,} in the backward"
    yield "there all the time", format_bytes(problem.resident)
    for rule in problem.rules:
        cannot = f"; {_counted(len(rule.exempt), 'op')} cannot obey it" if rule.exempt else ""
        yield "rule", f"{rule.text}, for {_counted(len(rule.ops), 'op')}{cannot}"
    yield "ops that must run once", f"{sum(op.pinned is not None for op in graph.ops):,}"
    yield "keeping everything", f"{format_bytes(problem.keep_all_peak)}, {format_seconds(problem.keep_all_cost)}"
    yield "no budget can be below", f"{format_bytes(int(problem.unavoidable_bytes.max()))}"
    if problem.host is not None:
        yield "second memory", str(problem.host)
    yield "profile", problem.profile.source
    versions = [f"checkmate {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "highspy"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    yield "written with", ", ".join(versions)


def memory_text(solution: Solution, line: Timeline) -> str:
    """Describe the picture of the memory for those who cannot see it."""
    moment, after = line.peak_moment, len(line.moments) - line.boundary
    where = f" ({moment.where})" if moment.where else ""
    halves = f" The forward runs {_counted(line.boundary, 'op')}, the backward {after:,}." if after else ""
    between = ""
    if 0 < line.boundary < len(line.moments):
        held = line.moments[line.boundary - 1].bytes
        between = f" When the forward ends, {format_bytes(held)} are at hand."
    over = f", written over {moment.over}" if moment.over else ""
    written = solution.runs_over
    in_place = f" What goes with a run may be written over by it: {_counted(written, 'run')} do so." if written else ""
    return (
        f"Bytes at hand while each op runs, from {format_bytes(int(line.bytes[0]))} at the first op to "
        f"{format_bytes(int(line.bytes[-1]))} at the last. The peak of {format_bytes(line.peak)} is at {moment.name}"
        f"{over}{where}, execution {moment.index + 1:,} of {len(line.moments):,}, in the {moment.phase}; the budget is "
        f"{format_bytes(solution.budget)}.{halves}{between}{in_place}"
    )


def links_text(solution: Solution, line: Timeline) -> str:
    """Describe the strips below the memory; empty if the plan uses no link."""
    if not line.lanes:
        return ""
    counts, words = {name: len(uses) for name, uses in line.lanes.items()}, list[str]()
    if line.crossings:
        sent, back = counts.pop("sent"), counts.pop("fetched")
        words = [f"{_counted(sent, 'value')} sent to the second memory and {back:,} fetched"]
    words += [f"{_counted(count, 'op')} on the link {name}" for name, count in counts.items()]
    waited = any(use.waited for uses in line.lanes.values() for use in uses)
    waits = ", framed where the step waits for one" if waited else "; it waits for none"
    away = solution.second_memory
    note = f" Below these are the bytes in the second memory, at most {format_bytes(away.peak)}." if away else ""
    return f"Below the memory is what links carry while the step runs, as bars{waits}: {', '.join(words)}.{note}"


def schedule_text(solution: Solution) -> str:
    """Describe the picture of the schedule."""
    assert solution.schedule is not None
    again = solution.schedule.recomputed
    dearest = np.argsort(-again * solution.problem.seconds, kind="stable")[:3]
    names = [solution.problem.graph.ops[k].name for k in dearest if again[k]]
    most = f" What takes most time of these: {', '.join(names)}." if names else ""
    ops, times = int((again > 0).sum()), int(again.sum())
    return (
        f"A row for each stage, which ends with the first execution of its op; a column for each op. "
        f"{ops:,} of {len(again):,} ops run again, {_counted(times, 'time')} in all.{most}"
    )


def addresses_text(placed: Addresses) -> str:
    """Describe the picture of the addresses."""
    alive = format_bytes(placed.bound)
    places = "" if not any(box.over for box in placed.boxes) else " What is written over a value takes over its place."
    low = "no arena is lower" if placed.gap == 0 else f"at most {format_gap(placed.gap, True)} of it could be saved"
    return (
        f"Each copy of a value that the step makes, and the workspace of each op, has a place in one arena of "
        f"{format_bytes(placed.height)}, for as long as it is needed. At most {alive} are alive at one moment: {low}."
        f"{places} What is there all the time lies outside."
    )


def frontier_text(rows: list[Row]) -> str:
    """Describe the picture of cost against peak."""
    plans = [row for row in rows if row.peak is not None]
    text = f"{_counted(len(plans), 'plan')} for {_counted(len({row.budget for row in rows}), 'budget')}. "
    if len(plans) == 1:
        text += f"It takes {format_seconds(plans[0].cost)} at a peak of {format_bytes(plans[0].peak or 0)}. "
    elif plans:
        low, high = (f(plans, key=lambda row: (row.cost, row.peak or 0)) for f in (min, max))
        ends = (f"{format_seconds(r.cost)} at a peak of {format_bytes(r.peak or 0)}" for r in (low, high))
        text += f"The fastest takes {next(ends)}, the slowest {next(ends)}. "
    return text + "No schedule is in the hatched part: that is proven."
