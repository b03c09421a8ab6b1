"""The bytes that it takes to ask, before a step, what it asks of its tensors: they are a part of its peak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from checkmate.capture.device import main_device
from checkmate.capture.questions import Questions
from checkmate.core.solution import Solution
from checkmate.errors import Unsupported
from checkmate.memory import aside, measure_peak
from checkmate.units import format_bytes


def asked_bytes(plan: Solution, questions: Questions, inputs: list[Any], given: int, limit: int) -> int:
    """Bytes that it takes to ask what is asked before the step, beside what is resident.

    Args:
        given: bytes of the inputs that are made anew at each call.
        limit: bytes that the step may take.

    Raises:
        Unsupported: where they are above the limit.
    """
    device = main_device(inputs)
    taken = given + aside(partial(measure_peak, partial(questions.ask, inputs), device)).peak
    peak = plan.problem.resident + taken
    if peak > limit:
        places = ", ".join(dict.fromkeys(questions.places))
        raise Unsupported(
            f"{places}: the step asks for the value of a tensor, which is found out before the step runs. "
            f"That takes {format_bytes(taken)}, with what is resident {format_bytes(peak)}, of a budget of "
            f"{format_bytes(limit)}. Ask outside of the step, and pass the answer in as a bool."
        )
    return taken


def with_asked(plan: Solution, asked: int) -> Solution:
    """The plan, its peak that of what is asked before the step, where so many bytes beside the resident are more."""
    peak = plan.problem.resident + asked
    if plan.peak is None or peak <= plan.peak:
        return plan
    return replace(plan, peak=peak, details={**plan.details, "asked_bytes": asked})
