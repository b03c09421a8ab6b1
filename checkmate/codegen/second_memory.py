"""The second memory of a compiled step: a store for each call whose backward may still come, opened when one is needed.

Each call has a store of its own, so that calls of which several are begun before a backward, or in several threads,
know nothing of each other. A store that a call gives back serves the next one; where a plan has more elsewhere than the
store has room for, a larger one takes its place.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from checkmate.codegen.transfers import Call, new_call
from checkmate.core.graph import Graph
from checkmate.core.host import Host
from checkmate.host import BLOCK, Store, known_links, open_store
from checkmate.memory.report import HostUse
from checkmate.torch_internals.dispatcher import _disable_current_modes

_LEFT = "Nobody could ask for this backward any more, and what waited in the second memory for it was let go of."


class SecondMemory:
    """Where values of a step wait.

    Args:
        where: as `checkmate.host.open_store` knows it; None: what there is beside the device.
        budget: bytes that may be there for one call.
        device: of the step.
        cache: take what was measured of its links before, in any process, and keep what is measured now.
    """

    def __init__(self, where: str | None, budget: int, device: torch.device, *, cache: bool) -> None:
        self.where = where or ("pinned" if device.type == "cuda" else "file:")
        self.budget, self.device, self._cache = budget, device, cache
        self._calls = 0  # that have ended with their backward
        self._last = (0, 0, 0, 0.0)  # of the call that ended last: there, sent, fetched, waited
        self._free: list[Store] = []
        self._used: set[Store] = set()
        self._left: deque[Call] = deque()  # calls to be ended
        self._books = threading.Lock()

    @property
    def use(self) -> HostUse:
        """What waited here."""
        with self._books:
            taken = sum(store.capacity for store in (*self._free, *self._used))
            return HostUse(self.where, *self._last, taken, self._calls, len(self._used))

    def host(self, graph: Graph) -> Host:
        """What a planner needs to know of it, its links measured if that was not done before.

        It takes whole blocks for each value: what these may be more than the values is left out of the budget.

        Raises:
            HostError: if it cannot be had.
        """
        with _disable_current_modes():  # a step is being captured
            links = known_links(self.where, self.device, cache=self._cache)
        rest = sum(value.size_bytes % BLOCK != 0 for value in graph.values if value.producer is not None)
        room = max(0, self.budget - rest * BLOCK)
        return Host(room, links.send, links.fetch, one_link=links.shared, latency=links.latency)

    def begin(self, capacity: int) -> torch.Tensor:
        """Begin a call that has so many bytes elsewhere, at most.

        Raises:
            HostError: if there is no room for them.
        """
        self._end_what_was_left()
        return new_call(self._taken(capacity), self)

    def come_back(self, call: Call, *, broken: bool) -> None:
        """A call has ended."""
        if broken:
            call.store.close()
        with self._books:
            self._used.discard(call.store)
            if not broken:
                self._free.append(call.store)

    def ended(self, call: Call) -> None:
        """A call has ended with its backward."""
        with self._books:
            self._calls += 1
            self._last = (call.peak_there, call.sent, call.fetched, call.waited)

    def left_behind(self, call: Call) -> None:
        """A call is to be ended, which waits for copies: not now, since that may be in the middle of anything."""
        self._left.append(call)

    def close(self) -> None:
        """Let what no call uses go."""
        self._end_what_was_left()
        with self._books:
            free, self._free = self._free, []
        for store in free:
            store.close()

    def _taken(self, capacity: int) -> Store:
        with self._books:
            fitting = [store for store in self._free if store.capacity >= capacity]
            if fitting:
                store = min(fitting, key=lambda store: store.capacity)
                self._free.remove(store)
                self._used.add(store)
                return store
            small, self._free = self._free, []
        for store in small:  # before there is another: both may not have room
            store.close()
        store = open_store(self.where, capacity, self.device)
        with self._books:
            self._used.add(store)
        return store

    def _end_what_was_left(self) -> None:
        while self._left:
            try:
                call = self._left.popleft()
            except IndexError:  # another thread does
                return
            call.finish(_LEFT)


class SecondMemories:
    """A `SecondMemory` for each device on which a step is captured; for the arguments see there."""

    def __init__(self, where: str | None, budget: int, *, cache: bool) -> None:
        self._where, self._budget, self._cache = where, budget, cache
        self.by_device: dict[torch.device, SecondMemory] = {}

    def on(self, device: torch.device) -> SecondMemory:
        """The one for a device."""
        if device not in self.by_device:
            self.by_device[device] = SecondMemory(self._where, self._budget, device, cache=self._cache)
        return self.by_device[device]

    def uses(self) -> tuple[HostUse, ...]:
        """What waited in each."""
        return tuple(memory.use for memory in self.by_device.values())
