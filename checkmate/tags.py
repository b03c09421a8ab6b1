"""Name a tensor of a step for rules to refer to: `tag`.

A tag is no op. While a step is captured, the call stands in Dynamo's graph; when AOTAutograd then traces that graph,
the call notes which storage it was given, and returns the very tensor. So the joint graph, its bits and its memory are
those of the step without tags, and gradients are added up in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from checkmate.torch_internals import running
from checkmate.torch_internals.capturing import FunctionalTensor, allow_in_graph

Noted = Sequence[tuple[torch.Tensor, str]]  # tensors as they were traced, which keeps their storages apart, and names

_tagged: ContextVar[list[tuple[torch.Tensor, str]] | None] = ContextVar("noted", default=None)


def tag(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a tensor for rules to refer to: ``compile(..., rules={"scores": "recompute"})``.

    The op that makes the tensor's memory is named, be the tensor a view of it. What is there before the step, as a
    parameter or the batch, is made by no op. Outside of a compiled step it does nothing.

    Raises:
        TypeError: if it is given no tensor, or a name that is no text.

    >>> x = torch.ones(2)
    >>> tag(x, "scores") is x
    True
    """
    if not isinstance(x, torch.Tensor) or not isinstance(name, str) or not name:
        raise TypeError("checkmate.tag takes a tensor and a name, such as tag(x, 'scores').")
    return _note(x, name)


@allow_in_graph
def _note(x: torch.Tensor, name: str) -> torch.Tensor:
    noted = _tagged.get()
    if noted is None or running.is_traceable_wrapper_subclass(x):
        return x
    if not running.functorch.is_functorch_wrapped_tensor(x):
        traced = x.elem if isinstance(x, FunctionalTensor) else x
        is_functional = running._is_functional_tensor(traced)
        noted.append((running._from_functional_tensor(traced) if is_functional else traced, name))
    return x


@contextmanager
def noting() -> Iterator[Noted]:
    """Collect the tags of everything traced within the block."""
    noted: list[tuple[torch.Tensor, str]] = []
    token = _tagged.set(noted)
    try:
        yield noted
    finally:
        _tagged.reset(token)
