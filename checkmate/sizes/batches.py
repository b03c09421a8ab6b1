"""Batches of another size, by the first dimension that their tensors share, and steps without data.

While a step is traced, meta tensors stand in for its parameters, buffers and batch. What has no data takes no memory,
and its ops are those of the device that is planned for, wherever the tensors are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn, optim

from checkmate.backends.tensor_state import modules_within
from checkmate.capture.nodes import storage
from checkmate.errors import Unsupported
from checkmate.torch_internals.running import TorchDispatchMode, tree_leaves, tree_map_only
from checkmate.tracing import Batch

META = torch.device("meta")
AT_ONCE = "foreach"  # the setting of optimizers that update all parameters by one op
STEPS = 2  # of an optimizer, until its state is there


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


class StandIns:
    """Meta tensors that stand in for others, with their shapes, strides and types; meta tensors stay."""

    def __init__(self) -> None:
        # By id: the tensor, which must live on, and its stand-in.
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that stands in for this one."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._stand_ins:
            stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
            self._stand_ins[id(tensor)] = tensor, stand_in.requires_grad_(tensor.requires_grad)
        return self._stand_ins[id(tensor)][1]

    def within(self, tree: Any) -> Any:
        """The tree with stand-ins for its tensors."""
        return tree_map_only(torch.Tensor, self.of, tree)

    def optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Copy an optimizer with its settings and state, for the stand-ins of its parameters."""
        groups = [{**group, "params": [*map(self.of, group["params"])]} for group in optimizer.param_groups]
        twin = _copy(optimizer, groups)
        for parameter, state in optimizer.state.items():
            twin.state[self.of(parameter)] = self.within(state)
        return twin

    @contextmanager
    def in_modules(self, things: Any) -> Iterator[None]:
        """Within the block, modules within reach have stand-ins for tensors; afterwards their own are back."""
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in {id(m): m for root in modules_within(things) for m in root.modules()}.values():
            for held in (module._parameters, module._buffers, vars(module)):
                places += [(held, name, t) for name, t in held.items() if isinstance(t, torch.Tensor)]
        try:
            for holder, name, tensor in places:
                holder[name] = self.of(tensor)
            yield
        finally:
            for holder, name, tensor in places:
                holder[name] = tensor


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that gives the loss: a model output's ``loss``, or the first of several results.

    A tensor that is no number stands for a loss with its sum.
    """

    def loss_fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = fn(*args, **kwargs)
        loss = getattr(result, "loss", None)
        if loss is None:
            loss = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), result)
        return loss.sum() if isinstance(loss, torch.Tensor) and loss.ndim else loss

    return loss_fn


def trained(things: Any) -> list[nn.Parameter]:
    """The parameters within reach that get gradients.

    Raises:
        Unsupported: if there are none.
    """
    modules = modules_within(things)
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    if not parameters:
        raise Unsupported(
            "The function reaches no module that has parameters with gradients, so that there is nothing to train. "
            "Give a module, or a function that calls one which it closes over; or the optimizer."
        )
    return list(parameters.values())


def update_bytes(optimizers: list[optim.Optimizer], *, at_once: bool) -> int:
    """Bytes that ``optimizer.step()`` takes beyond parameters, gradients and state, found on the meta device.

    With ``at_once`` an optimizer that does not say otherwise updates all parameters by one op, as PyTorch does on a
    GPU. Where it cannot be found out, twice what it updates at a time is taken for it.
    """
    most = 0
    for optimizer in optimizers:
        # A copy of the optimizer on meta parameters.
        stand_ins, groups = StandIns(), list[dict[str, Any]]()
        for group in optimizer.param_groups:
            params = [nn.Parameter(stand_ins.of(p).detach().clone()) for p in group["params"] if p.requires_grad]
            groups.append({**group, "params": params})
            if at_once and group.get(AT_ONCE, False) is None and not group.get("fused"):
                groups[-1][AT_ONCE] = True
        # Count the bytes of tensors made in a few steps.
        twin: Any = _copy(optimizer, groups)
        trained_ones = [p for group in groups for p in group["params"]]
        for parameter in trained_ones:
            parameter.grad = torch.empty_like(parameter)
        try:
            for _ in range(STEPS):
                with _Counting() as counting:
                    twin.step()
            most = max(most, counting.most)
        except RuntimeError:  # an optimizer that reads numbers which are not there
            sizes = [p.nbytes for p in trained_ones]
            most = max(most, 2 * (sum(sizes) if at_once else max(sizes, default=0)))
    return most


def _copy(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """The optimizer with other parameter groups and no state yet."""
    twin = copy.copy(optimizer)
    twin.param_groups, twin.state = groups, copy.copy(optimizer.state)
    twin.state.clear()
    return twin


class _Counting(TorchDispatchMode):
    """Counts the bytes of living tensors that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_meta]
        if new := [storage for storage in storages if storage._cdata not in inputs]:
            self._alive.update(new)
            self.most = max(self.most, sum(storage.nbytes() for storage in self._alive))
        return result
