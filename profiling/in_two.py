"""Whether the two gradients of a convolution have the bits apart that they have together: tried on a GPU.

On the CPU they do, in thousands of random cases (`checkmate.capture.rewrite.split_convolutions`). On a GPU a library
chooses the kernels, so each convolution of a step is run both ways on made-up inputs before it is taken apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from checkmate.profiling.one_op import attempt, call_of, device_of_op, key_of
from checkmate.profiling.trial import same_bits
from checkmate.torch_internals.dispatcher import _disable_current_modes

_known: dict[tuple[torch.device, str], bool] = {}  # what this process tried


def same_in_two(node: fx.Node) -> bool:
    """Whether a ``convolution_backward`` leaves the same bits as one call for its input and one for the others.

    An op that does not run on made-up inputs stays as it is. The global random state is not touched.
    """
    key = device_of_op(node), key_of(node)
    if key not in _known:
        cards = [key[0].index or 0] if key[0].type == "cuda" else []
        same: list[bool] = []
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=cards):
            attempt(node, lambda: same.append(_tried(node)))
        _known[key] = any(same)
    return _known[key]


def _tried(node: fx.Node) -> bool:
    run = call_of(node)
    *args, (for_input, *for_others) = run.args
    whole: Any = run()
    alone = run.func(*args, [for_input, False, False])[:1]
    others = run.func(*args, [False, *for_others])[1:]
    pairs = zip(whole, (*alone, *others), strict=True)
    return all(a is b is None or (a is not None and b is not None and same_bits(a, b)) for a, b in pairs)
