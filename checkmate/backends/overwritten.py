"""Refuse a backward that needs a tensor which was written to since the forward, and name it.

Autograd finds such a tensor too, by its version, when it hands saved tensors to the backward, and says a shape. Here
the person is told which tensor it was, and which op of their code needs it. What is written through ``.data`` leaves
the version as it was, and is found by nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.joint import Joint
from checkmate.capture.nodes import is_view, target_name
from checkmate.capture.provenance import where
from checkmate.codegen.emit import AGAIN, Modules
from checkmate.errors import Unsupported
from checkmate.torch_internals.aot import SavedForBackwardsAOTOutput


@dataclass(frozen=True)
class NeededTensor:
    """What a backward needs a tensor for."""

    name: str  # of the tensor, as the user knows it
    op: str  # that reads it, and where in the user's code it stands
    again: bool  # whether that is an op of the forward that the plan runs again
    in_plain: bool  # whether plain PyTorch keeps the tensor for its backward, too

    def __str__(self) -> str:
        reads = "which the plan runs again," if self.again else "in the backward,"
        finish = "Call backward() before it is written to, before optimizer.step() for example"
        if self.in_plain:
            advice = f"Plain PyTorch refuses this too. {finish}, or have the step compute from a copy, x.clone()."
        else:
            advice = (
                f"Plain PyTorch keeps what was made of it and does not read it again. {finish}; or give the step a "
                "roomier budget, so that this op is not run again."
            )
        return (
            f"{self.name} was written to between the step and its backward, which needs it as it was: "
            f"{self.op}, {reads} reads it. {advice}"
        )


@dataclass
class NeededTensors:
    """What the backward of a step needs of the step's inputs and results, each by position."""

    inputs: Mapping[int, NeededTensor]
    results: Mapping[int, NeededTensor]

    def become(self, other: NeededTensors) -> None:
        """Be those of another plan, which takes over."""
        self.inputs, self.results = other.inputs, other.results


def needed_tensors(joint: Joint, modules: Modules, names: Sequence[str]) -> NeededTensors:
    """What the backward of a plan reads of the inputs and results of its forward; ``names``: of the inputs."""
    output = modules.forward.graph.output_node()
    outputs: Any = output.args[0]
    count = len(joint.forward_outputs)
    readers = {n.name: _reader(n) for n in modules.backward.graph.find_nodes(op="placeholder")}
    forward = {op.name for op in joint.graph.ops if op.phase == "forward"}
    in_plain = {v for op in joint.graph.ops if op.phase == "backward" for v in op.inputs}
    values = {node.name: set(found) for node, found in joint.value_of.items()}
    inputs: dict[int, NeededTensor] = {}
    results: dict[int, NeededTensor] = {}

    def add(found: dict[int, NeededTensor], position: int, name: str, node: fx.Node) -> None:
        reader = readers[node.name]
        again = reader is not None and reader.name.split(AGAIN)[0] in forward
        op = f"{target_name(reader)} of {where(reader)}" if reader is not None else "what hands it on as a gradient"
        found[position] = NeededTensor(name, op, again, bool(values[node.name] & in_plain))

    for node, desc in zip(outputs[count:], output.meta["desc"][count:], strict=True):
        if not isinstance(desc, SavedForBackwardsAOTOutput):  # written to within the step itself
            continue
        position = getattr(node.meta.get("desc"), "idx", None) if node.op == "placeholder" else None
        if position is not None:
            add(inputs, position, names[position] if position < len(names) else f"input {position}", node)
        elif node in outputs[:count]:
            shape = tuple(node.meta["val"].shape)
            add(results, outputs.index(node), f"A result of the compiled step, of shape {shape},", node)
    return NeededTensors(inputs, results)


def _reader(node: fx.Node) -> fx.Node | None:
    """The first op that reads a tensor, or a view of it."""
    for user in node.users:
        found = _reader(user) if is_view(user) else user if user.op == "call_function" else None
        if found is not None:
            return found
    return None


def explain_writes(
    needed: NeededTensors, args: Sequence[Any], results: Sequence[Any], functions: Sequence[Any]
) -> None:
    """Have the backward of a call refuse, in words, what was written to since.

    ``needed``: by it at this call; they may change before the next.
    """
    given = [(args[i], need) for i, need in needed.inputs.items()]
    made = [(t, needed.results.get(t.output_nr)) for t in results if getattr(t, "grad_fn", None) in functions]
    kept = [
        (weakref.ref(tensor), tensor._version, need)
        for tensor, need in (*given, *made)
        if need is not None and not tensor.is_inference()
    ]
    for function in functions if kept else ():
        function.register_prehook(partial(_refuse_written, kept))


def _refuse_written(kept: Iterable[tuple[weakref.ref[torch.Tensor], int, NeededTensor]], grads: Any) -> None:
    for tensor, version, need in kept:
        found = tensor()
        if found is not None and found._version != version:
            raise Unsupported(str(need))
