"""In-place kernels, whole or block by block, for ops that PyTorch has no in-place form of.

Each leaves the bits of its op in ``out``, which is one of its arguments, and gives what the op gives.

A channel of a batch norm's gradient is made of this channel of the incoming gradient and of the input; an image that a
convolution makes, or that its input's gradient is, of this image of what it reads. So a few channels or images run at a
time, and what comes out is copied to where they lay: in place of a whole result there is that of one block.

Blocks take longer than the whole where the memory of a whole result is at hand, as in an arena: up to twice as long
where ops are short, a few percent where they are long. Where PyTorch would map it anew, blocks are the faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from checkmate.capture.inplace.shape_only import convolution_backward_input

aten = torch.ops.aten
Optional = torch.Tensor | None
Number = int | float | bool | complex

BLOCKS = 16  # of channels, at least, where there are as many
BLOCK_BYTES = 2**20  # of channels, at most: they stay in a processor's cache
CHANNELS = 16  # where channels lie side by side: as many as are in the widest registers go together
IMAGE_BLOCKS = 8
LEAST_IMAGES = 2  # kernels for one image are often others


def take_over(x: torch.Tensor, *, memory_format: torch.memory_format | None = None, out: torch.Tensor) -> torch.Tensor:
    """``x.clone()`` when nothing else reads x: x itself."""
    return out


def rsub_over(x: torch.Tensor, other: Number, alpha: Number = 1, *, out: torch.Tensor) -> torch.Tensor:
    """``other - alpha * x``."""
    return aten.sub.out(other, x, alpha=alpha, out=out)


def safe_softmax_over(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    """Softmax with zeros in rows of -inf only, which are found first."""
    masked = torch.eq(x, float("-inf")).all(dim, keepdim=True)
    return aten._softmax.out(x, dim, False, out=out).masked_fill_(masked, 0.0)


def batch_norm_over(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Batch norm: the result, mean and deviation as saved for the backward, and the new running statistics."""
    new_mean, new_var = running_mean.clone(), running_var.clone()
    saved = [(x if weight is None else weight).new_empty(x.shape[1] if training else 0) for _ in range(2)]
    aten._native_batch_norm_legit.out(
        x, weight, bias, new_mean, new_var, training, momentum, eps, out=out, save_mean=saved[0], save_invstd=saved[1]
    )
    return out, *saved, new_mean, new_var


def batch_norm_backward_over(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    mean: Optional,
    invstd: Optional,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
    *,
    out: torch.Tensor,
) -> tuple[Optional, ...]:
    """The gradients of a batch norm's input, weight and bias, by channels."""
    # Channels are laid out as all of them are together, which decides which kernel runs.
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(grad.dim(), [])
    alike = [layout for layout in formats if all(whole.is_contiguous(memory_format=layout) for whole in (grad, x))]
    parameter_gradients: list[tuple[Optional, ...]] = []
    for channels in _slices(x.shape[1], _channels_of_a_block(x)):
        parts = [whole[:, channels] for whole in (grad, x)]
        if alike:
            parts = [part.contiguous(memory_format=alike[0]) for part in parts]
        of_channels = (v if v is None else v[channels] for v in (weight, running_mean, running_var, mean, invstd))
        gradients = aten.native_batch_norm_backward.default(*parts, *of_channels, training, eps, wanted)
        out[:, channels] = gradients[0]
        parameter_gradients.append(gradients[1:])
    by_parameter = ([part for part in parts if part is not None] for parts in zip(*parameter_gradients, strict=True))
    return out, *(torch.cat(parts) if parts else None for parts in by_parameter)


def convolution_over(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional, *geometry: Any, out: torch.Tensor
) -> torch.Tensor:
    """A convolution, image by image."""
    for images in _slices(len(x), _images_of_a_block(len(x))):
        out[images] = aten.convolution.default(x[images], weight, bias, *geometry)
    return out


def convolution_backward_over(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *options: Any, out: torch.Tensor
) -> tuple[Optional, ...]:
    """The gradient of a convolution's input alone, image by image; only the input's shape is read."""
    for images in _slices(len(x), _images_of_a_block(len(x))):
        out[images] = aten.convolution_backward.default(grad[images], x[images], weight, bias_sizes, *options)[0]
    return out, None, None


def convolution_backward_input_over(
    grad: torch.Tensor,
    weight: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    *geometry: Any,
    out: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a convolution's input, image by image, from the input's shape."""
    for images in _slices(shape[0], _images_of_a_block(shape[0])):
        count = len(range(shape[0])[images])
        out[images] = convolution_backward_input(grad[images], weight, (count, *shape[1:]), stride, *geometry)
    return out


def batch_norm_block(grad: torch.Tensor, x: torch.Tensor, *options: Any) -> int | None:
    """Bytes that `batch_norm_backward_over` takes: for some channels, both arguments laid out anew, and the result.

    None where the gradient of the input is not wanted: there is no result to write.
    """
    if not options[-1][0]:
        return None
    return 3 * _channels_of_a_block(x) * (x.nbytes // x.shape[1]) if x.nbytes else 0


def convolution_block(x: torch.Tensor, *_: Any) -> int | None:
    """Bytes of the result for some images, if it is as large as the input; None for few images."""
    return convolution_backward_input_block(x, x, x.shape)


def convolution_backward_block(grad: torch.Tensor, x: torch.Tensor, *options: Any) -> int | None:
    """The block of a convolution's backward; None for few images, or if more than the input's gradient is asked."""
    return convolution_block(x) if [*options[-1]] == [True, False, False] else None


def convolution_backward_input_block(
    grad: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], *_: Any
) -> int | None:
    """Bytes of the result for some images; None for few images."""
    images = _images_of_a_block(shape[0])
    return math.prod(shape[1:]) * grad.itemsize * images if shape[0] >= 2 * images else None


def _channels_of_a_block(x: torch.Tensor) -> int:
    channels, step = x.shape[1], CHANNELS if x.stride(1) == 1 else 1
    wide = min(BLOCK_BYTES * channels // max(1, x.nbytes), -(-channels // BLOCKS))
    return min(channels, max(1, wide // step) * step)


def _images_of_a_block(images: int) -> int:
    return max(LEAST_IMAGES, -(-images // IMAGE_BLOCKS))


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, size)) for begin in range(0, size, step))
