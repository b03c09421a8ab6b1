"""Where a compiled step leaves plain PyTorch: the first op whose value is another.

The step is captured once more and follows the same plan, op by op, with a fingerprint of each value. Beside it runs the
captured graph in its own order, each op once: what differs there, the plan has done. If nothing does, the values of the
captured graph are sought among those that plain PyTorch makes: the first that is not there, the capture has changed.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.eager import Backend
from checkmate.backends.step_problem import Write
from checkmate.capture.device import random_states, same_random_state, set_random_states
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import target_name, tensors
from checkmate.capture.provenance import where
from checkmate.codegen.boxed import takes_one_list
from checkmate.codegen.emit import AGAIN
from checkmate.codegen.writing_over import written
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import Solution
from checkmate.torch_internals.dispatcher import OpOverload, TorchDispatchMode
from checkmate.torch_internals.trees import tree_map_only

_ANOTHER = re.compile(rf"(?:{AGAIN}|_copy)(\d+)$")
Prints = tuple[str, ...]  # of the tensors of one node
# of ops that run again how many results are not made of running statistics, which are other ones by then
_OF_INPUT = {torch.ops.aten._native_batch_norm_legit_functional.default: 3}


def first_difference(
    capture: Callable[[Backend], Callable[..., Any]],
    solution: Solution,
    run: Callable[[Callable[..., Any]], Any],
    plain: Callable[..., Any],
    device: torch.device,
) -> str | None:
    """The first value that differs and the op that makes it, in words; None where all are the same.

    Args:
        capture: the step as a function that a backend compiles.
        solution: the plan that was followed.
        run: calls a step and its backward, and puts all state back.
        plain: the step as plain PyTorch runs it.
        device: of the step.
    """
    notes = _Notes(solution, device)
    run(capture(Backend(notes.plan, notes.lower, notes.profile, takes_none=False)))
    if notes.joint is None or not notes.as_captured:
        return None
    return notes.by_plan() or _by_capture(notes.joint, notes.as_captured, run, plain)


@dataclass
class _Notes:
    """What each op made when the plan was followed, and when each op ran once."""

    solution: Solution
    device: torch.device
    joint: Joint | None = None
    as_planned: list[tuple[str, Prints]] = field(default_factory=list)  # in order
    as_captured: dict[str, Prints] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)  # by placeholder, as they were before the step
    states: list[torch.Tensor] = field(default_factory=list)

    def profile(self, joint: Joint) -> Profile:
        self.joint = joint
        known = self.solution.problem
        if known.splits:  # whole here, and not planned
            return Profile(np.zeros(len(joint.graph.ops)), np.zeros(len(joint.graph.ops)), known.resident)
        return known.profile

    def plan(self, problem: Problem) -> Solution:
        known = self.solution.problem
        assert isinstance(problem.emit, Write)
        assert isinstance(known.emit, Write)
        if known.splits:
            self.joint = known.emit.joint  # that of the step as it is split
            return self.solution
        emit = replace(problem.emit, begin=known.emit.begin)  # values wait where they do in the step
        return replace(self.solution, problem=replace(problem, host=known.host, emit=emit))

    def lower(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        """Run a module node by node, as it is run otherwise: a value is looked at before another is written over it.

        After the backward the whole captured graph runs on the same inputs.
        """
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        is_backward = any(node.meta.get("autograd_backward") for node in module.graph.nodes)
        steps = written(module)

        @takes_one_list
        def run(inputs: list[Any]) -> Any:
            given = dict(zip(names, inputs, strict=True))
            if not is_backward:
                self.inputs = _copied(given)
                self.states = random_states(self.device)
            elif self.joint is not None:
                tangents = {name: given[name] for name in names if name not in self.inputs}
                self._run_as_captured(self.joint, {**self.inputs, **_copied(tangents)})
            return _Recorder(steps, lambda name, prints: self.as_planned.append((name, prints))).run(*inputs)

        return run

    def _run_as_captured(self, joint: Joint, given: dict[str, Any]) -> None:
        with same_random_state(self.device):
            set_random_states(self.states, self.device)
            recorder = _Recorder(joint.module, self.as_captured.__setitem__)
            recorder.run(*(given[node.name] for node in joint.placeholders))

    def by_plan(self) -> str | None:
        assert self.joint is not None
        nodes = {node.name: node for node in self.joint.module.graph.nodes}
        for name, found in self.as_planned:
            again = _ANOTHER.search(name)
            node = nodes.get(_ANOTHER.sub("", name))
            expected = self.as_captured.get(node.name) if node is not None else None
            if node is None or expected is None:
                continue
            count = _OF_INPUT.get(node.target) if again else None
            if expected[:count] == found[:count]:
                continue
            time = f" when it runs for time {int(again.group(1)) + 1}" if again else ""
            return f"{_described(node)}{time}: the plan runs it on other values than the captured step, or it wavers."
        return None


def _by_capture(joint: Joint, as_captured: dict[str, Prints], run: Callable[..., Any], plain: Any) -> str | None:
    """The first op of the captured graph that plain PyTorch runs too, but never with this result."""
    made = _Made()

    def watched(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    with made:
        run(watched)
    for node in joint.module.graph.nodes:
        known = made.prints.get(_family(node.target))
        prints = as_captured.get(node.name, ())
        if node.op == "call_function" and known and prints and not known.issuperset(prints):
            return f"{_described(node)}: plain PyTorch makes no such value; it was captured as another computation."
    return None


def _described(node: fx.Node) -> str:
    return f"{node.name} of {target_name(node)} ({where(node)})"


def _family(target: Any) -> str:
    """``aten::add`` for all overloads, in place or not."""
    return target._schema.name.removesuffix("_") if isinstance(target, OpOverload) else ""


class _Recorder(fx.Interpreter):
    """Runs a module node by node and tells of each what it made."""

    def __init__(self, module: fx.GraphModule, tell: Callable[[str, Prints], None]) -> None:
        super().__init__(module)
        self.tell = tell

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self.tell(n.name, _prints(result))
        return result


class _Made(TorchDispatchMode):
    """Fingerprints of all that plain PyTorch makes, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.prints: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.prints[_family(func)].update(_prints(result))
        return result


def _prints(result: Any) -> Prints:
    return tuple(map(_fingerprint, tensors(result)))


def _fingerprint(tensor: torch.Tensor) -> str:
    """What tells a tensor's bits, shape and type from others, whatever its strides."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)
