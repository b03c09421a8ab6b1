"""Tensors and random states that a step can change: found, named, compared by bits, restored."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from checkmate.capture.device import main_device, same_random_state
from checkmate.capture.sharded.shards import local
from checkmate.memory import CPU
from checkmate.torch_internals.running import keystr, tree_flatten_with_path, tree_leaves


def tensors_within(things: Any) -> list[torch.Tensor]:
    """Parameters, buffers and inputs within reach of a call: in its arguments and in objects that a function holds."""
    return list({id(tensor): tensor for _, tensor in _named_within(things)}.values())


def _named_within(things: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for thing in _reached(things, through=(nn.Module, torch.Tensor, FunctionType, MethodType, partial)):
        if isinstance(thing, torch.Tensor):
            yield "", thing
        else:
            yield from thing.named_parameters()
            yield from thing.named_buffers()


def modules_within(things: Any, depth: int = 3) -> list[nn.Module]:
    """The modules within reach of a call: in its arguments and in objects that a function or an object holds."""
    return list({id(module): module for module in _reached(things, depth) if isinstance(module, nn.Module)}.values())


def held_modules(fn: Any, args: tuple[Any, ...]) -> list[nn.Module]:
    """The modules among the arguments and in a function's closure, globals and defaults."""
    return modules_within((fn, getattr(fn, "__func__", None), args), depth=1)


def _reached(things: Any, depth: int = 3, through: tuple[type, ...] = (object,)) -> Iterator[torch.Tensor | nn.Module]:
    """Find tensors and modules in a tree, and up to ``depth`` deep in objects, of types ``through`` in functions."""
    for leaf in tree_leaves(things):
        if isinstance(leaf, (torch.Tensor, nn.Module)):
            yield leaf
        elif not depth or isinstance(leaf, (type, ModuleType)):
            continue
        elif isinstance(leaf, FunctionType):
            # Objects in its closure, globals that it reads, and defaults.
            objects: list[Any] = []
            for cell in leaf.__closure__ or ():
                with suppress(ValueError):  # of a name that has no value yet, or no longer
                    objects.append(cell.cell_contents)
            objects += [leaf.__globals__[name] for name in leaf.__code__.co_names if name in leaf.__globals__]
            objects += [*(leaf.__defaults__ or ()), *(leaf.__kwdefaults__ or {}).values()]
            yield from _reached([x for x in objects if isinstance(x, through)], depth - 1, through)
        elif isinstance(leaf, partial):
            yield from _reached((leaf.func, leaf.args, leaf.keywords), depth - 1, through)
        elif hasattr(leaf, "__self__"):
            yield from _reached((leaf.__self__, getattr(leaf, "__func__", None)), depth - 1, through)
        elif hasattr(leaf, "__dict__"):
            yield from (x for x in vars(leaf).values() if isinstance(x, (nn.Module, torch.Tensor)))


def names_of(state: list[torch.Tensor], things: Any) -> dict[int, str]:
    """Name each tensor, by id, as its module does; numbered if two modules have the same name."""
    names = {id(t): name for name, t in reversed([*_named_within(things)])}
    times = Counter(names.values())
    return {
        id(t): (name if times[name] == 1 else f"{name} (tensor {i})") if (name := names[id(t)]) else f"tensor {i}"
        for i, t in enumerate(state)
    }


def unchanged(things: Any) -> AbstractContextManager[None]:
    """Restore all tensors within reach, and the random state, after the block."""
    return restored(tensors_within(things))


@contextmanager
def restored(state: list[torch.Tensor]) -> Iterator[None]:
    """Restore tensors and the random state. The copies are on the CPU, where no budget counts them.

    What autocast keeps of weights that it has converted is let go before the block and after it.
    """
    saved = [t.detach().to(CPU, copy=True) for t in state]
    torch.clear_autocast_cache()
    try:
        with same_random_state(main_device(state)), drawing_nothing():
            yield
    finally:
        torch.clear_autocast_cache()
        with torch.no_grad():
            for tensor, value in zip(state, saved, strict=True):
                if not same_bits(tensor.detach().to(CPU), value):
                    tensor.copy_(value)


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Restore, after the block, the generators from which captured code draws before its graph runs."""
    before = other_random_states()
    try:
        yield
    finally:
        draw_again_from(before)


def other_random_states() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators, from which captured code draws before its graph runs."""
    return random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002  # the user's generator


def draw_again_from(states: tuple[Any, Any] | None) -> None:
    """Restore the generators after a tried capture turns out to be for another call."""
    if states is not None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Tell whether two tensors exist and have the same shape, type and bits, signs of zero and NaNs included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_as_bytes(a), _as_bytes(b))  # noqa: TID251  # of bytes


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as read: lazy conjugates, negatives and zeros are written out."""
    tensor = local(tensor.detach())
    plain = torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor.resolve_conj().resolve_neg()
    flat = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device).copy_(plain)
    return flat.view(-1).view(torch.uint8)


def differing(actual: Any, expected: Any) -> list[str]:
    """List the places where two trees of tensors, arrays and numbers differ in bits; other leaves compare by value.

    >>> differing({"loss": torch.zeros(1), "seen": 3}, {"loss": -torch.zeros(1), "seen": 3})
    ["['loss']"]
    """
    a, b = _by_path(actual), _by_path(expected)
    return [path for path in {**b, **a} if path not in a or path not in b or not _same_leaf(a[path], b[path])]


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = tree_flatten_with_path(list(tree) if isinstance(tree, Iterator) else tree)
    return {keystr(path): leaf for path, leaf in leaves}


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, float, complex)):
        x, y = np.asarray(a), np.asarray(b)
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    return bool(a == b)
