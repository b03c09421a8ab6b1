"""The code of a captured step whose plan may yet change: one forward and one backward for each plan it has run by.

All plans of a step give the same bits, so another may take over between two calls. AOTAutograd compiles once, and takes
as saved tensors whatever the forward returns after the results, however many these are; the backward gets them back.
Here one tensor goes before them, whose length says by which plan the forward ran: so a backward runs the code of its
own forward, whenever it comes. While it lives, the graph of that call may still be differentiated. Its memory is not
PyTorch's, and counts in no peak.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from checkmate.capture.joint import Joint
from checkmate.codegen.boxed import takes_one_list
from checkmate.codegen.emit import is_unchecked
from checkmate.torch_internals.aot import (
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TracingContext,
    is_sym_node,
)

Run = Callable[[list[Any]], Any]
_OF_SEVERAL_TENSORS = (
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    ForwardTokenAOTInput,
    BackwardTokenAOTInput,
)


def may_change(joint: Joint) -> bool:
    """Tell whether the forwards of all plans agree in everything that AOTAutograd counts.

    That is how many numbers they save, and how many tensors that autograd does not check: inputs among these are saved
    by each plan (`checkmate.codegen.emit`), others are not. Nor does it count only saved tensors where subclasses of
    tensors are taken apart, or tokens order side effects.
    """
    nodes, found = joint.module.graph.nodes, [*joint.forward_descs, *joint.backward_descs]
    found += [node.meta.get("desc") for node in joint.placeholders]
    return (
        not joint.numbers
        and not any(is_sym_node(node) for node in nodes)
        and not any(is_unchecked(node) and node.op != "placeholder" for node in nodes)
        and all(isinstance(node.meta.get("val"), torch.Tensor) for node in joint.placeholders)
        and not any(isinstance(desc, _OF_SEVERAL_TENSORS) for desc in found)
    )


def _detach_all_views() -> None:
    """Make AOTAutograd save views without their graph, be they inputs or not.

    From PyTorch 2.14 on it notes by place which of the saved tensors are inputs; of another plan these are others.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.saved_tensor_is_graph_input = defaultdict(bool)  # False at any place


class ReplaceableCode:
    """The forward and backward given to AOTAutograd, which run the code of the present plan."""

    def __init__(self, results: int) -> None:
        self._results = results  # how many of the forward's outputs are not saved tensors
        self._runs: dict[str, dict[int, Run]] = {"forward": {}, "backward": {}}  # by the number of the plan
        self._calls = itertools.count()
        self._alive: dict[int, weakref.ref[np.ndarray]] = {}  # by call: dies with what the call has saved
        self.now = 0  # the plan by which the forward runs

    @property
    def pending(self) -> bool:
        """True while a forward's saved tensors wait for their backward."""
        return bool(self._alive)

    def first(self, phase: Literal["forward", "backward"], run: Run) -> Run:
        """Take the first plan's function, the backward last, and give AOTAutograd the one to call in its place."""
        _detach_all_views()
        self._runs[phase][0] = run
        whole = self._forward if phase == "forward" else self._backward
        return takes_one_list(lambda inputs: whole(inputs))

    def take_over(self, forward: Run, backward: Run) -> None:
        """Run this code in all forwards from now on, and in their backwards."""
        self._runs["forward"] = {self.now + 1: forward}
        self._runs["backward"][self.now + 1] = backward
        self.now += 1

    def _forward(self, inputs: list[Any]) -> Any:
        ((number, run),) = self._runs["forward"].items()
        results = run(inputs)
        return [*results[: self._results], self._mark(number), *results[self._results :]]

    def _backward(self, inputs: list[Any]) -> Any:
        number = len(inputs.pop(0)) - 1
        return self._runs["backward"][number](inputs)

    def _mark(self, number: int) -> torch.Tensor:
        """Make the tensor that tells by which plan a forward ran."""
        call = next(self._calls)
        memory = np.zeros(number + 1, dtype=np.float32)  # not empty: a hook may ask what is saved for its maximum
        self._alive[call] = weakref.ref(memory, lambda _: self._alive.pop(call, None))
        return torch.from_numpy(memory)
