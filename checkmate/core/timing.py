"""How long the step of a plan takes: ops one after another, and beside them the links to the second memory.

An event simulation. The ops of a plan run in turn on one clock; a `Send` or `Fetch` takes no time of it, but joins the
queue of its link, which carries one transfer after another; a `Wait` moves the clock to where the transfer has ended.

    begin = max(now, where the link's last transfer ends)
    end   = begin + latency + bytes / rate
    Wait:   now = max(now, end)

Without transfers the seconds of a step are the sum of those of its runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.plan import Fetch, Plan, Run, Send, Wait
from checkmate.core.problem import Problem


@dataclass(frozen=True)
class Transfer:
    """One copy between the two memories."""

    value: int
    back: bool  # from the second memory
    asked: float  # seconds since the step began, as are the others
    begin: float
    end: float


@dataclass(frozen=True)
class Timing:
    """When everything happens, in seconds since the step began."""

    seconds: float  # of the whole step
    at: tuple[float, ...]  # for each step of the plan, when it is reached
    transfers: tuple[Transfer, ...] = ()  # in the order in which they are asked for
    stalls: tuple[tuple[int, float], ...] = ()  # (position in the plan, seconds) of each `Wait` that is waited at

    @property
    def waited(self) -> float:
        """Seconds in which no op runs."""
        return sum(seconds for _, seconds in self.stalls)

    @property
    def hidden(self) -> float:
        """The share of the seconds that transfers take in which ops run beside them; 1 without transfers."""
        busy = sum(moved.end - moved.begin for moved in self.transfers)
        return max(0.0, 1 - self.waited / busy) if busy else 1.0


def timing(plan: Plan, problem: Problem) -> Timing:
    """When each step of a plan happens.

    Raises:
        ValueError: if the plan has transfers and the problem has no second memory.

    >>> from checkmate.core.host import Host
    >>> from checkmate.core.plan import Drop, Free
    >>> problem = Problem.from_dag([[], [0], [0, 1]], seconds=[1, 1, 1], sizes=[4, 1, 1]).with_host(Host(4, 4.0, 2.0))
    >>> away = Plan((Run(0), Send(0), Run(1), Wait(0), Free(0), Fetch(0), Wait(0), Drop(0), Run(2), Free(0)), 10)
    >>> timing(away, problem).seconds, timing(away, problem).waited
    (5.0, 2.0)
    """
    host, sizes = problem.host, problem.sizes
    if plan.sent and host is None:
        raise ValueError("The plan sends values to a second memory, and the problem has none: Problem.with_host.")
    now, busy = 0.0, {False: 0.0, True: 0.0}  # of the links: where their last transfer ends
    at, transfers, stalls = [], [], []
    ends: dict[int, float] = {}
    for position, step in enumerate(plan.steps):
        at.append(now)
        if isinstance(step, Run):
            now += float(problem.seconds[step.op])
        elif isinstance(step, (Send, Fetch)) and host is not None:
            back, size = isinstance(step, Fetch), int(sizes[step.value])
            link = back and not host.one_link
            begin = max(now, busy[link])
            end = begin + (host.seconds_to_fetch(size) if back else host.seconds_to_send(size))
            busy[link] = ends[step.value] = end
            transfers.append(Transfer(step.value, back, now, begin, end))
        elif isinstance(step, Wait) and ends.get(step.value, 0.0) > now:
            stalls.append((position, ends[step.value] - now))
            now = ends[step.value]
    return Timing(now, tuple(at), tuple(transfers), tuple(stalls))
