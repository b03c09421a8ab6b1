"""Make `torch.compiler.is_compiling()` False for the code of a step, as in plain PyTorch.

Dynamo answers yes to `torch.compiler.is_compiling` and its like, and libraries take another algorithm then: Mamba of
transformers scans its states in another order, whose gradients differ in the last bits. Here the user's code is told
no; PyTorch's own code, which asks what it may do while it is traced, is told yes.

Some code cannot be captured unless it is told yes: it would call a kernel that cannot be traced. Where a capture fails,
who asked last before that is told yes and it is tried again; a warning says who was told. A backend that PyTorch calls
by its name cannot try again: there the error says who asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from checkmate.capture.patches.only_our_captures import (
    Answer,
    Handler,
    answer_now,
    follow,
    follow_function,
    follow_skipped,
)
from checkmate.capture.provenance import FRAME, is_users
from checkmate.torch_internals.capturing import (
    BackendCompilerFailed,
    TorchDynamoException,
    TorchInGraphFunctionVariable,
    VariableTracker,
    external_is_compiling,
    mark_static_address,
    utils_is_compiling,
)
from checkmate.torch_internals.names import put_in_place

log = logging.getLogger("checkmate.capture.patches.is_compiling")
_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    external_is_compiling,  # torch._dynamo.is_compiling
    utils_is_compiling,
)
_COMPUTE_NOTHING = {  # functions that need a yes to be captured, and have nothing to do with numbers
    "transformers.modeling_utils.warn_if_padding_and_no_attention_mask",
}
_said: set[str] = set()  # places that the user was told of


def not_compiling() -> AbstractContextManager[Any]:
    """Within the block PyTorch's own code behaves as if not compiled: an optimizer would take another path."""
    return patch.object(torch.compiler, "_is_compiling_flag", False)


def plain_if_possible(run: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    """Tell code that it is not compiled, unless it cannot be captured then; a warning says so."""

    @wraps(run)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        before, failed_at, first = frozenset(answer.compiled), None, None
        try:
            while True:
                answer.asked.clear()
                try:
                    return run(*args, **kwargs)
                except BackendCompilerFailed:
                    raise
                except TorchDynamoException as error:
                    told_no = [place for place in answer.asked if place not in answer.compiled]
                    first = first or error
                    if not told_no or getattr(error, "is_users", False):
                        answer.compiled.intersection_update(before)  # it made no difference
                        # Code that was told yes went a way on which plain PyTorch never is, and failed there.
                        if error is not first and getattr(error, "users", None) is not None and not error.is_users:
                            raise first from None
                        raise
                    # Tell who asked last that it is compiled; all who asked, where the capture fails as before.
                    log.debug("cannot be captured as plain PyTorch runs it", exc_info=True)
                    frames = FRAME.findall(str(error))
                    answer.compiled.update(told_no if frames == failed_at else told_no[-1:])
                    failed_at = frames
        finally:
            warn(answer.compiled - before)

    return plainly


def warn(told_yes: set[str]) -> None:
    """Warn, once per place, of code whose numbers may differ from plain PyTorch."""
    if new := told_yes - _said:
        _said.update(new)
        log.warning(
            "Told that it is not compiled, as in plain PyTorch, the step cannot be captured. So the code that asks at "
            "%s is told that it is, and may compute other numbers than plain PyTorch. checkmate.verify compares them.",
            ", ".join(sorted(new)),
        )


def _call(plain: Handler, self: Any, fn: Any, args: Any, kwargs: Any) -> None:
    """Call a function, except one with which uncompiled code marks a tensor, which Dynamo refuses."""
    if (getattr(fn, "fn", None) or getattr(fn, "value", None)) is mark_static_address:
        self.push(VariableTracker.build(self, None))
    else:
        plain(self, fn, args, kwargs)


def _is_compiling(plain: Handler, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_users(tx.f_code.co_filename):
        return plain(self, tx, *args, **kwargs)
    while tx.f_code.co_name.startswith("is_") and tx.parent is not None:
        tx = tx.parent  # a function of a library that asks for others
    module, function = tx.f_globals.get("__name__"), tx.f_code.co_name
    if f"{module}.{function}" in _COMPUTE_NOTHING:
        return plain(self, tx, *args, **kwargs)
    answer: Any = answer_now()
    place = f"{tx.f_code.co_filename}:{tx.lineno} in {function}"
    answer.asked.pop(place, None)
    answer.asked[place] = None
    return plain(self, tx, *args, **kwargs) if place in answer.compiled else VariableTracker.build(tx, False)


def _install() -> None:
    TorchInGraphFunctionVariable._get_handlers()  # where there are none, the map below is left as it is
    # Libraries ask in one breath whether a stream is being recorded, which Dynamo cannot capture: none is.
    for question in (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing):
        follow_skipped(question, lambda plain, self, tx, *args, **kwargs: VariableTracker.build(tx, False))
    for question in _QUESTIONS:
        follow_function(question, _is_compiling)
    follow("InstructionTranslatorBase.call_function", _call)


put_in_place("answers to is_compiling()", _install)
