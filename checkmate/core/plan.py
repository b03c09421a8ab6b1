"""A plan: what a training step does, in order. It runs ops and frees values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Execute an op: its outputs are made; where one is still at hand, the new copy goes when the op is done.

    ``over``: a value that is gone then, since the op has written over it (`checkmate.core.ways`).
    """

    op: int
    over: int | None = None


@dataclass(frozen=True)
class Free:
    """Let go of a value."""

    value: int


Step = Run | Free


@dataclass(frozen=True)
class Plan:
    """What happens, in order. ``boundary``: how many of the steps belong to the forward.

    >>> print(Plan((Run(0), Run(1), Free(0), Run(2)), boundary=2))
    forward
         0  run 0
         1  run 1
    backward
         2  free 0
         3  run 2
    """

    steps: tuple[Step, ...]
    boundary: int

    @property
    def runs(self) -> tuple[int, ...]:
        """The ops in the order in which they run, repeats included."""
        return tuple(step.op for step in self.steps if isinstance(step, Run))

    @property
    def runs_over(self) -> int:
        """How many of these write over a value."""
        return sum(isinstance(step, Run) and step.over is not None for step in self.steps)

    def __str__(self) -> str:
        half = {0: "forward", self.boundary: "backward"}
        lines = []
        for i, step in enumerate(self.steps):
            lines += [half[i]] if i in half else []
            if isinstance(step, Run):
                over = "" if step.over is None else f" over {step.over}"
                lines.append(f"{i:>6}  run {step.op}{over}")
            else:
                lines.append(f"{i:>6}  free {step.value}")
        return "\n".join(lines)
