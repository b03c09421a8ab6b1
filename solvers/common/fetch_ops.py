"""Turn a problem with a second memory into one without: for each value that is sent, a cheap op fetches it.

For a value v that is sent to the second memory when it is made, an op q_v that reads nothing stands behind the op that
makes it: from then on v is q_v's. To run q_v again is to fetch v. It takes no seconds, or few, so that what the solvers
for recomputation find for this problem is what to keep, what to fetch and what to run again at which moment; when the
links carry what they must is `checkmate.solvers.common.place_transfers`'s.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.graph import MAX_BYTES, Graph, Op
from checkmate.core.plan import Free, Plan, Run
from checkmate.core.problem import Problem, Profile

PRICE = 0.01  # of the seconds that a link is busy with it: what a fetch costs, so that none is for nothing


@dataclass(frozen=True, eq=False)
class WithFetches:
    """A problem with fetch ops, and the op or value of the plain problem behind each of its ops."""

    problem: Problem
    op: tuple[int | None, ...]  # the plain op of each; None if it fetches a value
    value: tuple[int | None, ...]  # the value that it fetches


@dataclass(frozen=True)
class MustBeBack:
    """The point in a plan by which a value must be back from the second memory."""

    value: int


Event = Run | Free | MustBeBack


def with_fetches(problem: Problem, sent: Collection[int]) -> WithFetches:
    """Translate a problem with a second memory to one without, in which these values are sent once they are made.

    Args:
        problem: with a second memory.
        sent: values, each made by an op and none that a rule has made again in the backward.

    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[4] * 4, forward=3)
    >>> fetching = with_fetches(chain.with_host(Host(100, send=1.0, fetch=1.0)), [0])
    >>> [op.name for op in fetching.problem.graph.ops], fetching.problem.graph.values[0].producer
    (['op0', 'fetch v0', 'op1', 'op2', 'op3'], 1)
    """
    graph, host = problem.graph, problem.host
    assert host is not None

    def inside(k: int) -> int:
        """Bytes that op k makes and fetch ops take over; they count as its workspace."""
        return sum(int(problem.sizes[w]) for w in graph.ops[k].outputs if w in sent)

    # Behind each op that makes values which are sent, an op for each that fetches it.
    ops, seconds, workspace = list[Op](), list[float](), list[int]()
    place = list[int]()  # new index of each plain op
    plain, fetched = list[int | None](), list[int | None]()  # per new op
    producer = [value.producer for value in graph.values]
    for k, op in enumerate(graph.ops):
        place.append(len(ops))
        ops.append(replace(op, outputs=tuple(w for w in op.outputs if w not in sent)))
        seconds.append(float(problem.seconds[k]))
        workspace.append(int(problem.workspace[k]) + inside(k))
        going = [v for v in op.outputs if v in sent]
        for v in op.outputs:
            producer[v] = place[k]
        for v in going:
            producer[v] = len(ops)
            ops.append(Op(f"fetch {graph.values[v].name}", "fetch", (), (v,), op.phase))
            seconds.append(min(PRICE * host.seconds_to_fetch(int(problem.sizes[v])), MAX_BYTES))
            workspace.append(0)
        plain += [k, *[None] * len(going)]
        fetched += [None, *going]
    # The rest of the problem by the new places of ops.
    values = tuple(replace(value, producer=p) for value, p in zip(graph.values, producer, strict=True))
    ways = tuple(
        replace(w, op=place[w.op], makes=None if w.makes in sent else w.makes, workspace=w.workspace + inside(w.op))
        for w in problem.profile.ways
    )
    profile = Profile(np.array(seconds), np.array(workspace), problem.resident, problem.profile.source, ways=ways)
    rules = tuple(
        replace(rule, ops=tuple(place[k] for k in rule.ops), exempt=tuple((place[k], why) for k, why in rule.exempt))
        for rule in problem.rules
    )
    there = Problem(Graph(tuple(ops), values, graph.outputs), profile, rules=rules)
    return WithFetches(there, tuple(plain), tuple(fetched))


def sendable(problem: Problem) -> list[int]:
    """The values that may be sent: not empty, no results, not shared with the caller, not under a "recompute" rule."""
    graph, out = problem.graph, {*problem.graph.outputs, *problem.graph.only_here, *problem.limits.recomputed}
    return [v for v in range(len(graph.values)) if problem.sizes[v] and v not in out and graph.users[v]]


def plain_events(fetching: WithFetches, plan: Plan) -> tuple[list[Event], int]:
    """Translate a plan to the plain problem's events, with the index at which the backward begins.

    Fetches are `MustBeBack`. What an op makes again of what is fetched otherwise goes at once.
    """
    found: list[Event] = []
    boundary, ran, made, at_hand = 0, set[int](), set[int](), set[int]()
    graph = fetching.problem.graph
    # For each plain op, its outputs that fetch ops take over.
    by_product: list[list[int]] = []
    for v in fetching.value:
        if v is None:
            by_product.append([])
        else:
            by_product[-1].append(v)
    for position, step in enumerate(plan.steps):
        if position == plan.boundary:
            boundary = len(found)
        if isinstance(step, Free):
            at_hand.discard(step.value)
            found.append(step)
            continue
        assert isinstance(step, Run)
        k, v = fetching.op[step.op], fetching.value[step.op]
        # A fetch op's first run is the value made by its op; any later one with the value gone is a fetch.
        if v is not None:
            if v in made and v not in at_hand:
                found.append(MustBeBack(v))
            made.add(v)
            at_hand.add(v)
            continue
        assert k is not None
        # A plain op runs; when it runs again, values that are fetched elsewhere go at once.
        found.append(Run(k, step.over))
        at_hand.update(graph.ops[step.op].outputs)
        at_hand.discard(step.over if step.over is not None else -1)
        if k in ran:
            found += [Free(w) for w in by_product[k] if w not in at_hand]
        ran.add(k)
    return found, boundary if plan.boundary < len(plan.steps) else len(found)
