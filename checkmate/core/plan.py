"""A plan: the steps of a training step, in order.

It runs ops, frees values, begins what a link carries early, and may have values wait in a second memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Run:
    """Execute an op: make its outputs; an older copy of an output is freed when the op is done.

    ``over``: a value that is gone then, since the op has written over it (`checkmate.core.inplace`).
    """

    op: int
    over: int | None = None


@dataclass(frozen=True)
class Start:
    """Begin an op that a link carries (`Op.link`) without waiting; its `Run` waits for it.

    What it makes takes its bytes now, and is at hand after `Run`; what it reads stays until then.
    """

    op: int


@dataclass(frozen=True)
class _OfValue:
    value: int


class Free(_OfValue):
    """Free a value."""


class Send(_OfValue):
    """Begin to copy a value into the second memory (`checkmate.core.host`). It stays in memory."""


class Fetch(_OfValue):
    """Begin to copy a value back from the second memory. Its bytes count from now on; it can be read after `Wait`."""


class Wait(_OfValue):
    """Wait until the transfer of a value has ended."""


class Drop(_OfValue):
    """Free the copy of a value in the second memory."""


Step = Run | Start | Free | Send | Fetch | Wait | Drop
KINDS: dict[str, type[Step]] = {kind.__name__.lower(): kind for kind in (Run, Start, Free, Send, Fetch, Wait, Drop)}


@dataclass(frozen=True)
class Plan:
    """The steps of a training step, in order. ``boundary``: the number of steps in the forward.

    >>> print(Plan((Run(0), Send(0), Run(1), Wait(0), Free(0), Fetch(0), Wait(0), Drop(0), Run(2)), boundary=5))
    forward
         0  run 0
         1  send 0
         2  run 1
         3  wait 0
         4  free 0
    backward
         5  fetch 0
         6  wait 0
         7  drop 0
         8  run 2
    """

    steps: tuple[Step, ...]
    boundary: int

    @property
    def runs(self) -> tuple[int, ...]:
        """The ops in execution order, repeats included."""
        return tuple(step.op for step in self.steps if isinstance(step, Run))

    @property
    def runs_over(self) -> int:
        """The number of in-place runs."""
        return sum(isinstance(step, Run) and step.over is not None for step in self.steps)

    @cached_property
    def sent(self) -> frozenset[int]:
        """The values that are sent to the second memory."""
        return frozenset(step.value for step in self.steps if isinstance(step, Send))

    @cached_property
    def moved(self) -> frozenset[int]:
        """The values that are sent to or fetched from the second memory."""
        return self.sent.union(step.value for step in self.steps if isinstance(step, Fetch))

    @property
    def moves(self) -> bool:
        """Tell whether the plan uses the second memory."""
        return bool(self.moved)

    @cached_property
    def started(self) -> bool:
        """Tell whether an op is begun before it is waited for."""
        return any(isinstance(step, Start) for step in self.steps)

    @cached_property
    def is_a_schedule(self) -> bool:
        """Tell whether R says all: each op runs at most once a stage, in order, and no link is used."""
        turn, before = 0, -1
        for k in self.runs:
            if k <= before:
                return False
            turn, before = (turn + 1, -1) if k == turn else (turn, k)
        return not self.moves and not self.started

    def as_lists(self) -> list[list[str | int]]:
        """The steps as lists of a name and numbers, for JSON."""
        numbers = ([n for n in vars(step).values() if n is not None] for step in self.steps)
        return [[type(step).__name__.lower(), *arguments] for step, arguments in zip(self.steps, numbers, strict=True)]

    @classmethod
    def from_lists(cls, steps: Sequence[Sequence[str | int]], boundary: int) -> Plan:
        """Read a plan that `as_lists` wrote.

        Raises:
            ValueError, KeyError, TypeError: for what it did not write.

        >>> plan = Plan((Run(0), Run(1, over=0)), boundary=1)
        >>> Plan.from_lists(plan.as_lists(), 1) == plan
        True
        """
        plan_steps = []
        for name, *numbers in steps:
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"A step of a plan is {numbers!r:.100}.")
            plan_steps.append(KINDS[str(name)](*numbers))  # type: ignore[arg-type]  # they are, just seen
        if type(boundary) is not int or not 0 <= boundary <= len(plan_steps):
            raise ValueError(f"A plan of {len(plan_steps)} steps has its backward at {boundary!r:.100}.")
        return cls(tuple(plan_steps), boundary)

    def __str__(self) -> str:
        half = {0: "forward", self.boundary: "backward"}
        lines = []
        for i, (name, *numbers) in enumerate(self.as_lists()):
            lines += [half[i]] if i in half else []
            lines.append(f"{i:>6}  {name} {' over '.join(map(str, numbers))}")
        return "\n".join(lines)
