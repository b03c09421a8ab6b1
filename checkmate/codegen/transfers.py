"""What generated code calls to have values wait in a second memory, and the calls of a step that it does so for.

A value is a storage. `send` begins to copy it there, and `arrive` waits for that; `fetch` allocates a storage on the
thread of the step, by the allocator that serves the step, and begins to copy into it; `land` waits for that, and gives
the tensors that the value's op has made, in the new storage; `drop` lets the copy there go. Views are made anew from
these, as from a value that was made again.

Forward and backward of one call share a `Call`, whatever other calls begin between them. A small tensor goes from the
one to the other among the saved ones and says which call it is: its memory is not PyTorch's, and counts in no peak.
When that tensor is gone, nobody can ask for the backward any more, and what waits is let go of.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.fx as fx
from torch.fx.node import has_side_effect

from checkmate.core.graph import Graph
from checkmate.core.plan import Drop, Fetch, Plan, Send, Step, Wait
from checkmate.errors import HostError, Unsupported
from checkmate.host import Store, rounded
from checkmate.torch_internals.descriptions import FakeTensor
from checkmate.torch_internals.dispatcher import functorch

_IS_CALL = "is_call"  # in the meta data of the placeholder through which a backward is told its call


class Home(Protocol):
    """Where the stores of calls come from, and go when these are over."""

    def come_back(self, call: Call, *, broken: bool) -> None:
        """The backward of a call has ended, or the step has failed; its store holds nothing, or is of no more use."""

    def ended(self, call: Call) -> None:
        """The backward of a call has run to its end."""

    def left_behind(self, call: Call) -> None:
        """Nobody can ask for the backward of a call any more. This may be called at any point of the program."""


class _Face(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same in another storage."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


class Call:
    """One call of a step: which of its values wait elsewhere.

    Args:
        store: for this call alone.
        home: where it comes from.
    """

    def __init__(self, store: Store, home: Home) -> None:
        self.store, self._home = store, home
        self.is_over = ""  # why nothing can be had from it any more
        self.there = self.peak_there = self.sent = self.fetched = 0  # bytes
        self.waited = 0.0  # seconds
        self._faces: dict[int, list[_Face]] = {}  # of each value that is there or on its way
        self._bytes: dict[int, int] = {}
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}  # what has no storage of its own, and so stays here
        self._landing: dict[int, torch.UntypedStorage] = {}

    def send(self, v: int, faces: tuple[torch.Tensor, ...]) -> None:
        """Begin to copy a value there. What stands for several tensors, or for none with data, stays here."""
        self._refuse_if_over()
        if not all(map(_is_plain, faces)):
            self._kept[v] = faces
            return
        storage = faces[0].untyped_storage()
        self.store.send(v, storage)
        self._faces[v] = [_Face(t.dtype, t.device, int(t.storage_offset()), tuple(t.shape), t.stride()) for t in faces]
        self._bytes[v] = storage.nbytes()
        self.sent += storage.nbytes()
        self.there += storage.nbytes()
        self.peak_there = max(self.peak_there, self.there)

    def arrive(self, v: int) -> None:
        """Wait until a value is there."""
        self._refuse_if_over()
        if v not in self._kept:
            self._wait(v)

    def fetch(self, v: int) -> None:
        """Begin to copy a value back."""
        self._refuse_if_over()
        if v not in self._kept:
            landing = torch.UntypedStorage(self._bytes[v], device=self._faces[v][0].device)
            self.store.fetch(v, landing)
            self._landing[v] = landing
            self.fetched += self._bytes[v]

    def land(self, v: int) -> tuple[torch.Tensor, ...]:
        """Wait until a value is back: its tensors."""
        self._refuse_if_over()
        if v in self._kept:
            return self._kept[v]
        self._wait(v)
        landing = self._landing.pop(v)
        return tuple(face.within(landing) for face in self._faces[v])

    def drop(self, v: int) -> None:
        """Let go of the copy there."""
        self._refuse_if_over()
        if self._kept.pop(v, None) is None:
            self.store.drop(v)
            self.there -= self._bytes.pop(v)
            del self._faces[v]

    def finish(self, why: str, *, broken: bool = False) -> None:
        """Nothing is asked for any more: what still goes on ends, and what is there is let go of."""
        if self.is_over:
            return
        self.is_over = why
        try:
            if self._bytes and not broken:  # the code of a part of the backward, or an error
                self.store.reset()
        except HostError:
            broken = True
        self._kept.clear()
        self._landing.clear()
        self._bytes.clear()
        self._faces.clear()
        self._home.come_back(self, broken=broken)

    def end(self) -> None:
        """The backward has run to its end."""
        if not self.is_over:
            self.finish(_BACKWARD_HAS_RUN)
            self._home.ended(self)

    def left_behind(self) -> None:
        """Nobody can ask for the backward any more."""
        if not self.is_over:
            self._home.left_behind(self)

    def _wait(self, v: int) -> None:
        begin = time.perf_counter()
        self.store.wait(v)
        self.waited += time.perf_counter() - begin

    def _refuse_if_over(self) -> None:
        if self.is_over:
            raise Unsupported(self.is_over)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is the bytes of its storage and nothing else."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


_calls: dict[int, Call] = {}  # whose backward may still come
_numbers = itertools.count()
_here = threading.local()  # .call: the one that runs on this thread

_BACKWARD_HAS_RUN = (
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


def new_call(store: Store, home: Home) -> torch.Tensor:
    """Begin a call: what says to all that follows which one it is."""
    number = next(_numbers)
    memory = np.array([number], dtype=np.int64)
    _here.call = _calls[number] = Call(store, home)
    weakref.finalize(memory, _leave, number).atexit = False
    return torch.from_numpy(memory)


def _leave(number: int) -> None:
    call = _calls.pop(number, None)
    if call is not None:
        call.left_behind()


def _call(token: torch.Tensor) -> Call:
    call = _calls.get(int(token))
    if call is None:
        raise Unsupported(_GONE)
    return call


@contextmanager
def _running(token: torch.Tensor | None) -> Iterator[None]:
    """Run a forward or a backward: where it fails, whatever its call has elsewhere is let go of."""
    before = getattr(_here, "call", None)
    _here.call = None if token is None else _call(token)
    try:
        yield
    except BaseException as error:
        if _here.call is not None:
            _here.call.finish(_HAS_FAILED, broken=isinstance(error, HostError))
        raise
    finally:
        _here.call = before


def no_second_memory(capacity: int) -> torch.Tensor:
    """What the code of a plan calls that was made for no step.

    Raises:
        HostError: always.
    """
    raise HostError(
        f"This plan has {capacity} bytes of values wait in a second memory, and there is none: it was made for a "
        "problem, and not by checkmate.compile(..., host_budget=...), which opens one."
    )


@has_side_effect
def send(token: torch.Tensor, v: int, *faces: torch.Tensor) -> torch.Tensor:
    """Begin to copy a value into the second memory; its tensors stay until it has arrived."""
    _call(token).send(v, faces)
    return token


@has_side_effect
def arrive(token: torch.Tensor, v: int, *faces: torch.Tensor) -> torch.Tensor:
    """Go on when a value is in the second memory. Its tensors are read so that they stay until then."""
    _call(token).arrive(v)
    return token


@has_side_effect
def fetch(token: torch.Tensor, v: int) -> torch.Tensor:
    """Begin to copy a value back, into memory that is allocated now."""
    _call(token).fetch(v)
    return token


@has_side_effect
def land(token: torch.Tensor, v: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The tensors of a value when it is back; the tensor itself where it is one."""
    faces = _call(token).land(v)
    return faces[0] if len(faces) == 1 else faces


