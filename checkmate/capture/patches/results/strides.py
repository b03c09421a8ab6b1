"""Give fake results the strides of eager kernels: with other strides sums run in another order, to other bits.

A sum over a tensor adds in the order of its memory, so that other strides are other bits; and a program that asks
`Tensor.is_contiguous` takes the other branch. PyTorch's own tracing departs from eager in two ways.

A write in place leaves a tensor's strides as they are. AOTAutograd makes of it an op with a new tensor for its result:
of a transposed one ``masked_fill``, ``scatter_add`` or ``cumsum`` make a contiguous one, and ``addmm`` calls another
kernel; into a part of a tensor ``normal`` draws in another order. While a step is captured, such a write is traced as
itself, into a copy (`write_copy`); so is one to a tensor whose elements overlap in memory, each of which is written in
turn. A write through an expanded tensor, or to windows of `Tensor.unfold`, does not find its way back to what these
show: it is refused, unless the expansion has nothing to repeat, which is then traced as another view. And a product of
a list of tensors in place rounds its factors, as that which makes new tensors does not.

Of some kernels for the CPU PyTorch's description has other strides than the kernel's result. Where the formula that
describes one names its operands in another order than the kernel, the wrong one decides; the backward then views what
cannot be viewed, or sums in another order. Batch norm lays its result out in the memory format that its input suggests,
the fake one in the strides of its input. These rules are mended for the process, as Dynamo traces before a backend is
called.

So are the types of some results. Of an input in half precision and parameters in float32, as under autocast, kernels
make means and deviations in float32 (ATen's ``mixed_data_type.h``: the first parameter that is given decides), and the
gradient of a group norm's input, or a soft margin loss, in the input's type. PyTorch describes the former in the
input's type, the latter in a type of all operands: a plan would count other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree
from torch.fx.node import has_side_effect
from torch.utils.weak import WeakTensorKeyDictionary

from checkmate.capture.patches.kernels import without_vectors
from checkmate.torch_internals.capturing import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    compute_elementwise_output_strides,
    decompositions,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from checkmate.torch_internals.running import (
    OpOverload,
    _get_dispatch_mode,
    _TorchDispatchModeKey,
    outside_tracing,
    tree_leaves,
    tree_map,
    tree_map_only,
)

aten = torch.ops.aten
_FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
_LIKE_POINTWISE = {*_FILLS, aten.hardswish_.default}  # in all but their tag
_ROUND_FACTORS = {aten._foreach_mul_.Scalar, aten._foreach_mul_.ScalarList}
_IN_ORDER = {  # the strides are those that the kernel finds in its operands, the first one before the next
    *(aten.copysign.Tensor, aten.floor_divide.default, aten.special_xlog1py.default, aten.xlogy.Tensor),
    *(aten.complex.default, aten.polar.default, aten.elu_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.logit_backward.default),
    *(aten.native_dropout_backward.default, aten.softplus_backward.default),
}
_BY_OPERANDS = {  # strides of these arguments, in this order
    aten._prelu_kernel_backward.default: ("self", "weight", "grad_output"),
    aten.binary_cross_entropy.default: ("self",),
    aten.binary_cross_entropy_backward.default: ("self",),
    aten.huber_loss.default: ("self",),
    aten.leaky_relu_backward.default: ("self", "grad_output"),
    aten.log_sigmoid_backward.default: ("grad_output",),
    aten.threshold_backward.default: ("self", "grad_output"),
}
_IN_THE_FORMAT = {  # the memory format that the argument ``self`` suggests
    *(aten.channel_shuffle.default, aten.roll.default),
    *(aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default),
}
_CONTIGUOUS = {
    *(aten._log_softmax_backward_data.default, aten.glu_backward.default, aten.huber_loss_backward.default),
    *(aten.isin.Tensor_Scalar, aten.isin.Tensor_Tensor, aten.log_sigmoid_forward.default, aten.poisson.default),
    *(aten.mse_loss_backward.default, aten.native_layer_norm_backward.default, aten.pow.Scalar),
    aten.smooth_l1_loss_backward.default,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_DESCRIBED_WRONG = _IN_ORDER | _BY_OPERANDS.keys() | _IN_THE_FORMAT | _CONTIGUOUS


def _normalization(arguments: Mapping[str, Any]) -> list[torch.dtype | None]:
    """Types of means and deviations: the input's, or float32 if mixed with parameters of another type."""
    x, running = arguments["input"], [arguments[name] for name in ("running_mean", "running_var") if name in arguments]
    parameter = next((p for p in (arguments["weight"], arguments["bias"], *running) if p is not None), x)
    dtype = x.dtype if parameter.dtype == x.dtype else torch.float32
    return [None, dtype, dtype, *(t.dtype for t in running)]


