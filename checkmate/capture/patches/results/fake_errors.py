"""Errors that PyTorch's fake tensors have and its kernels may not have: said as what they are.

A fake tensor is made again from its base by the views that led to it, and a change of shape in place, as by
``unsqueeze_``, is left out: a later write to such a view fails. And of tensors without elements, which many kernels
return at once, the description of an op may check more than the kernel. Importing this module has Dynamo refuse these
in what our backends capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from checkmate.capture.patches.branches import is_ours
from checkmate.torch_internals.dynamo import FakeTensorObservedException, TorchRuntimeError, unimplemented, wrap

_CHANGE = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}  # methods


def _explaining(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's description of what a node makes."""

    @wraps(plain)
    def described(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = node.all_input_nodes
        try:
            return plain(node, tx, *args, **kwargs)
        except (IndexError, TorchRuntimeError, FakeTensorObservedException) as error:
            reason = _reason(inputs, tx, error) if is_ours(tx) else None
            if reason is None:
                raise
            why = f"PyTorch says: {_said(error)}. {reason}"
            unimplemented(gb_type="What an op makes cannot be told", context=str(error), explanation=why, hints=[])

    return described


def _reason(inputs: list[Any], tx: Any, error: Exception) -> str | None:
    """Why a kernel may not have this error; None: nothing says that it has not."""
    nodes = [n for graph in (tx.output.current_tracer.graph, tx.output.root_tracer.graph) for n in graph.nodes]
    changes = [n.target for n in nodes if n.target in _CHANGE]
    if changes and (isinstance(error, IndexError) or tx.output.current_tracer.parent is not None):  # within a function
        return f"Before, {changes[0]} changed the shape of a tensor in place."
    given = [n.meta.get("example_value") for n in inputs]
    return "It is given a tensor of no elements." if any(map(_is_empty, given)) else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(n, int) and n == 0 for n in value.shape)


def _said(error: Exception) -> str:
    """PyTorch's own sentence."""
    text = str(error)
    _, found, quoted = text.partition("got RuntimeError(")
    return (quoted.split("\n")[0].strip(")'\"") if found else text.split("\n")[0]).rstrip(".')\"")


wrap("get_fake_value", _explaining)
