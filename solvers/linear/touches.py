"""All pairs of a value and an op that makes or reads it, as arrays: the columns of FREE and OVER in exact models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from checkmate.core.problem import Problem


@dataclass(frozen=True, eq=False)
class Touches:
    """Who reads or makes the values that a schedule may keep: those with a producer and users that are no results.

    A touch is a pair of a value and an op that makes or reads it. The touches of a value stand together, its producer's
    first and then its users' in order.
    """

    value: np.ndarray  # (E,) int
    op: np.ndarray  # (E,) int
    made_by: np.ndarray  # (E,) int: the producer of the value
    saved: np.ndarray  # (E,) int64: bytes less while the op runs if it writes over the value; 0 where it cannot
    earlier: tuple[np.ndarray, np.ndarray]  # pairs (e, i) of touches of one value, i before e

    @classmethod
    def of(cls, problem: Problem) -> Touches:
        """The touches of a problem."""
        graph = problem.graph
        pairs: list[tuple[int, int, int]] = []
        earlier: list[tuple[int, int]] = []
        for v, value in enumerate(graph.values):
            if value.producer is None or v in graph.outputs or not graph.users[v]:
                continue
            first = len(pairs)
            pairs += [(v, k, value.producer) for k in (value.producer, *graph.users[v])]
            earlier += [(e, i) for e in range(first, len(pairs)) for i in range(first, e)]
        savings = [dict(of) for of in problem.savings]
        saved = np.array([savings[k].get(v, 0) for v, k, _ in pairs], dtype=np.int64)
        value_, op, made_by = np.array(pairs, dtype=np.int64).reshape(-1, 3).T
        late, early = np.array(earlier, dtype=np.int64).reshape(-1, 2).T
        return cls(value_, op, made_by, saved, (late, early))

    @property
    def reads(self) -> np.ndarray:
        """(E,) bool: the op reads the value, and does not make it."""
        return self.op != self.made_by

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """The values that may be kept, ascending, and their producers."""
        v, first = np.unique(self.value, return_index=True)
        return v, self.made_by[first]