@has_side_effect
def drop(token: torch.Tensor, v: int) -> torch.Tensor:
    """Let go of the copy in the second memory."""
    _call(token).drop(v)
    return token


@has_side_effect
def finish(token: torch.Tensor) -> None:
    """The backward has ended."""
    _call(token).end()


@dataclass(frozen=True)
class Land:
    """In a plan that is being written: the `Wait` of a value that comes back."""

    value: int


def told_apart(steps: Sequence[Step]) -> list[Step | Land]:
    """The steps of a plan, where waiting for what comes back is told from waiting for what goes."""
    told: list[Step | Land] = []
    going: dict[int, Step] = {}
    for step in steps:
        if isinstance(step, (Send, Fetch)):
            going[step.value] = step
        is_back = isinstance(step, Wait) and isinstance(going.get(step.value), Fetch)
        told.append(Land(step.value) if is_back else step)  # type: ignore[union-attr]  # it is a Wait
    return told


def most_there(plan: Plan, graph: Graph) -> int:
    """Bytes that a second memory needs for what a plan has there at once: it takes whole blocks for each value."""
    there = most = 0
    for step in plan.steps:
        if isinstance(step, (Send, Drop)):
            size = rounded(graph.values[step.value].size_bytes)
            there += size if isinstance(step, Send) else -size
            most = max(most, there)
    return most


def as_fake_call(nodes: Iterable[fx.Node]) -> torch.Tensor:
    """What stands for a call among the fake tensors of a graph."""
    modes = [val.fake_mode for n in nodes if isinstance(val := n.meta.get("val"), FakeTensor)]
    with modes[0] if modes else nullcontext():
        return torch.empty(1, dtype=torch.int64, device="cpu")


def mark_call(placeholder: fx.Node) -> None:
    """Say that a backward is told its call there."""
    placeholder.meta[_IS_CALL] = True


def ending_calls(graph: fx.Graph, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function of a graph after which nothing stays elsewhere if it fails."""
    given = [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if _IS_CALL in node.meta]
    if not given and not any(node.target in (send, fetch) for node in graph.nodes):
        return run

    def guarded(inputs: list[Any]) -> Any:
        with _running(inputs[given[0]] if given else None):
            return run(inputs)

    return guarded


def as_made(node: fx.Node) -> fx.Node:
    """What stands where a value was made that a module sends and fetches back, a node itself where it does not."""
    face, place = node, 0
    if face.target is operator.getitem:
        face, place = face.args  # type: ignore[assignment]
    if not isinstance(face, fx.Node) or face.target is not land:
        return node
    sent = face.args[0]
    if not isinstance(sent, fx.Node) or sent.target is not send:
        return node
    made = sent.args[2 + place]
    return as_made(made) if isinstance(made, fx.Node) else node
