"""Refuse backwards in which gradients of a weight, of a step and beside it, meet in autocast's half-precision copy.

A region of autocast that is entered before a step is called, and left after it, keeps the converted copy of a weight
for other uses (`checkmate.capture.autocast`). In plain PyTorch the gradients of all of them meet in the copy. A
captured step has a gradient of its own for each weight, in float32. In two backwards that is the same, in one not.

So a captured step leaves in the region, for each weight that it converts, what becomes the copy if somebody uses it
(`_Copy`), and has its backward ask whether the engine will run that of the copy, or of another step that has used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from checkmate.capture.around import Around
from checkmate.capture.autocast import Copies, autocast_as_found, is_kept, within_region
from checkmate.codegen.undefined_gradients import before_backward, compiled_functions
from checkmate.errors import Unsupported
from checkmate.torch_internals.running import (
    TorchDispatchMode,
    _make_wrapper_subclass,
    _will_engine_execute_node,
    tree_map_only,
)

aten = torch.ops.aten
_USERS = "checkmate: backwards of steps"  # in the meta data of a copy's node of autograd
_ANEW = "checkmate.compile captures such a call anew; a backend that torch.compile calls by its name is not asked to."


class SharedCopies(Around):
    """Leave in an autocast region within which a step is called what becomes the copies of its weights."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def before(self, inputs: list[Any]) -> dict[str, Any]:
        """The nodes of autograd in which gradients of weights meet in this region, by the name of the weight."""
        copies = self._copies
        if copies.kept != [*map(is_kept, inputs)]:
            raise Unsupported(
                "Autocast keeps the converted copy of an input that is a leaf, and an input was one when the step was "
                f"captured and is none now, or the other way round. {_ANEW}"
            )
        if copies.within not in (None, within_region()):
            raise Unsupported(
                "The step enters autocast, and was captured within another region of it, which keeps the converted "
                f"weights, and is called outside of one now, or the other way round. {_ANEW}"
            )
        nodes: dict[str, Any] = {}
        if not (within_region() and torch.is_grad_enabled()):
            return nodes
        with autocast_as_found():
            torch.set_autocast_cache_enabled(True)
            for i, dtype in copies.converted.items():
                weight, name = inputs[i], copies.names[i]
                torch.set_autocast_enabled(weight.device.type, True)
                torch.set_autocast_dtype(weight.device.type, dtype)
                with _Lookup(name) as lookup:
                    torch.mm(weight, weight)  # which autocast gives copies
                copy = lookup.copy
                if isinstance(copy, _Copy):
                    is_present = copy.version == weight._version
                else:  # it has the bits of the present weight, then
                    now = weight.detach().to(copy.dtype)
                    is_present = bool((now.view(torch.int16) == copy.detach().view(torch.int16)).all())
                if not is_present:
                    raise _changed(name)
                nodes[name] = copy.grad_fn
        return nodes

    def after(self, note: dict[str, Any], args: Sequence[Any], results: Any) -> Any:
        """Register, for each backward, the question whether it runs these nodes or other steps that used them."""
        for function in compiled_functions(results, args) if note else ():
            for node in note.values():
                node.metadata.setdefault(_USERS, []).append(weakref.ref(function))
            before_backward(function, partial(_refuse_shared, note))
        return results


def _refuse_shared(nodes: dict[str, Any], function: Any, grads: Any) -> None:
    for name, node in nodes.items():
        steps = [user() for user in node.metadata[_USERS] if user() not in (None, function)]
        if any(map(_will_engine_execute_node, (node, *steps))):
            raise Unsupported(
                f"{name} is used by a compiled step and once more in the same region of autocast, and this "
                "backward computes the gradients of both. Plain PyTorch adds them in half precision; those within "
                "the step are added before. Enter torch.autocast within the step, or anew for each call, or "
                "compile all that uses the weight as one step."
            )


class _Copy(torch.Tensor):
    """The copy of a weight that autocast keeps before its first use: it is converted then."""

    weight: Callable[[], Any]
    version: int  # of the weight, when it would have been converted
    called: str
    made: torch.Tensor | None = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_Copy, _Copy.converted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def converted(self) -> torch.Tensor:
        if self.made is None:
            weight = self.weight()
            if weight._version != self.version:
                raise _changed(self.called)
            self.made = weight.detach().to(self.dtype)
        return self.made


def _changed(name: str) -> Unsupported:
    return Unsupported(
        f"{name} was changed in a region of autocast in which it had been converted: plain PyTorch goes on with the "
        "copy of what it was. Update parameters after the block of torch.autocast."
    )


class _Lookup(TorchDispatchMode):
    """Looks up the copy of a weight that autocast keeps, or gives it a `_Copy`; computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.copy: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            weight, layout = args[0], {"dtype": kwargs["dtype"], "device": args[0].device}
            copy: _Copy = _make_wrapper_subclass(_Copy, weight.shape, weight.stride(), **layout)
            copy.weight, copy.version, copy.called = weakref.ref(weight), weight._version, self.name
            return copy
        self.copy = args[0]
        return torch.empty(0)
