"""The CTC loss, captured if its lengths are numbers or known before the step.

How large its workspace is depends on the lengths. PyTorch describes the kernel as one whose sizes depend on data, be
the lengths tensors or numbers; here it is described for numbers. Lengths that are tensors become numbers on the CPU:
each is asked before the step. The mean is then taken as PyTorch does, of the losses and the lengths.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkmate.capture.guards import CannotTellError
from checkmate.capture.patches.data_dependence import decide, value_now
from checkmate.capture.patches.only_our_captures import follow_function
from checkmate.torch_internals.capturing import (
    FakeTensorMode,
    VariableTracker,
    op_implementations_checks,
    wrap_fx_proxy,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import get_enum

aten = torch.ops.aten
_DEFAULTS = {"blank": 0, "reduction": "mean", "zero_infinity": False}
_ARGUMENTS = ("log_probs", "targets", "input_lengths", "target_lengths", *_DEFAULTS)


def _describe(mode: FakeTensorMode, op: Any, log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The fake losses, one per sequence, and the kernel's workspace ``alpha``."""
    target_lengths: Sequence[int] = args[1]
    batch = (log_probs.shape[1],) if log_probs.dim() == 3 else ()
    longest = max(target_lengths, default=0)
    with mode:
        losses = log_probs.new_empty(batch)
        return losses, log_probs.new_empty(*(batch or (1,)), log_probs.shape[0], 2 * longest + 1)


def _describe_backward(
    mode: FakeTensorMode, op: Any, grad: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any
) -> Any:
    with mode:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _loss(plain: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Capture a call of the loss with its lengths as numbers; None leaves it to Dynamo."""
    arguments = {**_DEFAULTS, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    if len(args) > len(_ARGUMENTS) or arguments.keys() != set(_ARGUMENTS):
        return None
    log_probs, targets, input_lengths, target_lengths, *options = [arguments[name] for name in _ARGUMENTS]
    if not log_probs.is_tensor() or log_probs.device.type != "cpu":
        return None
    answers = [_numbers(tx, lengths.realize()) for lengths in (input_lengths, target_lengths)]
    if None in answers:
        return None
    blank, reduction, zeroed = [a.as_python_constant() if isinstance(a, VariableTracker) else a for a in options]
    # Take the kernel without the mean, and the mean of its losses by the lengths.
    takes_mean = reduction in ("mean", get_enum("mean"))
    kind = 0 if takes_mean else get_enum(reduction) if isinstance(reduction, str) else reduction
    called = log_probs.as_proxy(), targets.as_proxy(), *answers, blank, kind, zeroed
    losses = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", torch.ctc_loss, called, {}))
    if not takes_mean:
        return losses
    numbers = VariableTracker.build(tx, torch.tensor).call_function(tx, [VariableTracker.build(tx, answers[1])], {})
    lengths = target_lengths.realize() if target_lengths.is_tensor() else numbers
    least = lengths.call_method(tx, "clamp_min", [VariableTracker.build(tx, 1)], {})
    return losses.call_method(tx, "div", [least], {}).call_method(tx, "mean", [], {})


def _numbers(tx: Any, lengths: Any) -> tuple[int, ...] | None:
    """The lengths of this call, each with a guard; None if they depend on the step's computation."""
    if not lengths.is_tensor():
        return tuple(lengths.as_python_constant()) if lengths.is_python_constant() else None
    try:
        value_now(tx, lengths.as_proxy().node)
    except CannotTellError:
        return None
    flat = lengths.call_method(tx, "reshape", [VariableTracker.build(tx, -1)], {})
    elements = [
        flat.call_method(tx, "select", [VariableTracker.build(tx, n) for n in (0, i)], {}) for i in range(flat.size[0])
    ]
    return tuple(decide(tx, length, int) for length in elements)


def _install() -> None:
    for op, rule in ((aten._ctc_loss.default, _describe), (aten._ctc_loss_backward.default, _describe_backward)):
        op_implementations_checks.insert(0, (partial(operator.is_, op), rule))  # before what refuses by a tag


put_in_place("CTC's loss", _install)
for function in (torch.ctc_loss, torch.nn.functional.ctc_loss):
    follow_function(function, _loss)
