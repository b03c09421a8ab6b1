"""For `explain_peak`: what it would cost to have one more value in the second memory while the plan is at its peak."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from checkmate.core.plan import Drop, Fetch, Free, Plan, Send, Step, Wait
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.core.timing import timing
from checkmate.inspection.timeline import Moment, Span, Timeline


def seconds_to_send(solution: Solution, line: Timeline, moment: Moment, span: Span) -> float | None:
    """Seconds by which the step would be longer were this value away at this moment; None: it cannot be.

    It would be sent when it is made and be waited for right before the moment, be fetched right after it, and be waited
    for where it is read next. The rest of the plan stays as it is: its transfers may have to wait for these on their
    links. Whether there is room here for the copy that comes back is not asked; there must be there.
    """
    plan, problem, index = solution.plan, solution.problem, moment.index
    use, v = span.next_use(index), span.value
    assert plan is not None
    rests = span.first < index and index not in span.uses and span.ready <= index
    graph = problem.graph
    barred = v in plan.sent or v in graph.outputs or v in problem.limits.gone or v in graph.overwritten_by
    if problem.host is None or use is None or not rests or barred:
        return None
    made, away, back, read = (line.moments[i].position for i in (span.first, index, index + 1, use))
    added: dict[int, list[Step]] = {}
    for position, step in ((made + 1, Send(v)), (away, Wait(v)), (away, Free(v)), (back, Fetch(v)), (read, Wait(v))):
        added.setdefault(position, []).append(step)
    added[read].append(Drop(v))
    longer = _with(plan, added)
    if simulate(longer, problem).peak_there > problem.host.budget:
        return None
    return timing(longer, problem).seconds - line.seconds


def _with(plan: Plan, before: Mapping[int, list[Step]]) -> Plan:
    """The plan with more steps, each before the position given."""
    steps = chain.from_iterable((*before.get(p, ()), step) for p, step in enumerate(plan.steps))
    return Plan(tuple(steps), plan.boundary + sum(len(more) for p, more in before.items() if p < plan.boundary))
