"""Methods that give a tensor itself where there is nothing to convert: ``x.to(x.dtype)`` is ``x``, as in plain PyTorch.

Dynamo makes another object of it, which has lost what Python keeps with the tensor: assigned again to the name of an
`torch.nn.Buffer`, as models do that move it to where their input is, it no longer says whether it is persistent, and
the assignment is refused. Importing this module has Dynamo go on with the tensor itself, in what our backends capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from checkmate.capture.patches.branches import is_ours
from checkmate.torch_internals.dynamo import wrap

_CONVERT = {
    *("to", "type", "type_as", "contiguous", "cpu", "cuda", "bool", "byte", "char", "short", "int", "long"),
    *("half", "bfloat16", "float", "double"),
}


def _itself(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's call of a method of a tensor."""

    @wraps(plain)
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        result = plain(self, tx, name, args, kwargs)
        if name in _CONVERT and is_ours(tx) and type(result) is type(self) and _described(result) is _described(self):
            return self
        return result

    return called


def _described(variable: Any) -> Any:
    """The fake tensor that stands for one."""
    return variable.as_proxy().node.meta["example_value"]


wrap("TensorVariable.call_method", _itself)
