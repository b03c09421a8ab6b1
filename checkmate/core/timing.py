"""Walk through a plan step by step, with the bytes in both memories and the clock.

All that counts bytes or seconds of a plan goes by this one walk: `timing` here, `checkmate.core.simulator.simulate` and
`checkmate.look.timeline`. The checker, `checkmate.core.simulator.check_plan`, does not.

What is at hand are the resident bytes, the values not yet freed and the workspace of the op that runs. An op that
writes over a value has as much less as that way of it saves. What is fetched takes its bytes from the beginning of the
transfer on; a copy in the second memory takes them there from the beginning of its transfer, until it is dropped. What
is at home there (`Problem.homes`) has its place there all the time.

The ops of a plan run in turn on one clock; a `Send` or `Fetch` takes no time of it, but joins the queue of its link,
which carries one transfer after another; a `Wait` moves the clock to where the transfer has ended.

    begin = max(now, where the link's last transfer ends)
    end   = begin + latency + bytes / rate
    Wait:   now = max(now, end)

So it is with an op that a link carries (`Op.link`): a `Start` puts it on its link, where it takes its seconds, and its
`Run` moves the clock to its end; a run without a start does both at once. From its start on it holds what it makes and
its workspace. Without links the seconds of a step are the sum of those of its runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Start, Step, Wait
from checkmate.core.problem import Problem


class Event(NamedTuple):
    """A step of a plan as it happens, in seconds since the training step began."""

    step: Step
    at: float  # seconds when it is reached
    until: float  # and when the next one is: later after a run, and after a `Wait` that is waited at
    device_bytes: int  # at hand: while an op runs or is on a link, with its workspace; after any other step
    host_bytes: int  # of copies in the second memory, after it
    run: int  # how many executions have begun, less one: the index of the last of them
    tick: int  # of a clock that ticks with each execution, start and fetch
    begin: float = 0.0  # of a transfer, a start or a run: when its link, or the processor, turns to it
    end: float = 0.0  # and has done with it


@dataclass(frozen=True)
class Transfer:
    """A copy between the two memories."""

    value: int
    back: bool  # from the second memory
    asked: float  # seconds since the step began, as are the others
    begin: float
    end: float


@dataclass(frozen=True)
class Timing:
    """The times of all events, in seconds since the step began."""

    seconds: float  # of the whole step
    at: tuple[float, ...]  # for each step of the plan, when it is reached
    transfers: tuple[Transfer, ...] = ()  # in the order in which they are asked for
    stalls: tuple[tuple[int, float], ...] = ()  # (position in the plan, seconds) of each step that waits for a link

    @property
    def waited(self) -> float:
        """Seconds in which no op runs."""
        return sum(seconds for _, seconds in self.stalls)

    @property
    def hidden(self) -> float:
        """The share of the transfers' seconds during which ops run; 1 without transfers."""
        busy = sum(moved.end - moved.begin for moved in self.transfers)
        return max(0.0, 1 - self.waited / busy) if busy else 1.0


def walk(plan: Plan, problem: Problem) -> Iterator[Event]:
    """Run a plan on paper; without a second memory its transfers take no time."""
    graph, host = problem.graph, problem.host
    sizes, seconds, workspace = problem.sizes.tolist(), problem.seconds.tolist(), problem.workspace.tolist()
    carried = dict.fromkeys(graph.links, 0.0)  # where the last op on each link ends
    started: dict[int, tuple[float, float]] = {}  # op -> where it begins and ends
    at_hand = set(problem.kept)
    # With copies that are kept there is a tick before the first step.
    live, copies, now, run, tick = problem.begin_bytes, problem.homes_bytes, 0.0, -1, bool(problem.kept) - 1
    busy = {False: 0.0, True: 0.0}  # of the links there and back: where their last transfer ends
    ends: dict[int, float] = {}
    for step in plan.steps:
        at = now
        tick += isinstance(step, (Run, Start, Fetch))
        # An op: it waits for its link, takes its outputs and workspace, and frees the latter when it ends.
        if isinstance(step, (Run, Start)):
            k, outputs, link = step.op, graph.ops[step.op].outputs, graph.ops[step.op].link
            most = live + (0 if k in started else sum(sizes[v] for v in outputs) + workspace[k])
            begin = max(now, carried.get(link, now))
            if isinstance(step, Start):
                live, started[k] = most, (begin, begin + seconds[k])
                carried[link] = begin + seconds[k]
                yield Event(step, at, now, live, copies, run, tick, *started[k])
                continue
            run += 1
            # An op that was started holds its bytes already: wait for its end.
            if k in started:
                begin, end = started.pop(k)
                now, live = max(now, end), live - workspace[k]
            else:
                most -= 0 if step.over is None else dict(problem.savings[k]).get(step.over, 0)
                now, live = begin + seconds[k], live + sum(sizes[v] for v in outputs if v not in at_hand)
                carried |= {link: now} if link else {}
                end = now
            at_hand.update(outputs)
            # The value that it writes over goes.
            if step.over in at_hand:
                live -= sizes[step.over]
                at_hand.remove(step.over)
            yield Event(step, at, now, most, copies, run, tick, begin, end)
            continue
        # A step of one value: transfers go beside ops, one after another on each link.
        size, begin, end = sizes[step.value], 0.0, 0.0
        if isinstance(step, Free):
            if step.value in at_hand:
                live -= size
                at_hand.remove(step.value)
        elif isinstance(step, Wait):
            now = max(now, ends.get(step.value, 0.0))
        elif isinstance(step, Drop):
            copies -= 0 if step.value in problem.homes else size
        else:
            if back := isinstance(step, Fetch):
                live += size
                at_hand.add(step.value)
            elif step.value not in problem.homes:
                copies += size
            if host is not None:
                way = back and not host.one_link
                begin = max(now, busy[way])
                end = begin + (host.seconds_to_fetch(size) if back else host.seconds_to_send(size))
                busy[way] = ends[step.value] = end
        yield Event(step, at, now, live, copies, run, tick, begin, end)


def timing(plan: Plan, problem: Problem) -> Timing:
    """The times of all transfers of a plan, and the waits for them.

    Raises:
        ValueError: if the plan has transfers and the problem has no second memory.

    >>> from checkmate.core.host import Host
    >>> problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1, 1, 1], sizes=[4, 1, 1]).with_host(Host(4, 4.0, 2.0))
    >>> away = Plan((Run(0), Send(0), Run(1), Wait(0), Free(0), Fetch(0), Wait(0), Drop(0), Run(2), Free(0)), 10)
    >>> timing(away, problem).seconds, timing(away, problem).waited
    (5.0, 2.0)
    """
    if plan.moves and problem.host is None:
        raise ValueError("The plan uses a second memory, and the problem has none: Problem.with_host.")
    events = list(walk(plan, problem))
    moved = ((e.step.value, isinstance(e.step, Fetch), e) for e in events if isinstance(e.step, (Send, Fetch)))
    transfers = tuple(Transfer(v, back, e.at, e.begin, e.end) for v, back, e in moved)
    late = ((i, e) for i, e in enumerate(events) if e.until > e.at)  # runs, and waits
    ops = problem.graph.ops
    stalls = tuple((i, e.until - e.at) for i, e in late if not isinstance(e.step, Run) or ops[e.step.op].link)
    return Timing(events[-1].until if events else 0.0, tuple(e.at for e in events), transfers, stalls)
