"""Kinds of calls: the shapes and types of their tensors, with some sizes open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkmate.torch_internals.capturing import maybe_mark_dynamic


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    >>> short, long = (Kind.of((torch.ones(4, length), True), {}) for length in (7, 9))
    >>> short.opened(long).includes(Kind.of((torch.ones(4, 300), True), {}))
    True
    >>> short.opened(long).includes(Kind.of((torch.ones(5, 7), True), {}))
    False
    """

    types: Any  # of all that is given, down to the leaves of containers; numbers are left to guards
    sizes: tuple[int | None, ...]  # of all tensors, one after another; None: any size of two or more

    @classmethod
    def of(cls, args: Any, kwargs: Any, beside: Any = None) -> Kind:
        """The kind of a call with these arguments; calls of one kind have equal ``beside``."""
        tensors: list[torch.Tensor] = []
        types = beside, _types((args, kwargs), tensors)
        return cls(types, tuple(size for tensor in tensors for size in tensor.shape))

    def includes(self, call: Kind) -> bool:
        """Tell whether a call of another kind is of this one too."""
        if self.types != call.types:
            return False
        pairs = zip(self.sizes, call.sizes, strict=True)
        return all(n == m or (n is None and m is not None and m > 1) for n, m in pairs)

    def opened(self, call: Kind) -> Kind | None:
        """The kind with all sizes open that differ in a call; None if more differs, or none, or a size is 0 or 1.

        Such sizes are captured by themselves: they decide what is broadcast, and what is computed at all.
        """
        if self.types != call.types or self.sizes == call.sizes:
            return None
        pairs = [*zip(self.sizes, call.sizes, strict=True)]
        if any(n != m and min(n or 2, m or 2) < 2 for n, m in pairs):
            return None
        return replace(self, sizes=tuple(n if n == m else None for n, m in pairs))

    @contextmanager
    def marked(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Have Dynamo take open sizes of these arguments for inputs within the block, unless the step fixes them."""
        tensors: list[torch.Tensor] = []
        _types((args, kwargs), tensors)
        sizes = iter(self.sizes)
        before: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}  # what the user has marked
        try:
            for tensor in tensors:
                for dim in [dim for dim, size in enumerate([next(sizes) for _ in tensor.shape]) if size is None]:
                    for marked, d in _same(tensor, dim):
                        before.setdefault(id(marked), (marked, deepcopy(_marks(marked))))
                        maybe_mark_dynamic(marked, d)
            yield
        finally:
            for marked, marks in before.values():
                for name in _marks(marked):
                    delattr(marked, name)
                vars(marked).update(marks)


def _marks(tensor: torch.Tensor) -> dict[str, Any]:
    """Dynamo's notes on a tensor, such as its marked sizes."""
    return {name: value for name, value in vars(tensor).items() if "_dynamo" in name}


def _same(tensor: torch.Tensor, dim: int) -> Iterator[tuple[torch.Tensor, int]]:
    """A dimension of a tensor, and the same one of its base."""
    yield tensor, dim
    base = tensor._base
    if base is not None:
        pairs = zip(base.shape, base.stride(), strict=True)
        yield from ((base, d) for d, pair in enumerate(pairs) if pair == (tensor.shape[dim], tensor.stride(dim)))


def _types(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The types of a call, without sizes; append its tensors."""
    if isinstance(tree, torch.Tensor) and not tree.is_nested:
        tensors.append(tree)
        return tree.dim(), tree.dtype, tree.device, tree.requires_grad, tree.is_leaf
    kind = type(tree)
    if kind in (tuple, list):
        return kind, *(_types(item, tensors) for item in tree)
    if kind is dict:
        return kind, *((name, _types(value, tensors)) for name, value in tree.items())
    return tree if kind in (bool, str) else kind
