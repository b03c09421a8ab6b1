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
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.compilation import Backend
from checkmate.backends.step_problem import joint_of
from checkmate.capture.device import random_states, same_random_state, set_random_states
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import target_name, tensors
from checkmate.capture.provenance import where
from checkmate.codegen.boxed import takes_one_list
from checkmate.codegen.emit import AGAIN
from checkmate.codegen.writing_over import written
from checkmate.core.problem import Profile
from checkmate.core.solution import Solution
from checkmate.torch_internals.dispatcher import OpOverload, TorchDispatchMode
from checkmate.torch_internals.trees import tree_map_only

_ANOTHER = re.compile(rf"(?:{AGAIN}|_copy)(\d+)$")
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
    joint = joint_of(solution.problem)
    planned: list[tuple[str, list[str]]] = []  # fingerprints by node, in the order of the plan
    captured: dict[str, list[str]] = {}  # the same where each op runs once
    inputs: dict[str, Any] = {}  # by placeholder, as they were before the step
    states: list[torch.Tensor] = []

    def lower(module: fx.GraphModule, _: list[Any]) -> Callable[[list[Any]], Any]:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        is_backward = any(node.meta.get("autograd_backward") for node in module.graph.nodes)
        steps = written(module)

        @takes_one_list
        def run_recorded(values: list[Any]) -> Any:
            given = dict(zip(names, values, strict=True))
            if not is_backward:
                inputs.update(_copied(given))
                states[:] = random_states(device)
            else:  # the backward may write over what it reads: the captured graph runs before it
                known = {**_copied({name: x for name, x in given.items() if name not in inputs}), **inputs}
                with same_random_state(device):
                    set_random_states(states, device)
                    recorder = _Recorder(joint.module, captured.__setitem__)
                    recorder.run(*(known[node.name] for node in joint.placeholders))
            return _Recorder(steps, lambda *made: planned.append(made)).run(*values)

        return run_recorded

    def profile(one: Joint) -> Profile:
        if not solution.problem.splits:
            return solution.problem.profile
        costs = np.zeros(len(one.graph.ops))  # of the step as it is captured, with its loss at once
        return Profile(costs, costs, solution.problem.resident)

    run(capture(Backend(lambda _: solution, lower, profile)))
    if not captured:
        return None
    # What the plan has done: a value that differs from that of the captured graph.
    nodes = {node.name: node for node in joint.module.graph.nodes}
    for name, found in planned:
        again, node = _ANOTHER.search(name), nodes.get(_ANOTHER.sub("", name))
        if node is None or node.name not in captured:
            continue
        count = _OF_INPUT.get(node.target) if again else None
        if captured[node.name][:count] != found[:count]:
            time = f" when it runs for time {int(again[1]) + 1}" if again else ""
            return f"{_described(node)}{time}: the plan runs it on other values than the captured step, or it wavers."
    # What the capture has changed: an op that plain PyTorch runs too, but never with this result.
    with _Made() as made:
        run(lambda *args, **kwargs: plain(*args, **kwargs))
    for node in joint.module.graph.nodes:
        known, prints = made.prints.get(_family(node.target)), captured.get(node.name, [])
        if node.op == "call_function" and known and prints and not known.issuperset(prints):
            return f"{_described(node)}: plain PyTorch makes no such value; it was captured as another computation."
    return None


def _described(node: fx.Node) -> str:
    return f"{node.name} of {target_name(node)} ({where(node)})"


def _family(target: Any) -> str:
    """``aten::add`` for all overloads, in place or not."""
    return target._schema.name.removesuffix("_") if isinstance(target, OpOverload) else ""


class _Recorder(fx.Interpreter):
    """Runs a module node by node, and tells the fingerprints of each result at once."""

    def __init__(self, module: fx.GraphModule, tell: Callable[[str, list[str]], None]) -> None:
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


def _prints(result: Any) -> list[str]:
    """Fingerprints of the bits, shape and type of each tensor, without its strides."""
    flat = [(t, t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)) for t in tensors(result)]
    return [f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}" for t, raw in flat]


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)
