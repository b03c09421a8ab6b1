"""In-place ops: a result takes over the storage of an input that dies there.

An op that reads a value for the last time may write its result over it: a rectified tensor over the tensor, a gradient
over the gradient that it is made of. While a plain run of op k has its inputs, its outputs and W_k bytes of workspace
at hand, one that writes over v has M_v bytes less: it saves

    M_v + W_k - W_w      W_w the workspace of this way

where v goes with this run, that is where FREE[t, v, k] = 1. It takes the seconds of its op and leaves the same bits.
So it changes nothing but the bytes of this one moment, and there is nothing to decide: of the ways whose value goes, a
run takes the one that saves the most. Which ways there are is found out when costs are (`checkmate.profiling`).

Some ways are slower than their op: those that run it block by block. By how much is not counted, since a plan takes few
of them: only where a plain run would be above the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from checkmate.core.graph import Graph
from checkmate.errors import InvalidProblem


@dataclass(frozen=True, order=True)
class InPlace:
    """Run op ``op`` in place: its result ``makes`` takes the storage of input ``over``, which is freed."""

    op: int
    makes: int | None  # None: what counts as workspace, and is no value of the graph
    over: int
    workspace: int  # bytes that it needs beside its inputs and its other outputs
    slower: bool = False  # than a plain run: taken only where that would be above the budget

    def check(self, graph: Graph) -> None:
        """Raise if no run could do this.

        Raises:
            InvalidProblem: if the op or the values are not there, not of the op, not of one size, or stay with others.
        """
        numbers = self.op, self.over if self.makes is None else self.makes, self.over, self.workspace
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
            raise InvalidProblem(f"{self} is made of numbers that are no indices or bytes.")
        if self.op >= len(graph.ops):
            raise InvalidProblem(f"{self} is for an op that is not there.")
        op = graph.ops[self.op]
        if (self.makes is not None and self.makes not in op.outputs) or self.over not in op.inputs:
            raise InvalidProblem(f"{op.name} cannot write value {self.makes} over {self.over}: not both are its own.")
        over = graph.values[self.over]
        result = over if self.makes is None else graph.values[self.makes]
        if result.size_bytes != over.size_bytes:
            sizes = f"{result.size_bytes} and {over.size_bytes} bytes"
            raise InvalidProblem(f"{op.name} cannot write {result.name} over {over.name}: they have {sizes}.")
        if over.producer is None:
            raise InvalidProblem(f"{op.name} cannot write over {over.name}: it belongs to the caller.")
        if self.over in graph.outputs:
            raise InvalidProblem(f"{op.name} cannot write over {over.name}: it is a result of the step.")


Saving = tuple[int, int]  # a value, and the bytes less where it goes with the run


def savings(ways: Sequence[InPlace], sizes: np.ndarray, workspace: np.ndarray) -> tuple[tuple[Saving, ...], ...]:
    """For each op (overwritten value, bytes saved), the most first, all above 0.

    A value of no bytes is nothing to write over.

    Args:
        sizes: (V,) bytes of each value.
        workspace: (T,) bytes of a plain run of each op.
    """
    best: list[dict[int, int]] = [{} for _ in workspace]
    for way in ways:
        saved = int(sizes[way.over]) + int(workspace[way.op]) - way.workspace
        if sizes[way.over] and saved > best[way.op].get(way.over, 0):
            best[way.op][way.over] = saved
    return tuple(tuple(sorted(row.items(), key=lambda item: (-item[1], item[0]))) for row in best)
