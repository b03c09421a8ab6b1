"""The order of a traced training step's ops: its forward, its backward, and ops that must run once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture import cudnn
from checkmate.capture.device import WAVERS, is_unordered
from checkmate.capture.higher_order.table import runs_once
from checkmate.capture.nodes import (
    ancestors,
    done_with_gradients,
    input_position,
    is_collective,
    is_mutating,
    is_random,
    is_view,
    leaf_nodes,
    storage,
    storages,
    updated,
    written,
)
from checkmate.capture.number_inputs import number_placeholders, symbols_of_numbers
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import SAVES
from checkmate.capture.sharded.collectives import GATHER_AGAIN
from checkmate.errors import Unsupported
from checkmate.torch_internals import capturing
from checkmate.torch_internals.capturing import _is_primal, _must_be_in_backward, is_sym_node, is_with_effects

_INPUTS = capturing.PlainAOTInput, capturing.ParamAOTInput, capturing.BufferAOTInput  # descriptions of them
_FROM_OUTSIDE = (
    capturing._is_tangent,
    capturing._is_bwd_seed_offset,
    capturing._is_backward_state,
)  # what a backward is handed
_BATCH_NORMS = {torch.ops.aten._native_batch_norm_legit_functional.default, cudnn.batch_norm}


class TracedStep:
    """A joint graph as AOTAutograd hands it over, with what the caller says of its inputs.

    Args:
        num_fwd_outputs: how many outputs of the graph belong to the forward.
        static_inputs: positions of the inputs that are parameters and buffers.
        input_names: what to call the inputs, by position in what was traced.
        numbers: what Dynamo calls the inputs that are numbers, by position; see `checkmate.capture.number_inputs`.
        draws: positions of the inputs that are draws of Python's generator.
        parameters: positions in what was traced of those that are parameters of modules, frozen or not.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        num_fwd_outputs: int,
        static_inputs: Iterable[int] = (),
        input_names: Sequence[str] = (),
        numbers: Mapping[int, str] = MappingProxyType({}),
        draws: Iterable[int] = (),
        parameters: Iterable[int] = (),
    ) -> None:
        outputs = capturing._extract_fwd_bwd_outputs(module, num_fwd_outputs=num_fwd_outputs)
        parts: list[tuple[Any, ...]] = [tuple(part) for part in outputs]
        # Results, nodes or constants, and AOTAutograd's descriptions of them.
        self.forward_outputs, self.backward_outputs, self.forward_descs, self.backward_descs = parts
        self.module = module
        self.nodes: list[fx.Node] = list(module.graph.nodes)
        self.placeholders = tuple(n for n in self.nodes if n.op == "placeholder")
        self.numbers = number_placeholders(module.graph, numbers)  # with what Dynamo calls them
        self.draws = number_placeholders(module.graph, dict.fromkeys(draws, "a draw"))
        self.given_numbers = symbols_of_numbers(self.numbers)  # all other numbers are computed from these
        self.static_inputs = frozenset(static_inputs)
        self.input_names, self.parameters = input_names, frozenset(parameters)
        self.after_tangent = after_tangent(self.nodes)
        mutations = [desc for desc in self.forward_descs if isinstance(desc, capturing.InputMutationAOTOutput)]
        at_return = {desc.mutated_input for desc in mutations if isinstance(desc.mutated_input, _INPUTS)}
        stored = [n for n in self.placeholders if n.meta.get("desc") in at_return]  # by AOTAutograd, outside the graph
        targets = (*(target for n in self.nodes for target in written(n)), *stored)
        # Storages of inputs that the step overwrites, with their names.
        self.overwritten = {key: self.name(target) for target in targets for key in storages(target)}

    def name(self, node: fx.Node) -> str:
        """The name of a node's value: the user's for an input, else the graph's."""
        is_input = node.op == "placeholder" and _is_primal(node)
        position = input_position(node) if is_input else None
        return node.name if position is None or position >= len(self.input_names) else self.input_names[position]

    def reads_overwritten(self, node: fx.Node) -> str | None:
        """The overwritten input that this op reads and depends on; an update goes on with the new value."""
        if is_mutating(node) or done_with_gradients(node) or _is_training_norm(node):
            return None
        read = storages(*node.all_input_nodes)
        return next((self.overwritten[key] for key in read if key in self.overwritten), None)

    def pinned(self, node: fx.Node) -> str | None:
        """The reason why an op must run exactly once."""
        if is_mutating(node):
            return "overwrites " + ", ".join(map(self.name, written(node)))
        if does := done_with_gradients(node):
            return does.format(*map(self.name, leaf_nodes(node.args[1:2])))
        if is_with_effects(node):
            return "has a side effect"
        if node.target in SAVES:
            return "saves the random state before a draw"
        if is_random(node):
            return "draws random numbers"
        if is_collective(node) and node.target is not GATHER_AGAIN:
            return "exchanges data with other ranks"
        if node.meta.get(WAVERS):
            return "leaves other bits when it runs again"
        if is_unordered(node):
            return "adds in no fixed order on a GPU"
        if reason := runs_once(node):
            return reason
        if name := self.reads_overwritten(node):
            return f"reads {name}, which the step overwrites"
        return None


