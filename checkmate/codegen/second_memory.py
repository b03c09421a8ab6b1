"""The second memory of a compiled step: a store for each call with a pending backward, opened when needed.

Each call has a store of its own, so that calls of which several are begun before a backward, or in several threads,
know nothing of each other. A store that a call gives back serves the next one; where a plan has more elsewhere than the
store has room for, a larger one takes its place.

Forward and backward of one call share an `OpenCall`, whatever other calls begin between them. A token goes from the one
to the other (`checkmate.codegen.call_token`); when it is gone, what waits is let go of.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from checkmate.capture.nodes import Held
from checkmate.codegen.call_token import call_token
from checkmate.core.graph import Graph
from checkmate.core.host import Host
from checkmate.errors import HostError, Unsupported
from checkmate.host import BLOCK, Home, Store, known_links, open_store
from checkmate.host.homes import within
from checkmate.memory.available import free_there
from checkmate.memory.report import HostUse
from checkmate.torch_internals.running import outside_tracing
from checkmate.units import exact_bytes

_LEFT = "Nobody could ask for this backward any more, and what waited in the second memory for it was let go of."
HAS_RUN = (
    "This backward has run before, and what waited in the second memory for it was let go of then: a step that is "
    "compiled with host_budget= can be differentiated once for each call. Call it again before another backward, or "
    "compile it without host_budget."
)
_GONE = (
    "What waited in the second memory for this backward is gone: hooks have put copies in the place of tensors that "
    "the forward has saved (torch.autograd.graph.saved_tensors_hooks, save_on_cpu), or the graph was taken to another "
    "process. Compile the step without host_budget where such hooks are needed."
)
_HAS_FAILED = "This call of the step has failed, and what waited in the second memory for it was let go of then."


class TensorLayout(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor with this layout in another storage."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


class Adopted(NamedTuple):
    """An input that is at home in the second memory."""

    name: str
    tensors: tuple[torch.Tensor, ...]  # in one storage
    versions: tuple[int, ...]  # which autograd counts of each


@dataclass(eq=False)
class OpenCall:
    """A call of a step, with its values in the second memory."""

    store: Store  # for this call alone
    home: SecondMemory
    is_over: str = ""  # why nothing can be had from it any more
    host_bytes: int = 0
    host_peak: int = 0
    home_bytes: int = 0
    sent: int = 0
    fetched: int = 0
    waited: float = 0.0  # seconds
    layouts: dict[int, list[TensorLayout]] = field(default_factory=dict)  # per value that is there or on its way
    bytes: dict[int, int] = field(default_factory=dict)
    kept: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # values without their own storage
    landing: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    homes: dict[int, Adopted] = field(default_factory=dict)
    overwritten: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # of these, what is not sent there yet
    held: dict[int, tuple[Held, torch.UntypedStorage]] = field(default_factory=dict)  # of these by updates, and at home
    void: set[int] = field(default_factory=set)  # of these, those of which there is no tensor

    def take(self, v: int, nbytes: int) -> None:
        """Note a value that comes to the second memory."""
        self.bytes[v] = nbytes
        self.host_bytes += nbytes
        self.host_peak = max(self.host_peak, self.host_bytes)

    def adopt(self, v: int, home: Home, adopted: Adopted) -> None:
        """Note a value with a home."""
        self.store.adopt(v, home)
        self.homes[v] = adopted
        self.home_bytes += home.nbytes
        self.take(v, home.nbytes)

    def present(self, v: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors of a value; of what updates hold, that which is in its place now, if any."""
        if v not in self.held:
            return tensors
        held, storage = self.held[v]
        tensor = held.get()
        (self.void.add if tensor is None else self.void.discard)(v)
        if tensor is not None and tensor.untyped_storage().nbytes() != storage.nbytes():
            raise Unsupported(
                f"An update has made the state {held.name!r} of a parameter of {exact_bytes(held.parameter.nbytes)}, "
                f"with {exact_bytes(tensor.untyped_storage().nbytes())} in place of {exact_bytes(storage.nbytes())}: "
                "at home in a second memory it keeps its bytes. Keep that parameter in memory."
            )
        return () if tensor is None else (tensor,)

    def leave(self, v: int) -> None:
        """Put the tensor at home in the place of what an update holds, unless that was let go of."""
        held, storage = self.held[v]
        tensor = held.get()
        if tensor is None:
            return
        tensor_storage = tensor.untyped_storage()
        if tensor_storage.data_ptr() != storage.data_ptr() and tensor_storage.nbytes() == storage.nbytes():
            held.put(within(storage, tensor))

    def wait(self, v: int) -> None:
        """Wait until a value's last copy has ended."""
        begin = time.perf_counter()
        self.store.wait(v)
        self.waited += time.perf_counter() - begin


_calls: dict[int, OpenCall] = {}  # whose backward may still come
_numbers = itertools.count()
_thread = threading.local()  # .call: the one that runs on this thread


def _leave(number: int) -> None:
    """Note that no backward can be asked for any more; called at any point, so nothing is ended here."""
    call = _calls.pop(number, None)
    if call is not None and not call.is_over:
        call.home.left.append(call)


def call_of(token: torch.Tensor) -> OpenCall:
    """The call that a saved tensor identifies."""
    call = _calls.get(int(token))
    if call is None:
        raise Unsupported(_GONE)
    return call


