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

import numpy as np

from checkmate.solvers.common.flat_problem import Tables


class Neighbours:
    """Follows what is evicted, and says how many seconds of it hang together with a value at hand; here, none."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evict(self, v: int) -> None:
        """Value v is gone, and can be made again."""

    def restore(self, v: int) -> None:
        """Value v is evicted no longer: it is back, or nothing will ever need it."""

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """For each of these values (N,), all at hand, the seconds (N,) beyond those of its own op."""
        return np.zeros(len(values))


class Ancestors(Neighbours):
    """The evicted ancestors, exactly: the ops that must run before a value's own op can run again.

    A sum is kept until something that belongs to it, or would, comes or goes.
    """

    descendants = False  # count, too

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.evicted = [False] * len(tables.producer)
        self.sums = np.full(len(tables.producer), np.nan)  # (V,) seconds; nan: to be found again

    def evict(self, v: int) -> None:
        """Value v joins the neighbourhoods around it."""
        self._set(v, True)

    def restore(self, v: int) -> None:
        """Value v leaves them."""
        self._set(v, False)

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the evicted neighbourhood of each of these values, each op once in either direction."""
        for v in values[np.isnan(self.sums[values])].tolist():
            self.sums[v] = 0.0
            for reach in (self._ancestors, self._made_from)[: 1 + self.descendants]:
                self.sums[v] += sum(self.tables.seconds[k] for k in sorted(self._reached(v, reach)[1]))
        return self.sums[values]

    def _set(self, v: int, evicted: bool) -> None:
        self.evicted[v] = evicted
        for reach in (self._made_from, self._ancestors)[: 1 + self.descendants]:
            self.sums[list(self._reached(v, reach)[0])] = np.nan

    def _reached(self, v: int, reach: Callable[[int], list[tuple[int, int]]]) -> tuple[set[int], set[int]]:
        """The values that are reached from v through evicted ones, with v, and the ops of those that are evicted."""
        seen, ops, todo = {v}, set[int](), [v]
        while todo:
            for w, k in reach(todo.pop()):
                if self.evicted[w]:
                    ops.add(k)
                    if w not in seen:
                        todo.append(w)
                seen.add(w)
        return seen, ops

    def _ancestors(self, v: int) -> list[tuple[int, int]]:
        """The values that v is made from, each with its own op."""
        return [(u, self.tables.producer[u]) for u in self.tables.inputs[self.tables.producer[v]]]

    def _made_from(self, v: int) -> list[tuple[int, int]]:
        """The values that are made from v, each with its own op."""
        return [(w, j) for j in self.tables.users[v] for w in self.tables.outputs[j]]


class Neighbourhood(Ancestors):
    """The evicted ancestors and the evicted descendants, exactly: h_full's e*."""

    descendants = True


class Classes(Neighbours):
    """Evicted values that hang together, in whatever direction, as classes with one sum of seconds: h_eq's ẽ*.

    Evicting merges the classes around a value. A value that comes back takes its seconds out of its class and leaves
    it; the rest stays one class even where nothing but this value held it together.
    """

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        reads = {(u, w) for k, inputs in enumerate(tables.inputs) for u in inputs for w in tables.outputs[k]}
        edges = sorted(reads | {(w, u) for u, w in reads})
        self.edge_from, self.edge_to = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        self.class_of = np.full(len(tables.producer), -1, dtype=np.int64)  # its number; -1: not evicted
        self.total: list[float] = []  # seconds of each class there ever was

    def evict(self, v: int) -> None:
        """Merge the classes around v, with v."""
        around = np.unique(self.class_of[self.edge_to[self.edge_from == v]])
        around = around[around >= 0]
        self.class_of[np.isin(self.class_of, around)] = self.class_of[v] = len(self.total)
        own = self.tables.seconds[self.tables.producer[v]]
        self.total.append(own + sum(self.total[c] for c in around.tolist()))

    def restore(self, v: int) -> None:
        """Take v and its seconds out of its class."""
        self.total[self.class_of[v]] -= self.tables.seconds[self.tables.producer[v]]
        self.class_of[v] = -1

    def seconds(self, values: np.ndarray) -> np.ndarray:
        """(N,) seconds of the classes next to each of these values, each class once."""
        V, total = len(self.class_of), np.array([*self.total, 0.0])
        wanted = np.zeros(V, dtype=bool)
        wanted[values] = True
        edges = wanted[self.edge_from] & (self.class_of[self.edge_to] >= 0)
        pairs = np.unique(self.edge_from[edges] * len(total) + self.class_of[self.edge_to[edges]])
        return np.bincount(pairs // len(total), weights=total[pairs % len(total)], minlength=V)[values]


@dataclass(frozen=True)
class Heuristic:
    """A score: seconds, or 1, over bytes and staleness, or one of them."""

    neighbours: type[Neighbours] = Neighbours
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
