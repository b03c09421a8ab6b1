"""A tensor whose shape was changed in place, as by ``unsqueeze_``: where tracing loses track of that, it is said.

PyTorch's fake tensors make a view again from its base by the views that led to it, and leave out a change of shape in
place: a later write to such a view fails with an IndexError that plain PyTorch does not raise. Importing this module
has Dynamo refuse that in what our backends capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import builder

from checkmate.capture.patches.branches import is_ours
from checkmate.capture.patches.fitting import wrap

_CHANGE = {"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"}  # methods


def _explaining(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's description of what a node makes."""

    @wraps(plain)
    def described(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(node, tx, *args, **kwargs)
        except IndexError as error:
            graphs = (tx.output.current_tracer.graph, tx.output.root_tracer.graph) if is_ours(tx) else ()
            changes = [n.target for graph in graphs for n in graph.nodes if n.target in _CHANGE]
            if not changes:
                raise
            why = f"PyTorch says: {error}. Before, {changes[0]} changed the shape of a tensor in place."
            unimplemented(gb_type="What an op makes cannot be told", context=str(error), explanation=why, hints=[])

    return described


wrap(builder, "get_fake_value", _explaining)
