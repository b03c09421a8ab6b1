"""The calls of generated code to a second memory: send, fetch, wait, drop.

A value is a storage. `send` begins to copy it there, and `arrive` waits for that; `fetch` allocates a storage on the
thread of the step, by the allocator that serves the step, and begins to copy into it; `land` waits for that, and gives
the tensors that the value's op has made, in the new storage; `drop` lets the copy there go. Views are made anew from
these, as from a value that was made again.

An input may be at home there: `adopt` says so when the call begins, and the input is not here until it is fetched. So
may what an update holds beside its arguments (`adopt_held`); what has landed of it stands in its place until `leave`.
Once an op has written to what has landed, `overwrite` says so: until that is sent, it alone has the new bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.autograd.graph import increment_version
from torch.fx.node import has_side_effect

from checkmate.capture.nodes import Held
from checkmate.codegen.second_memory import HAS_RUN, Adopted, OpenCall, TensorLayout, call_of, running
from checkmate.core.graph import Graph
from checkmate.core.plan import Drop, Plan, Send
from checkmate.errors import HostError, Unsupported
from checkmate.host import HOMES, home_of, rounded
from checkmate.torch_internals.running import functorch

IS_CALL = "is_call"  # in the meta data of the placeholder through which a backward is told its call


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor is exactly the bytes of its storage."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _at_work(token: torch.Tensor) -> OpenCall:
    call = call_of(token)
    if call.is_over:
        raise Unsupported(call.is_over)
    return call


@has_side_effect
def send(token: torch.Tensor, v: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Begin to copy a value into the second memory; its tensors stay until the copy has ended."""
    call = _at_work(token)
    tensors = call.present(v, tensors)
    if v in call.void:
        return token
    # Wrappers of several tensors, and tensors without data, stay here.
    if not all(map(_is_plain, tensors)):
        call.kept[v] = tensors
        return token
    storage = tensors[0].untyped_storage()
    call.store.send(v, storage)
    call.sent += storage.nbytes()
    call.overwritten.pop(v, None)
    if v not in call.homes:
        call.take(v, storage.nbytes())
    else:
        home = call.homes[v]
        increment_version(home.tensors)  # as their memory changes beside PyTorch
        call.homes[v] = home._replace(versions=tuple(t._version for t in home.tensors))
    if v not in call.layouts:
        call.layouts[v] = _layouts(tensors, tensors[0].device)
    return token


