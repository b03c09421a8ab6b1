"""Answers as plain data, for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from checkmate.core.plan import Run, Start, Step
from checkmate.core.rules import as_mapping
from checkmate.core.solution import Solution


def solution_record(solution: Solution) -> dict[str, Any]:
    """A solution as plain data: bytes, seconds, and how often each op reruns."""
    s = solution
    second_memory: dict[str, float] = {}  # bytes, and seconds of the step in which a transfer is waited for
    if away := s.second_memory:
        second_memory = {"values": away.values, "peak": away.peak, "transfers": len(away.timing.transfers)}
        second_memory |= {"waited": away.waited, "hidden": away.timing.hidden}
        if s.problem.homes:
            kept = s.problem.begin_bytes - s.problem.resident
            second_memory |= {"homes": s.problem.homes_bytes, "kept": kept, "sent": away.sent, "fetched": away.fetched}
    again = {} if s.schedule is None else enumerate(s.schedule.recomputed.tolist())
    # Parts that only some answers have come last.
    return {
        "status": s.status.label,
        "method": s.method,
        "message": s.message,
        "budget": s.budget,
        "peak": s.peak,
        "keep_all_peak": s.problem.keep_all_peak,
        "cost": s.cost,
        "bound": s.bound,
        "gap": s.gap,
        "overhead": s.overhead if s.plan is not None else None,
        "seconds": s.seconds,
        "min_budget": None if s.refusal is None else s.refusal.min_budget,
        "op": None if s.refusal is None else s.refusal.op,
        "source": s.problem.profile.source,
        "runs_over": s.runs_over,
        "runs_again": {s.problem.graph.ops[k].name: times for k, times in again if times},
        **({"host": asdict(s.problem.host)} if s.problem.host is not None else {}),
        **({"second_memory": second_memory} if s.second_memory is not None else {}),
        **({"splits": list(s.problem.splits)} if s.problem.splits else {}),
        **({"rules": as_mapping(s.problem)} if s.problem.rules else {}),
        **({"min_budget_without": s.refusal.without} if s.refusal is not None and s.refusal.without else {}),
    }


def steps_of(solution: Solution) -> list[dict[str, str]]:
    """The plan in order: runs, with the value they write over, frees, sends, ..."""
    assert solution.plan is not None
    graph = solution.problem.graph

    def told(step: Step) -> dict[str, str]:
        kind, over = type(step).__name__.lower(), step.over if isinstance(step, Run) else None
        if not isinstance(step, (Run, Start)):
            return {kind: graph.values[step.value].name}
        return {kind: graph.ops[step.op].name, **({} if over is None else {"over": graph.values[over].name})}

    return [told(step) for step in solution.plan.steps]


def finite(document: Any) -> Any:
    """The document with null for infinities and NaNs, which JSON lacks.

    >>> finite({"gap": float("inf"), "costs": (1.0, 2)})
    {'gap': None, 'costs': [1.0, 2]}
    """
    if isinstance(document, dict):
        return {name: finite(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
