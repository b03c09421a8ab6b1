"""The scores by which dynamic tensor rematerialization decides what to evict: six of Kirisame et al., ICLR 2021.

The value with the least score goes. With c the seconds of the op that makes a value, m its bytes and s the seconds
since it was last touched:

    h_full  (c + seconds of the evicted neighbourhood) / (m s)    what must run to bring it back, and what waits for it
    h_eq    the same, the neighbourhood taken from classes        cheap to keep up to date, and roughly right
    local   c / (m s)
    LRU     1 / s
    size    1 / m
    MSPS    (c + seconds of the evicted ancestors) / m

Where we differ from the paper: h_full and MSPS count an op with several evicted outputs once; h_eq counts each output.

Paper: https://arxiv.org/abs/2006.09616
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkmate.solvers.common.flat_problem import Tables


class Neighbours(Protocol):
    """Follows what is evicted, and says how many seconds of it hang together with a value at hand."""

    def evict(self, v: int) -> None:
        """Value v is gone, and can be made again."""

    def restore(self, v: int) -> None:
        """Value v is evicted no longer: it is back, or nothing will ever need it."""

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """For each of these values (N,), all at hand, the seconds (N,) beyond those of its own op."""


class NoNeighbours:
    """For scores that look at the value alone."""

    def __init__(self, tables: Tables) -> None:
        pass

    def evict(self, v: int) -> None:
        """Nothing to note."""

    def restore(self, v: int) -> None:
        """Nothing to note."""

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) zeros."""
        return np.zeros(len(values))


class Ancestors:
    """The evicted ancestors, exactly: the ops that must run before a value's own op can run again.

    A sum is kept until something that belongs to it, or would, comes or goes.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.evicted = [False] * len(tables.producer)
        self.sums = np.full(len(tables.producer), np.nan)  # (V,) seconds; nan: to be found again

    def evict(self, v: int) -> None:
        """Value v joins the ancestors of what is made from it."""
        self.evicted[v] = True
        self._forget(v)

    def restore(self, v: int) -> None:
        """Value v leaves them."""
        self.evicted[v] = False
        self._forget(v)

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the evicted neighbourhood of each of these values."""
        for v in values[np.isnan(self.sums[values])].tolist():
            self.sums[v] = self._sum(v)
        return self.sums[values]

    def _sum(self, v: int) -> float:
        return self._seconds_of(v, self._ancestors)

    def _forget(self, v: int) -> None:
        self._forget_at_the_border(v, self._made_from)

    def _seconds_of(self, v: int, reach: Callable[[int], list[tuple[int, int]]]) -> float:
        """Seconds of the ops on the way from v through evicted values, each op once."""
        ops: set[int] = set()
        seen, todo = {v}, [v]
        while todo:
            for w, k in reach(todo.pop()):
                if self.evicted[w]:
                    ops.add(k)
                    if w not in seen:
                        seen.add(w)
                        todo.append(w)
        return sum(self.tables.seconds[k] for k in sorted(ops))

    def _forget_at_the_border(self, v: int, reach: Callable[[int], list[tuple[int, int]]]) -> None:
        """Forget the sums of v and of all that is reached from it through evicted values."""
        seen, todo = {v}, [v]
        while todo:
            for w, _ in reach(todo.pop()):
                if w not in seen:
                    seen.add(w)
                    if self.evicted[w]:
                        todo.append(w)
        self.sums[list(seen)] = np.nan

    def _ancestors(self, v: int) -> list[tuple[int, int]]:
        """The values that v is made from, each with its own op."""
        return [(u, self.tables.producer[u]) for u in self.tables.inputs[self.tables.producer[v]]]

    def _made_from(self, v: int) -> list[tuple[int, int]]:
        """The values that are made from v, each with its own op."""
        return [(w, j) for j in self.tables.users[v] for w in self.tables.outputs[j]]