@has_side_effect
def adopt(token: torch.Tensor, v: int, name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """Take an input for a value that is in the second memory: in the home of its storage."""
    call = _at_work(token)
    home = home_of(tensors[0])
    if home is None:
        raise HostError(
            f"{name} is planned to be at home in the second memory, and is an ordinary tensor now. Call "
            "checkmate.in_file for its model again, as after load_state_dict(..., assign=True). If the step puts "
            "another tensor in the place of a buffer, have it write to the buffer: self.buffer.copy_(...)."
        )
    call.adopt(v, home, Adopted(name, tensors, tuple(t._version for t in tensors)))
    call.layouts[v] = _layouts(tensors, call.home.device)
    return token


@has_side_effect
def adopt_held(token: torch.Tensor, held: Mapping[int, Held]) -> torch.Tensor:
    """Take what updates hold for values that are in the second memory; what has no home there gets one.

    A home has its bytes before there is a tensor, which the first update makes.
    """
    call = _at_work(token)
    tensors = {v: state.get() for v, state in held.items()}
    new = [v for v, tensor in tensors.items() if tensor is None or home_of(tensor) is None]
    storages: dict[int, torch.UntypedStorage] = {}
    homes: dict[int, Any] = {v: home_of(held[v].parameter) for v in new}
    for home in {home.place: home for home in homes.values()}.values():
        values = [v for v in new if homes[v].place == home.place]
        storages.update(zip(values, home.beside([held[v].nbytes for v in values]), strict=True))
    for v, state in held.items():
        tensor = tensors[v]
        if tensor is not None and v in storages:
            # What was loaded may be a view of more.
            if tensor.untyped_storage().nbytes() != storages[v].nbytes():
                state.put(tensor := tensor.clone())
            storages[v].copy_(tensor.untyped_storage())
        storage = storages[v] if tensor is None or v in storages else tensor.untyped_storage()
        call.held[v] = state, storage
        call.adopt(v, HOMES[storage.data_ptr()], Adopted(state.name, (), ()))
        if tensor is None:
            call.void.add(v)
        else:
            call.layouts[v] = _layouts((tensor,), call.home.device)
            call.leave(v)
    return token


@has_side_effect
def leave(token: torch.Tensor, v: int) -> torch.Tensor:
    """Put the tensor at home back in the place of what has landed of it."""
    _at_work(token).leave(v)
    return token


@has_side_effect
def overwrite(token: torch.Tensor, v: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Note that an op has written to what has landed from a home."""
    call = _at_work(token)
    tensors = call.present(v, tensors)
    if v not in call.void:
        call.overwritten[v] = tensors[0].untyped_storage()
    return token


def _layouts(tensors: Sequence[torch.Tensor], device: torch.device) -> list[TensorLayout]:
    """The layouts of tensors that lie on a device."""
    return [TensorLayout(t.dtype, device, int(t.storage_offset()), tuple(t.shape), t.stride()) for t in tensors]


@has_side_effect
def arrive(token: torch.Tensor, v: int, *tensors: torch.Tensor) -> torch.Tensor:
    """Wait until a value is in the second memory. Its tensors are read so that they stay until then."""
    call = _at_work(token)
    if v not in call.kept and v not in call.void:
        call.wait(v)
    return token


@has_side_effect
def fetch(token: torch.Tensor, v: int) -> torch.Tensor:
    """Begin to copy a value back into memory that is allocated now."""
    call = _at_work(token)
    if v not in call.kept and v not in call.void:
        landing = torch.empty(call.bytes[v], dtype=torch.uint8, device=call.layouts[v][0].device).untyped_storage()
        call.store.fetch(v, landing)
        call.landing[v] = landing
        call.fetched += call.bytes[v]
    return token


@has_side_effect
def land(token: torch.Tensor, v: int) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """The tensors of a value once it is back; the tensor itself for one, None for what is not there yet."""
    call = _at_work(token)
    if v in call.void:
        return None
    tensors = call.kept.get(v)
    if tensors is None:
        call.wait(v)
        landing, home = call.landing.pop(v), call.homes.get(v)
        if home is not None and home.versions != tuple(t._version for t in home.tensors):
            raise Unsupported(
                f"{home.name}, which the backward needs, was written to between the step and its backward. Call "
                "backward() before it is written to, before optimizer.step() for example."
            )
        tensors = tuple(layout.within(landing) for layout in call.layouts[v])
    if v in call.held:
        call.held[v][0].put(tensors[0])
    return tensors[0] if len(tensors) == 1 else tensors


@has_side_effect
def drop(token: torch.Tensor, v: int) -> torch.Tensor:
    """Free the copy in the second memory."""
    call = _at_work(token)
    if call.kept.pop(v, None) is None:
        call.store.drop(v)
        call.host_bytes -= call.bytes.pop(v)
        del call.layouts[v]
    return token


@has_side_effect
def finish(token: torch.Tensor) -> None:
    """Note the end of the backward."""
    call = call_of(token)
    call.home.finish(call, HAS_RUN)


def no_second_memory(capacity: int) -> torch.Tensor:
    """Raise a `HostError`: this code was written for a plan without a step."""
    raise HostError(
        f"This plan has {capacity} bytes of values wait in a second memory, and there is none: it was made for a "
        "problem, and not by checkmate.compile(..., host_budget=...), which opens one."
    )


def most_there(plan: Plan, graph: Graph, homes: Container[int] = ()) -> int:
    """Bytes of the second memory at a plan's peak there, in whole blocks per value, beside those of homes."""
    level = most = 0
    for step in plan.steps:
        if isinstance(step, (Send, Drop)) and step.value not in homes:
            size = rounded(graph.values[step.value].size_bytes)
            level += size if isinstance(step, Send) else -size
            most = max(most, level)
    return most


def ending_calls(graph: fx.Graph, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The function of a graph, which frees its call's values in the second memory if it fails."""
    positions = [i for i, node in enumerate(graph.find_nodes(op="placeholder")) if IS_CALL in node.meta]
    if not positions and not any(node.target in (adopt, adopt_held, send, fetch) for node in graph.nodes):
        return run

    def guarded(inputs: list[Any]) -> Any:
        with running(inputs[positions[0]] if positions else None):
            return run(inputs)

    return guarded


def as_made(node: fx.Node) -> fx.Node:
    """The first node of a value that a module sends and fetches; other nodes unchanged."""
    face, place = node, 0
    if face.target is operator.getitem:
        face, place = face.args  # type: ignore[assignment]
    if not isinstance(face, fx.Node) or face.target is not land:
        return node
    sent = face.args[0]
    if not isinstance(sent, fx.Node) or sent.target is not send:
        return node
    origin = sent.args[2 + place]
    return as_made(origin) if isinstance(origin, fx.Node) else node
