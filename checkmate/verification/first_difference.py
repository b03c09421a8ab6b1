"""Find the first op of a compiled step whose value is not that of plain PyTorch.

The step is captured anew, once with the plan that it followed and once with a plan that runs each op once, and a
fingerprint is taken of each value. A value that differs between the two is a mistake of the plan. If none does, the
values are looked up among those that plain PyTorch makes: the first that is missing is a mistake of the capture.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from checkmate.backends.compilation import Backend
from checkmate.backends.step_problem import joint_of
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import target_name, tensors
from checkmate.capture.provenance import where
from checkmate.codegen.boxed import takes_one_list
from checkmate.codegen.emit import AGAIN
from checkmate.codegen.writing_over import run_over, writes_of
from checkmate.core.graph import MAX_BYTES
from checkmate.core.problem import Profile
from checkmate.core.solution import Solution
from checkmate.solvers.solve import solve
from checkmate.torch_internals.running import DispatchKey, OpOverload, TorchDispatchMode, _SetExcludeDispatchKeyGuard

Step = Callable[..., Any]
Capture = Callable[[Backend], Step]  # of the same step by a backend
_ANOTHER = re.compile(rf"(?:{AGAIN}|_copy)(\d+)$")
# Results of ops that run again to compare: the others are running statistics, which have gone on by then.
_OF_INPUT = {torch.ops.aten._native_batch_norm_legit_functional.default: 3}


def first_difference(capture: Capture, solution: Solution, run: Callable[[Step], Any], plain: Step) -> str | None:
    """The first value that differs and the op that makes it, in words; None if all values are equal.

    Args:
        capture: compiles the step with a backend.
        solution: the plan that was followed.
        run: calls a step and its backward, and puts all state back.
        plain: the step as plain PyTorch runs it.
    """
    problem = solution.problem

    def profile(joint: Joint) -> Profile:
        if not problem.splits:
            return problem.profile
        costs = np.zeros(len(joint.graph.ops))  # of the step as it is captured, with its loss at once
        return Profile(costs, costs, problem.resident)

    def fingerprints(plan: Solution) -> list[tuple[str, list[str]]]:
        """Fingerprints of each value by node, in the order of a plan."""
        prints: list[tuple[str, list[str]]] = []

        def lower(module: fx.GraphModule, _: list[Any]) -> Callable[[list[Any]], Any]:
            recorder = _Recorder(module, prints)
            return takes_one_list(lambda values: recorder.run(*values))

        run(capture(Backend(lambda _: plan, lower, profile)))
        return prints

    plainly = replace(problem, rules=(), host=None, profile=replace(problem.profile, ways=()))
    once = dict(fingerprints(solve(plainly, MAX_BYTES, method="checkpoint-all")))
    nodes = {node.name: node for node in joint_of(problem).module.graph.nodes}
    for name, hashes in fingerprints(solution):
        again, node = _ANOTHER.search(name), nodes.get(_ANOTHER.sub("", name))
        if node is None or node.name not in once:
            continue
        count = _OF_INPUT.get(node.target) if again else None
        if once[node.name][:count] != hashes[:count]:
            time = f" when it runs for time {int(again[1]) + 1}" if again else ""
            return f"{_described(node)}{time}: the plan runs it on other values than the captured step, or it wavers."
    with _Made() as recorder:
        run(lambda *args, **kwargs: plain(*args, **kwargs))
    for node in nodes.values():
        # An op that plain PyTorch runs too, but never with this result.
        plain_prints, prints = recorder.fingerprints.get(_family(node.target)), once.get(node.name)
        if plain_prints and prints and not plain_prints.issuperset(prints):
            return f"{_described(node)}: plain PyTorch makes no such value; it was captured as another computation."
    return None


class _Recorder(fx.Interpreter):
    """Runs a module node by node and takes fingerprints of each result at once, before it can be overwritten."""

    def __init__(self, module: fx.GraphModule, prints: list[tuple[str, list[str]]]) -> None:
        super().__init__(module)
        self.found, self._writes = prints, writes_of(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        if n in self._writes:
            result = run_over(n.target, *self.fetch_args_kwargs_from_env(n), self._writes[n])
        else:
            result = super().run_node(n)
        if n.op == "call_function":
            self.found.append((n.name, _fingerprints(result)))
        return result


class _Made(TorchDispatchMode):
    """Fingerprints of everything that plain PyTorch makes, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.fingerprints: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _SetExcludeDispatchKeyGuard(DispatchKey.Conjugate, False):  # else kernels conjugate nothing under a mode
            result = func(*args, **(kwargs or {}))
        self.fingerprints[_family(func)].update(_fingerprints(result))
        return result


def _fingerprints(result: Any) -> list[str]:
    """Fingerprints of the bits, shape and type of each tensor, without its strides."""
    flat = [(t, t.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)) for t in tensors(result)]
    return [f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}" for t, raw in flat]


def _family(target: Any) -> str:
    """``aten::add`` for all overloads, in place or not."""
    return target._schema.name.removesuffix("_") if isinstance(target, OpOverload) else ""


def _described(node: fx.Node) -> str:
    return f"{node.name} of {target_name(node)} ({where(node)})"