def after_tangent(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on a tangent, were put into the backward by hand, or update parameters there."""
    after: set[fx.Node] = set()
    for n in nodes:
        handed_in = n.op == "placeholder" and any(is_kind(n) for is_kind in _FROM_OUTSIDE)
        if handed_in or _must_be_in_backward(n) or done_with_gradients(n) or any(a in after for a in n.all_input_nodes):
            after.add(n)
    return after


def _is_training_norm(node: fx.Node) -> bool:
    """Tell whether an op is a batch norm in training, whose results do not depend on running statistics."""
    return node.target in _BATCH_NORMS and bool(node.args[5])


def let_overwrite(step: TracedStep) -> None:
    """Save in-place-updated inputs without autograd's version check if the backward does not read them.

    Running statistics may be written by another call before the backward; a parameter by this step, before its update.
    """
    for node in step.nodes:
        statistics = leaf_nodes(node.args[3:5]) if _is_training_norm(node) else []
        parameters = leaf_nodes(node.args[1:2]) if done_with_gradients(node) else []
        # What is no input, such as an instance norm's copies of its statistics, is let go of as soon as it was read.
        for n in filter(lambda n: storage(n.meta["val"]) in step.overwritten, (*statistics, *parameters)):
            n.meta["saved_tensor_with_no_vc_check"] = True


def split_forward_backward(step: TracedStep) -> tuple[list[fx.Node], list[fx.Node]]:
    """The op nodes of the forward and of the backward, each in the order of first execution.

    Raises:
        Unsupported: if the forward depends on a gradient, or the backward reads what the forward overwrites.
    """
    calls = [n for n in step.nodes if n.op == "call_function"]
    ops = {n for n in calls if n.target is not operator.getitem and not is_sym_node(n) and not is_view(n)}

    # The forward's results depend on its ops, or these must run once before any gradient.
    early = [n for n in step.nodes if n in ops and n not in step.after_tangent]
    must_run = (n for n in early if step.pinned(n) and not capturing._has_tag_is_backward(n))
    forward = ancestors([*leaf_nodes(step.forward_outputs), *must_run])
    if clash := next((n for n in step.nodes if n in forward and n in step.after_tangent), None):
        raise Unsupported(f"{where(clash)}: {clash.name} of the forward depends on a gradient.")

    # An op that neither depends on a tangent nor is needed for the forward's results runs next to its first user in the
    # backward: in the order of the joint graph it would force everything it reads to be there at once.
    gradients = leaf_nodes(step.backward_outputs)
    late = [n for n in calls if n in step.after_tangent]
    has_effect = (n for n in late if is_mutating(n) or is_with_effects(n) or done_with_gradients(n))
    needed = ancestors([*gradients, *has_effect])
    backward: dict[fx.Node, None] = {}
    for root in (*(n for n in step.nodes if n in needed and n in step.after_tangent), *gradients):
        stack = [root]
        while stack:
            n = stack[-1]
            missing = [a for a in n.all_input_nodes if a not in forward and a not in backward]
            if missing and n not in backward:
                stack += reversed(missing)
            else:
                backward.setdefault(stack.pop())

    in_backward = _updates_placed([n for n in backward if n not in forward and n in ops])
    for n in in_backward:
        if name := step.reads_overwritten(n):
            raise Unsupported(
                f"{where(n)}: the backward reads {name}, which the forward overwrites in place. "
                "Write to a copy of it instead."
            )
    return [n for n in step.nodes if n in forward and n in ops], in_backward


def _updates_placed(backward: list[fx.Node]) -> list[fx.Node]:
    """Move ops on gradients as early as possible, but updates not before the last reader of the parameter."""
    # Where each op stands, and the last reader of each storage.
    updates = [n for n in backward if done_with_gradients(n)]
    place = {n: i for i, n in enumerate(backward)}
    last: dict[int, int] = {}  # reader of a storage
    for i, n in enumerate(backward if updates else ()):
        if not done_with_gradients(n):
            last.update((key, i) for key in storages(*n.all_input_nodes))
    # Place each update behind all that it is computed from, and behind the last reader of what it overwrites.
    ready: dict[fx.Node, int] = {}  # when a node and all that it is computed from are there
    for update in updates:
        stack = list(update.all_input_nodes)
        while stack:
            n = stack[-1]
            if n in ready:
                stack.pop()
            elif missing := [a for a in n.all_input_nodes if a not in ready]:
                stack += missing
            else:
                ready[n] = max((place.get(n, -1), *(ready[a] for a in n.all_input_nodes)))
                stack.pop()
        read = (last.get(key, -1) for key in storages(*updated(update)))
        place[update] = ready[update] = max((*(ready[a] for a in update.all_input_nodes), *read))
    return sorted(backward, key=lambda n: (place[n], bool(done_with_gradients(n))))
