"""Errors of the machinery below, said again for the person at the keyboard: what, where in their code, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch._dynamo.exc as dynamo
from torch import nn

from checkmate.errors import CheckmateError, Unsupported
from checkmate.provenance import is_users

_USER_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.+)')
_ADVICE = {  # what Dynamo says, in lower case: what to do
    "rnn, gru, or lstm": (
        "The kernels of nn.RNN, nn.LSTM and nn.GRU cannot be captured. Call nn.RNNCell, nn.LSTMCell or nn.GRUCell once "
        "for each step of the sequence."
    ),
    "hook": "Compile the module without backward hooks, or register them on tensors: tensor.register_hook(...).",
    "trace_autograd_ops": "Return the loss, and call backward() or torch.autograd.grad() on it outside.",
    "optimizer.": "Return the loss, and call backward() and the optimizer outside.",
    "retain_grad": "Register a hook instead: tensor.register_hook(...).",
    "generator=": "Draw outside of the compiled function and pass the numbers in, or draw from the global generator.",
    "random.": "Draw with torch, or draw outside and pass the number in as a tensor.",
}
_ONE_GRAPH = (
    "The whole step is planned at once, so it must be captured as one graph: move this out of the compiled function "
    "(logging, .item(), branches on tensor values), or compile a part that does not need it."
)


def explained(error: Exception, fn: Callable[..., Any]) -> Exception:
    """The error to raise for one that came out of a compiled call; the same one where it explains itself."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CheckmateError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if isinstance(error, dynamo.FailOnRecompileLimitHit):
        return Unsupported(
            f"{name} was called with more kinds of input than are compiled (torch._dynamo.config.recompile_limit). "
            "Pad the batches to fewer shapes. A number that changes from call to call, an argument or an attribute of "
            "the module, is part of what is compiled: make it a tensor. Or raise the limit."
        )
    if isinstance(error, dynamo.TorchRuntimeError):  # plain PyTorch fails as well
        return RuntimeError(f"{_message(error)}{_place(error)}")
    if isinstance(error, (dynamo.Unsupported, dynamo.UserError)):
        return Unsupported(f"Cannot capture {name}: {_reason(error)}{_place(error)}\n{_advice(error)}")
    if isinstance(error, dynamo.BackendCompilerFailed):
        inner = error.inner_exception
        return Unsupported(f"Cannot compile {name}: {type(inner).__name__}: {inner}")
    return error


def refuse_lazy(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse modules without parameters yet: capture would make them from random numbers that it then gives back.

    Looks at modules among the arguments, and at what a function holds.

    Raises:
        Unsupported: naming the first such parameter.
    """
    code = getattr(fn, "__code__", None)
    held = [
        getattr(fn, "__self__", None),
        *args,
        *(cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()),
    ]
    held += [fn.__globals__.get(name) for name in code.co_names] if code is not None else []
    for module in held:
        if not isinstance(module, nn.Module):
            continue
        for name, parameter in module.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                raise Unsupported(
                    f"{name} of {type(module).__name__} has no shape yet. Call it once before compiling, on a batch."
                )


def _reason(error: Exception) -> str:
    """The first line of what Dynamo says, and its explanation."""
    text = str(error)
    first = text.strip().splitlines()[0].strip()
    explanation = re.search(r"Explanation: (.+)", text)
    return f"{first}. {explanation.group(1).strip()}" if explanation else first


def _message(error: Exception) -> str:
    """What PyTorch itself said of an op that fails on the shapes or types it was given."""
    said = re.search(r"got \w+\((['\"])(.+?)\1\)", str(error), re.DOTALL)
    return said.group(2) if said else str(error)


def _place(error: Exception) -> str:
    """The innermost line of the user's own code."""
    frames = [frame for frame in _USER_FRAME.findall(str(error)) if is_users(frame[0])]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    return f"\n  {file}:{line} in {function}: {code.strip()}"


def _advice(error: Exception) -> str:
    said = f"{_reason(error)}{_place(error)}".lower()
    return next((advice for words, advice in _ADVICE.items() if words in said), _ONE_GRAPH)
