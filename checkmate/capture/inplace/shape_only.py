"""Ops that read only the shape and layout of an argument: on the CPU they are called without it.

The gradient of a convolution's input is made of the incoming gradient and the weight. PyTorch's op for it takes the
input along, for its shape; as an argument it would have to be at hand, made again if need be. The same holds for the
backwards of poolings. In its place stands memory of the operating system that nobody writes to: its pages are one page
of zeros, which takes no memory however large it is, and no allocator counts it.

The kernel is chosen by the memory format that the input's strides suggest, those of dimensions of one element among
them. Tracing may describe these otherwise than eager PyTorch has them, so an input stays where they decide.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten
CAN_STAND_IN = hasattr(mmap, "MAP_ANONYMOUS")  # not on Windows

_largest = torch.empty(0, dtype=torch.uint8)


def stand_in(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes no memory. Writing to it would crash the process.

    >>> int(stand_in((2**20, 2**10), (2**10, 1), torch.float32)[7].sum())
    0
    """
    global _largest
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    count = elements * dtype.itemsize
    if len(_largest) < count:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            _largest = torch.frombuffer(mmap.mmap(-1, count, flags=flags, prot=mmap.PROT_READ), dtype=torch.uint8)
    return _largest[:count].view(dtype).as_strided(tuple(shape), tuple(stride))


def convolution_backward_input(
    grad: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], stride: Sequence[int], *geometry: Any
) -> torch.Tensor:
    """The gradient of a convolution's input from its shape and stride; geometry as in ``convolution_backward``."""
    x, wanted = stand_in(shape, stride, grad.dtype), [True, False, False]
    gradient: torch.Tensor = aten.convolution_backward.default(grad, x, weight, None, *geometry, wanted)[0]
    return gradient


def max_pool2d_backward(
    grad: torch.Tensor, indices: torch.Tensor, shape: Sequence[int], stride: Sequence[int], *geometry: Any
) -> torch.Tensor:
    """The gradient of max pooling's input, from the input's shape and stride."""
    x = stand_in(shape, stride, grad.dtype)
    gradient: torch.Tensor = aten.max_pool2d_with_indices_backward.default(grad, x, *geometry, indices)
    return gradient


def forget_inputs(graph: fx.Graph) -> None:
    """Call ops of a joint graph without inputs whose shape alone they read."""
    if not CAN_STAND_IN:
        return
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, x, weight, _, *geometry, wanted = node.args
        if wanted == [True, False, False] and len(node.users) == 1 and _can_forget(x, grad, weight):
            (gradient,) = node.users
            node.meta["val"] = gradient.meta["val"]
            node.target, node.args = convolution_backward_input, (grad, weight, *_layout(x), *geometry)
            gradient.replace_all_uses_with(node)
            graph.erase_node(gradient)
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d_with_indices_backward.default):
        grad, x, *geometry, indices = node.args
        if _can_forget(x, grad):
            node.target, node.args = max_pool2d_backward, (grad, indices, *_layout(x), *geometry)


def _can_forget(x: fx.Node, *others: fx.Node) -> bool:
    """Tell whether all tensors are on the CPU with one type, and x's strides determine its memory format."""
    tensors = [n.meta["val"] for n in (x, *others)]
    alike = all(t.device.type == "cpu" and t.dtype == tensors[0].dtype for t in tensors)
    return alike and has_certain_format(tensors[0].shape, tensors[0].stride())


def has_certain_format(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether strides of dimensions with several elements decide if images are channels last.

    PyTorch asks for strides that do not fall from the channels over columns and rows to the batch, each as large as
    the extent of the one before (``is_channels_last_strides`` of c10). A dimension of one element has its place there.

    >>> has_certain_format((8, 3, 5, 5), (75, 1, 15, 3)), has_certain_format((1, 3, 5, 5), (75, 25, 5, 1))
    (True, True)
    >>> has_certain_format((8, 1, 5, 5), (25, 1, 5, 1))  # or (25, 25, 5, 1): in memory the same
    False
    """
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[d] != 1:
            if stride[d] < least:
                return True
            least = stride[d] * shape[d]
    return 1 not in shape


def _layout(x: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(x.meta["val"].shape), tuple(x.meta["val"].stride())
