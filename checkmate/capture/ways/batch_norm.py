"""Batch norm as its sums and the rest, which is made of each element alone, so that it can run in parts of any kind.

In training batch norm sums over all images of a channel, forward and backward. Once these sums are there

    out = x a + (b - m a),                         a = w s
    dx  = (dy - db/n - (x - m) s dw/n) a

for mean m, inverse deviation s, and n elements a channel. The first has PyTorch's bits, where its trial finds them: on
a CPU its kernel rounds once for product and sum, as ``addcmul`` does. The second has not: PyTorch sums dw and db in
more digits than it gives them. So a backward in two halves is for ``numerics="rounding"``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.nodes import call, getitems

aten = torch.ops.aten
FORWARD = aten._native_batch_norm_legit_functional.default
BACKWARD = aten.native_batch_norm_backward.default


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """What batch norm makes of its input, the statistics given.

    Args:
        x: of any shape (images, channels, ...); weight, bias, mean, invstd: one number a channel.
    """
    if x.device.type == "cuda":
        gamma, beta = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        found: Tensor = aten.batch_norm_elemt.default(x, gamma, beta, mean, invstd, 0.0)  # what its kernel ends with
        return found
    gamma, beta, mean, invstd = _wide(weight, bias, mean, invstd)
    scale = invstd if gamma is None else invstd * gamma
    shift = torch.addcmul(torch.zeros_like(mean) if beta is None else beta, mean, scale, value=-1)
    return torch.addcmul(_along(shift, x), x.to(mean.dtype), _along(scale, x)).to(x.dtype)


def gradient_of_input(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    of_weight: Tensor,
    of_bias: Tensor,
    count: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of batch norm's input, those of its weight and bias given.

    Args:
        grad, x: of any shape (images, channels, ...); weight, mean, invstd, of_weight, of_bias: one number a channel.
        count: elements of a channel, in all parts.
        out: what it is written to; that may be x.
    """
    gamma, mean, invstd, of_weight, of_bias = _wide(weight, mean, invstd, of_weight, of_bias)
    numbers = of_weight * invstd / -count, mean, of_bias / count, invstd if gamma is None else invstd * gamma
    if out is None or out.dtype == mean.dtype:
        return _gradient(grad, x, *numbers, out).to(x.dtype)
    for i in range(len(x)):  # in half precision image by image, which takes no more than one in single precision
        part = slice(i, i + 1)
        out[part] = _gradient(grad[part], x[part], *numbers, None)
    return out


def _gradient(
    grad: Tensor, x: Tensor, slope: Tensor, mean: Tensor, shift: Tensor, scale: Tensor, out: Tensor | None
) -> Tensor:
    """((x - mean) slope + grad - shift) scale."""
    made = torch.sub(x.to(mean.dtype), _along(mean, x), out=out)
    return made.mul_(_along(slope, x)).add_(grad).sub_(_along(shift, x)).mul_(_along(scale, x))


def _wide(*numbers: Tensor | None) -> Any:
    """In single precision at least, as the kernels compute."""
    return (None if t is None else t.to(torch.promote_types(t.dtype, torch.float32)) for t in numbers)


def _along(numbers: Tensor, x: Tensor) -> Tensor:
    """One number a channel, beside what has channels."""
    return numbers.view(-1, *[1] * (x.dim() - 2))


def is_result(node: fx.Node) -> bool:
    """Whether a node is what a batch norm in training makes of its input."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return bool(source is not None and source.target is FORWARD and node.args[1] == 0 and source.args[5])


def call_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments with which `normalized` makes the same as a node that `is_result`; None: nobody has statistics."""
    norm: Any = node.args[0]
    faces = {face.args[1]: face for face in getitems(norm)}
    return None if not {1, 2} <= faces.keys() else (*norm.args[:3], faces[1], faces[2])


def in_two_halves(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Have a batch norm's backward make its sums first, and the gradient of its input of these; None: it cannot."""
    if node.target is not BACKWARD:
        return None
    grad, x, weight, _, _, mean, invstd, training, _, wanted = node.args
    if not training or wanted != [True, True, True]:
        return None
    made, *sums = node.meta["val"]
    faces = {face.args[1]: face for face in getitems(node)}
    with graph.inserting_before(node):
        whole = call(node, BACKWARD, (*node.args[:-1], [False, True, True]), f"{node.name}_sums", (None, *sums))
        of = [call(node, operator.getitem, (whole, i), f"{whole.name}_{i}", val) for i, val in enumerate(sums, 1)]
        about = grad, x, weight, mean, invstd, *of, made.numel() // made.shape[1]
        inner = call(node, gradient_of_input, about, f"{node.name}_input", made)
    for i, new in enumerate((inner, *of)):
        if i in faces:
            faces[i].replace_all_uses_with(new)
            graph.erase_node(faces[i])
    graph.erase_node(node)
    return whole, inner
