"""A batch of another size, by the first dimension that its tensors share."""

from __future__ import annotations

from typing import Any

import torch

from checkmate.capture.nodes import storage
from checkmate.errors import Unsupported
from checkmate.torch_internals.running import tree_leaves, tree_map_only
from checkmate.tracing import Batch


def size_of(batch: Batch) -> int:
    """The first dimension that the tensors of a batch share.

    Raises:
        Unsupported: if they share none.

    >>> size_of(((torch.ones(8, 3), torch.ones(8)), {}))
    8
    """
    shapes = [tuple(t.shape) for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.ndim]
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1 or not all(sizes):
        words = ", ".join(map(str, shapes)) if shapes else "none"
        raise Unsupported(
            f"not looked for: the batch's tensors share no first dimension (shapes: {words}). Give make_batch=, a "
            "function of the size"
        )
    return next(iter(sizes))


def tokens_of(batch: Batch) -> int | None:
    """The tokens of a batch of a language model: the elements of its first tensor, if that is a matrix of integers.

    >>> tokens_of(((torch.ones(4, 16, dtype=torch.long),), {})), tokens_of(((torch.ones(4, 16),), {}))
    (64, None)
    """
    first = next((t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.ndim), None)
    is_text = first is not None and first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
    return first.numel() if first is not None and is_text and first.dtype is not torch.bool else None


def amount_of(batch: Batch) -> str:
    """The size of a batch in words.

    >>> amount_of(((torch.ones(4, 2048, dtype=torch.long),), {})), amount_of(((torch.ones(1, 3),), {}))
    ('8,192 tokens', '1 sample')
    """
    if (tokens := tokens_of(batch)) is not None:
        return f"{tokens:,} tokens"
    try:
        size = size_of(batch)
    except Unsupported:
        return "this batch"
    return f"{size:,} sample{'s' * (size != 1)}"


def scaled(batch: Batch, size: int) -> Batch:
    """The batch with another size of the first dimension of all tensors, strides in proportion; data rows repeat.

    >>> args, kwargs = scaled(((torch.ones(8, 3)[:, 1:],), {}), 2)
    >>> args[0].shape, args[0].stride()
    (torch.Size([2, 2]), (3, 1))
    """
    copies: dict[int, torch.Tensor] = {}
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.ndim:
            groups.setdefault((storage(tensor), tensor.dtype), []).append(tensor)
    for views in groups.values():  # of one storage, as labels and tokens are that are slices of one text
        layouts = [((size, *view.shape[1:]), _strides_at(size, view), view.storage_offset()) for view in views]
        ends = [1 + at + sum((n - 1) * step for n, step in zip(*layout, strict=True)) for *layout, at in layouts]
        base = torch.empty(max(ends), dtype=views[0].dtype, device=views[0].device)
        for view, (shape, strides, at) in zip(views, layouts, strict=True):
            copy = base.as_strided(shape, strides, at)
            if not view.is_meta:
                rows, once = torch.arange(size) % len(view), tuple(slice(1 if step == 0 else None) for step in strides)
                copy[once] = view.detach()[rows.to(view.device)][once]
            copies[id(view)] = copy.requires_grad_(view.requires_grad)
    result: Batch = tree_map_only(torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), batch)
    return result


def _strides_at(size: int, tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for another size of the first dimension: dimensions outside of it grow in proportion.

    >>> _strides_at(6, torch.ones(2, 3, 4).transpose(0, 1))
    (4, 24, 1)
    """
    rows, step = len(tensor), tensor.stride(0)
    return step, *(stride // rows * size if 0 < step * rows <= stride else stride for stride in tensor.stride()[1:])