@contextmanager
def running(token: torch.Tensor | None) -> Iterator[None]:
    """Run a forward or backward; if it fails, free everything of its call in the second memory."""
    before = getattr(_thread, "call", None)
    _thread.call = None if token is None else call_of(token)
    try:
        yield
    except BaseException as error:
        if _thread.call is not None:
            _thread.call.home.finish(_thread.call, _HAS_FAILED, broken=isinstance(error, HostError))
        raise
    finally:
        _thread.call = before


def rounding(graph: Graph) -> int:
    """Give the bytes by which whole blocks may exceed a step's values."""
    return BLOCK * sum(value.size_bytes % BLOCK != 0 for value in graph.values if value.producer is not None)


class SecondMemory:
    """The second memory of a step.

    Args:
        where: as `checkmate.host.open_store` knows it; None: what there is beside the device.
        budget: bytes that may be there for one call; 0: most of what is free there when a step is first planned.
        device: of the step.
        cache: take what was measured of its links before, in any process, and keep what is measured now.
    """

    def __init__(self, where: str | None, budget: int, device: torch.device, *, cache: bool) -> None:
        self.where = where or ("file:" if device.type == "cpu" else "pinned")
        self.budget, self.device, self._cache = budget, device, cache
        self._calls = 0  # calls that ended with their backward
        self._last = (0, 0, 0, 0.0)  # of the call that ended last: there, sent, fetched, waited
        self._at_home = 0  # bytes of it
        self._free: list[Store] = []
        self._used: set[Store] = set()
        self.left: deque[OpenCall] = deque()  # calls to be ended
        self._books = threading.Lock()

    @property
    def use(self) -> HostUse:
        """The use of this memory in the last call."""
        with self._books:
            capacity = sum(store.capacity for store in (*self._free, *self._used))
            return HostUse(self.where, *self._last, capacity, self._calls, len(self._used), self._at_home)

    def host(self, graph: Graph, home_bytes: int = 0) -> Host:
        """Describe it for a planner, or raise a `HostError`; its links are measured once.

        Each value takes whole blocks: the most that these may exceed the values is left out of the budget.

        Args:
            home_bytes: at home there already, and not free.
        """
        with outside_tracing():  # a step is being captured
            links = known_links(self.where, self.device, cache=self._cache)
        self.budget = self.budget or free_there(self.where) + home_bytes
        return replace(links, budget=max(0, self.budget - rounding(graph)))

    def begin(self, capacity: int) -> torch.Tensor:
        """Begin a call with a capacity in bytes, or raise a `HostError`; give the tensor that identifies it."""
        while self.left:
            try:
                call = self.left.popleft()
            except IndexError:  # another thread ends it
                break
            self.finish(call, _LEFT)
        # Take the smallest free store with room for it, or open one.
        with self._books:
            fitting = [store for store in self._free if store.capacity >= capacity]
            if fitting:
                store = min(fitting, key=lambda store: store.capacity)
                self._free.remove(store)
            else:
                while self._free:  # before there is another: both may not have room
                    self._free.pop().close()
                store = open_store(self.where, capacity, self.device)
            self._used.add(store)
        number = next(_numbers)
        _thread.call = _calls[number] = OpenCall(store, self)
        return call_token(number, partial(_leave, number))

    def finish(self, call: OpenCall, why: str, *, broken: bool = False) -> None:
        """End a call: stop its transfers and free its bytes, but send home what was overwritten.

        Args:
            why: what is said to who asks all the same; ``HAS_RUN`` if the backward has run to its end.
            broken: the store is of no more use.

        Raises:
            HostError: if a home may have bytes from before and after.
        """
        if call.is_over:
            return
        call.is_over, failed = why, None
        try:
            for v, storage in call.overwritten.items():
                call.store.send(v, storage)
            if call.bytes and not broken:  # the code of a part of the backward, or an error
                call.store.reset()
        except HostError as error:
            broken, failed = True, error
        for v in call.held:
            call.leave(v)
        for table in (call.held, call.kept, call.landing, call.bytes, call.layouts, call.overwritten):
            table.clear()
        if broken:
            call.store.close()
        with self._books:
            self._used.discard(call.store)
            if not broken:
                self._free.append(call.store)
            if why == HAS_RUN:
                self._calls += 1
                self._last = (call.host_peak, call.sent, call.fetched, call.waited)
                self._at_home = call.home_bytes
        has_homes = bool(call.homes)
        call.homes.clear()
        if failed is not None and has_homes:
            raise failed


class SecondMemories:
    """A `SecondMemory` per device on which a step is captured, with the same arguments."""

    def __init__(self, where: str | None, budget: int, *, cache: bool) -> None:
        self._where, self._budget, self._cache = where, budget, cache
        self.by_device: dict[torch.device, SecondMemory] = {}

    def on(self, device: torch.device) -> SecondMemory:
        """The second memory of a device."""
        if device not in self.by_device:
            self.by_device[device] = SecondMemory(self._where, self._budget, device, cache=self._cache)
        return self.by_device[device]

    def uses(self) -> tuple[HostUse, ...]:
        """The use of each second memory in its last call."""
        return tuple(memory.use for memory in self.by_device.values())