_TYPES: dict[Any, Callable[[Mapping[str, Any]], list[torch.dtype | None]]] = {  # of results; None: as described
    aten.native_layer_norm.default: _normalization,
    aten.native_group_norm.default: _normalization,
    aten.native_group_norm_backward.default: lambda arguments: [arguments["input"].dtype, None, None],
    aten._native_batch_norm_legit_functional.default: _normalization,
    aten._native_batch_norm_legit.no_stats: _normalization,
    aten.soft_margin_loss.default: lambda arguments: [arguments["self"].dtype],
    aten.soft_margin_loss_backward.default: lambda arguments: [arguments["self"].dtype],
}


def lay_out(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A copy in a shape that ``x`` broadcasts to, with these strides and of this type."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device).copy_(x)


def copied(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy in the strides of ``x``, in its type or another."""
    return lay_out(x, tuple(x.shape), x.stride(), dtype or x.dtype)


def write_copy(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The contents of ``x`` after an in-place op: the op runs on a copy in the strides of x."""
    copy = copied(x)
    op(copy, *args, **kwargs)
    return copy


@has_side_effect  # a draw that nobody reads leaves another random state
def draw_copy(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`write_copy` for an op that draws random numbers."""
    return write_copy(op, x, *args, **kwargs)


@contextmanager
def eager_strides() -> Iterator[None]:
    """Within the block, a tensor written in place is traced with its eager strides."""
    functional = FunctionalTensorMode.__torch_dispatch__
    repeated: Any = WeakTensorKeyDictionary()  # views of what is expanded, and windows

    def is_lost(tensor: FunctionalTensor) -> bool:  # a write to it: it is expanded, or a view of what is
        sizes = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if isinstance(n, int)]
        expanded = any(n > 1 and isinstance(step, int) and not step for n, step in sizes)
        return tensor in repeated or (expanded and all(n for n, _ in sizes))

    def keeping(mode: FunctionalTensorMode, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(op, OpOverload) or not op._schema.is_mutable:
            if op is aten.expand.default and (leading := _only_leading(*args)) is not None:
                result = functional(mode, aten.alias.default, types, args[:1])
                for _ in range(leading):
                    result = functional(mode, aten.unsqueeze.default, types, (result, 0))
                return result
            result = functional(mode, op, types, without_vectors(op, args), kwargs)
            source = args[0] if args and getattr(op, "is_view", False) else None
            if isinstance(source, FunctionalTensor) and (op is aten.unfold.default or is_lost(source)):
                repeated.update((view, True) for view in tree_leaves(result))
            return result
        # Factors of tensors in half precision are rounded first.
        if op in _ROUND_FACTORS:
            arguments = [*args, *kwargs.values()]
            tensors, by = arguments
            factors = by if isinstance(by, list) else [by] * len(tensors)
            with outside_tracing():
                rounded = [
                    torch.tensor(factor, dtype=t.dtype).item() if t.dtype in (torch.bfloat16, torch.float16) else factor
                    for t, factor in zip(tensors, factors, strict=True)
                ]
            op, args, kwargs = aten._foreach_mul_.ScalarList, (tensors, rounded), {}
        # Refuse a write to elements that share memory, but one that can be traced as itself.
        changes_shape = torch.Tag.inplace_view in op.tags
        in_place = op.namespace == "aten" and _name(op).endswith("_") and not changes_shape
        rewrites = in_place and isinstance(args[0], FunctionalTensor) and not args[0].is_contiguous()
        targets = [t for t in written(op, args, kwargs) if isinstance(t, FunctionalTensor)]
        for tensor in targets:
            if is_lost(tensor) or (_overlaps(tensor) and not (rewrites and _is_read_nowhere_else(args, kwargs))):
                raise RuntimeError(f"{_name(op)} writes to a tensor whose elements share memory")
        # Trace a write whose numbers or strides would be others as itself, into a copy.
        if rewrites:
            fakes = tree_map_only(FunctionalTensor, FunctionalTensor.from_functional, (args, kwargs))
            if _depends_on_strides(op, *fakes):
                write = draw_copy if torch.Tag.nondeterministic_seeded in op.tags else write_copy
                _set(args[0], _record(write, (op, *fakes[0]), fakes[1]))
                return args[0]
        result = functional(mode, op, types, args, kwargs)
        if changes_shape:
            return result
        # For a storage functionalization keeps the value of its base, from which views are taken again: lay that out.
        for tensor in targets:
            base: Any = tensor if tensor._base is None else tensor._base
            value = base.from_functional()
            if value.shape == base.shape and value.numel() and strides_of(value) != strides_of(base):
                _set(base, _record(lay_out, (value, tuple(base.shape), base.stride(), value.dtype), {}))
        return result

    with patch.object(FunctionalTensorMode, "__torch_dispatch__", keeping):
        yield


def _is_read_nowhere_else(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether no other argument of an in-place op shares memory with the first, which it writes."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FunctionalTensor)]
    storages = [t.elem.untyped_storage()._cdata for t in tensors]  # `detach` gives a view that has no base
    return storages.count(storages[0]) == 1


def _name(op: OpOverload) -> str:
    return op._schema.name.partition("::")[2]


def _depends_on_strides(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an in-place write gives other numbers or strides than the op with a new result."""
    (x, *_) = args
    if torch.Tag.nondeterministic_seeded in op.tags or _overlaps(x):
        return True
    twin = getattr(getattr(aten, _name(op).removesuffix("_"), None), op._overloadname, None)
    if aten.is_non_overlapping_and_dense(x):
        with disable_proxy_modes_tracing():
            return twin is not None and strides_of(twin(*args, **kwargs)) != strides_of(x)
    # Into a part of a tensor a pointwise op computes the same: the part is read again from the whole.
    return op not in _LIKE_POINTWISE and (twin is None or torch.Tag.pointwise not in twin.tags)


def _only_leading(tensor: torch.Tensor, sizes: Sequence[Any], *_: Any) -> int | None:
    """The number of leading dimensions of size one that an expansion adds, if it does nothing else; else None."""
    leading = len(sizes) - tensor.dim()
    numbers = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (*sizes, *tensor.shape)]
    added, kept, shape = numbers[:leading], numbers[leading : len(sizes)], numbers[len(sizes) :]
    is_only = all(n == 1 for n in added) and all(n in (-1, size) for n, size in zip(kept, shape, strict=True))
    return leading if is_only else None


def _overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether several elements of a tensor share one place in memory."""
    if isinstance(tensor.numel(), torch.SymInt) or aten.is_non_overlapping_and_dense(tensor):
        return False
    places = np.zeros(1, dtype=np.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, step * np.arange(size)).ravel()
    return len(np.unique(places)) < len(places)


def _record(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of fake tensors, and record the call in the traced graph, if any, as one node."""
    with disable_proxy_modes_tracing():
        result = function(*args, **kwargs)
    mode = _get_dispatch_mode(_TorchDispatchModeKey.PROXY)
    if mode is None:
        return result
    proxies = tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", function, *proxies)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes to, elements of lists each; tensors or nodes."""
    arguments = op._schema.arguments
    pairs = [*zip((a.name for a in arguments), args, strict=False), *kwargs.items()]
    names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return [leaf for name, arg in pairs if name in names for leaf in tree_leaves(arg)]


def _set(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Set the traced value of a tensor and of all that share its storage."""
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()


def obeys_layout(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether autograd takes a gradient as it is: in the parameter's strides if dense, else contiguous."""
    if aten.is_non_overlapping_and_dense(parameter):
        same = zip(grad.shape, grad.stride(), parameter.stride(), strict=True)
        return all(a == b for size, a, b in same if size != 1)
    return grad.is_contiguous()


def strides_of(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element; others are of no use."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


_plain_helper, _plain_dispatch = decompositions.native_batch_norm_helper, FakeTensorMode._dispatch_impl


@wraps(_plain_helper)
def _normalize(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The decomposition of every batch norm, also for fake results, with the strides of the CPU's kernel."""
    output, *statistics = _plain_helper(x, *args, **kwargs)
    if x.device.type == "cpu":
        output = output.contiguous(memory_format=suggest_memory_format(x))
    return output, *statistics


def _strides_of_the_kernel(op: Any, values: Sequence[Any], result: torch.Tensor) -> tuple[int, ...]:
    """The strides of a CPU kernel's result that PyTorch's fake result lacks."""
    if op in _CONTIGUOUS:
        return tuple(make_contiguous_strides_for(result.shape))
    arguments = dict(zip((a.name for a in op._schema.arguments), values, strict=False))
    if op in _IN_THE_FORMAT:
        return torch.empty_like(result, memory_format=suggest_memory_format(arguments["self"])).stride()
    if op in _BY_OPERANDS:
        values = [arguments[name] for name in _BY_OPERANDS[op]]
        if values[0].shape != result.shape:  # a loss in one number
            return result.stride()
    operands = [x.expand(result.shape) for x in values if isinstance(x, torch.Tensor) and x.dim()]
    return tuple(compute_elementwise_output_strides(*operands)) if operands else result.stride()


def _as_eager_views(mode: FakeTensorMode, op: Any, args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """A reshaped view with eager PyTorch's strides for dimensions of one element.

    A convolution chooses its kernel by them where they alone say whether images are stored channels last.
    """
    numbers = (*args[0].shape, *args[0].stride(), *result.shape, *result.stride())
    if not all(isinstance(n, int) for n in numbers) or 1 not in result.shape:
        return result
    with outside_tracing():
        view = op(torch.empty_strided(args[0].shape, args[0].stride(), device="meta"), result.shape)
    if view.stride() == result.stride():
        return result
    with mode:
        return aten.as_strided.default(args[0], view.shape, view.stride(), result.storage_offset())


@wraps(_plain_dispatch)
def _dispatch(mode: FakeTensorMode, op: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Give fake results the strides and types of the CPU's kernels."""
    results = _plain_dispatch(mode, op, types, args, kwargs)
    if op in _TYPES and args[0].device.type == "cpu":
        names = [a.name for a in op._schema.arguments]
        arguments = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
        outputs = results if isinstance(results, tuple) else (results,)
        with mode:
            pairs = zip(outputs, _TYPES[op](arguments), strict=True)
            typed = [x if x is None or kind in (None, x.dtype) else copied(x, kind) for x, kind in pairs]
        return tuple(typed) if outputs is results else typed[0]
    # Strides of views, and of what else is described with others than the kernel's.
    if op in _VIEWS and isinstance(results, FakeTensor):
        return _as_eager_views(mode, op, args, results)
    if op not in _DESCRIBED_WRONG:
        return results

    def as_the_kernel(result: torch.Tensor) -> torch.Tensor:
        strides = _strides_of_the_kernel(op, [*args, *kwargs.values()], result)
        if result.device.type != "cpu" or strides == result.stride():
            return result
        with mode:
            return lay_out(result, tuple(result.shape), strides, result.dtype)

    return tree_map_only(FakeTensor, as_the_kernel, results)


FakeTensorMode._dispatch_impl = _dispatch
decompositions.native_batch_norm_helper = _normalize
FakeTensorMode.cache_clear()  # of results in the old strides