class Neighbourhood(Ancestors):
    """The evicted ancestors and the evicted descendants, exactly: h_full's e*."""

    def _sum(self, v: int) -> float:
        return self._seconds_of(v, self._ancestors) + self._seconds_of(v, self._made_from)

    def _forget(self, v: int) -> None:
        self._forget_at_the_border(v, self._made_from)
        self._forget_at_the_border(v, self._ancestors)


class Classes:
    """Evicted values that hang together, in whatever direction, as classes with one sum of seconds: h_eq's ẽ*.

    Evicting merges the classes around a value. A value that comes back takes its seconds out of its class and leaves
    it; the rest stays one class even where nothing but this value held it together.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        V = len(tables.producer)
        near: list[set[int]] = [set() for _ in range(V)]
        for k, inputs in enumerate(tables.inputs):
            for u in inputs:
                for w in tables.outputs[k]:
                    near[u].add(w)
                    near[w].add(u)
        self.near = [sorted(values) for values in near]
        self.edge_from = np.array([v for v, values in enumerate(self.near) for _ in values], dtype=np.int64)
        self.edge_to = np.array([w for values in self.near for w in values], dtype=np.int64)
        self.class_of = np.full(V, -1, dtype=np.int64)  # the name of a class is a value that was in it; -1: not evicted
        self.members: dict[int, set[int]] = {}
        self.total = np.zeros(V)  # seconds of the class of this name

    def evict(self, v: int) -> None:
        """Merge the classes around v, with v."""
        around = {int(self.class_of[w]) for w in self.near[v]} - {-1}
        largest = max(sorted(around), key=lambda name: len(self.members[name]), default=None)
        name = self._unused_name(v) if largest is None else largest
        self.members.setdefault(name, set()).add(v)
        self.class_of[v] = name
        self.total[name] += self.tables.seconds[self.tables.producer[v]]
        for other in sorted(around - {name}):
            moved = self.members.pop(other)
            self.class_of[list(moved)] = name
            self.members[name] |= moved
            self.total[name] += self.total[other]
            self.total[other] = 0.0

    def _unused_name(self, v: int) -> int:
        return v if v not in self.members else next(n for n in range(len(self.total)) if n not in self.members)

    def restore(self, v: int) -> None:
        """Take v and its seconds out of its class."""
        name = int(self.class_of[v])
        self.class_of[v] = -1
        self.members[name].remove(v)
        self.total[name] -= self.tables.seconds[self.tables.producer[v]]
        if not self.members[name]:
            del self.members[name]
            self.total[name] = 0.0

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the classes next to each of these values, each class once."""
        V = len(self.class_of)
        wanted = np.zeros(V, dtype=bool)
        wanted[values] = True
        edges = wanted[self.edge_from] & (self.class_of[self.edge_to] >= 0)
        pairs = np.unique(self.edge_from[edges] * V + self.class_of[self.edge_to[edges]])
        return np.bincount(pairs // V, weights=self.total[pairs % V], minlength=V)[values]


@dataclass(frozen=True)
class Heuristic:
    """A score: seconds, or 1, over bytes and staleness, or one of them."""

    neighbours: Callable[[Tables], Neighbours] = NoNeighbours
    by_seconds: bool = True
    by_bytes: bool = True
    by_staleness: bool = True

    def scores(self, seconds: np.ndarray, size: np.ndarray, stale: np.ndarray) -> np.ndarray:
        """(N,) scores of values of these seconds, bytes above 0, and staleness; infinite where that counts and is 0."""
        score = seconds if self.by_seconds else np.ones(len(seconds))
        if self.by_bytes:
            score = score / size
        if self.by_staleness:
            fresh = stale <= 0
            score = np.where(fresh, np.inf, score / np.where(fresh, 1.0, stale))
        return score


HEURISTICS = {
    "h_full": Heuristic(Neighbourhood),
    "h_eq": Heuristic(Classes),
    "local": Heuristic(),
    "LRU": Heuristic(by_seconds=False, by_bytes=False),
    "size": Heuristic(by_seconds=False, by_staleness=False),
    "MSPS": Heuristic(Ancestors, by_staleness=False),
}
