"""Whether an elementwise op on a CPU computes each element by the same code, by vectors or singly, in a part too.

ATen's loops (``Loops.h``, ``TensorIterator.cpp``) put the dimension of the smallest strides innermost and join to it
what lies in memory in one run. If all tensors are contiguous along that run, or one of them is a single number there,
the loop goes by two vectors at a time (``vectorized_loop``), and through the rest of a run, less than two vectors,
element by element in other code: Sleef's ``expf`` in the one and the C library's in the other, which round otherwise in
some percent of all elements. Threads take chunks of all elements (``at::parallel_for``), and a chunk that ends within a
run leaves a rest there too. Some kernels also choose by whether tensors are contiguous (oneDNN's gelu, the logarithm of
MKL in ``logit``).

So an element keeps its code if both loops have no rest, or none has vectors, or both have the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

VECTORS = 128  # bytes: two of the widest, of 512 bits; two narrower ones divide it
GRAINS = (32768, 2048)  # elements that a thread takes at least: at::internal::GRAIN_SIZE, and of functions of MKL


def same_lanes(whole: Sequence[Tensor], part: Sequence[Tensor], threads: int) -> bool:
    """Whether an op has the same code for each element of a part.

    Args:
        whole, part: what the op makes, then the tensors that it reads; fake or real.
        threads: of which at most so many run.

    >>> same_lanes([torch.empty(8, 33)] * 2, [torch.empty(4, 33)] * 2, threads=1)  # 132 = 4 * 32 + 4 elements
    False
    >>> same_lanes([torch.empty(8, 32)] * 2, [torch.empty(4, 32)] * 2, threads=1)
    True
    """
    if len({t.dtype for t in (*whole, *part)}) > 1:  # some are converted first, into another layout
        return False
    if any(a.is_contiguous() != b.is_contiguous() for a, b in zip(whole, part, strict=True)):
        return False
    lanes = VECTORS // whole[0].element_size()
    loops = [_loops(tensors) for tensors in (whole, part)]
    (run, strides), (run_of_part, strides_of_part) = (loop[0] for loop in loops)
    by_vectors = [_by_vectors(inner) for inner in (strides, strides_of_part)]
    if not any(by_vectors):
        return True
    numbers = [tensors[0].numel() for tensors in (whole, part)]
    if all(by_vectors) and not run % lanes and not run_of_part % lanes:
        return all(not chunk % lanes for n in numbers for chunk in _chunks(n, threads))
    same = run == run_of_part and len(loops[0]) == len(loops[1]) > 1 and strides == strides_of_part
    return same and all(not chunk % run for n in numbers for chunk in _chunks(n, threads))


def _chunks(count: int, threads: int) -> list[int]:
    """How many elements a thread may take at a time, where several run."""
    used = {min(threads, -(-count // grain)) for grain in GRAINS}
    return [-(-count // n) for n in used if n > 1]


def _by_vectors(strides: Sequence[int]) -> bool:
    """Whether the innermost loop goes by vectors: what is made and read lies in a run, but for one number at most."""
    made, *read = strides
    return made == 1 and {*read} <= {0, 1} and read.count(0) <= 1


def _loops(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """The loops over some tensors, the innermost first: how often each runs, and the strides in elements."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    strides = [_broadcast(t, shape) for t in tensors]
    dims = [d for d in reversed(range(len(shape))) if shape[d] != 1]
    for i in range(1, len(dims)):  # by insertion, as TensorIteratorBase::reorder_dimensions
        at = i
        for other in reversed(range(i)):
            order = _order(shape, strides, dims[other], dims[at])
            if order > 0:
                dims[other], dims[at] = dims[at], dims[other]
                at = other
            elif order < 0:
                break
    loops = [(shape[d], tuple(one[d] for one in strides)) for d in dims] or [(1, (1,) * len(tensors))]
    joined = [loops[0]]
    for _, (size, outer) in pairwise(loops):
        count, inner = joined[-1]
        if all(count * a == b for a, b in zip(inner, outer, strict=True)):
            joined[-1] = count * size, inner
        else:
            joined.append((size, outer))
    return joined


def _broadcast(tensor: Tensor, shape: Sequence[int]) -> list[int]:
    own = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [0] * (len(shape) - len(own)) + own


def _order(shape: Sequence[int], strides: Sequence[Sequence[int]], inner: int, outer: int) -> int:
    """Above zero if two dimensions are to be swapped, below if not; zero where no tensor tells."""
    for one in strides:
        if one[inner] and one[outer]:
            if one[inner] != one[outer]:
                return 1 if one[inner] > one[outer] else -1
            if shape[inner] > shape[outer]:
                return 1
    return 0
