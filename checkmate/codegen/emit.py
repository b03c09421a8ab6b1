"""Write a plan as two `torch.fx` modules, forward and backward, which run, repeat and free as the plan says.

The generated code is plain Python: an op that runs again stands there again, as ``<name>_again<i>``, and a name is
cleared after its last use, which is where the plan frees its value. Views cost nothing and are made anew from each copy
of the value they show. What an op writes over is gone at once; the op is marked, and becomes a call that writes when
the module becomes a function (`checkmate.codegen.writing_over`). What waits in a second memory is sent and fetched by
calls that stand where the plan has them (`checkmate.codegen.transfers`).
On the main path, 15 of 16: see docs/idea.md.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture import random_draws as randomness
from checkmate.capture.inplace.aliasing import position_of
from checkmate.capture.joint import Joint
from checkmate.capture.nodes import storage
from checkmate.capture.rewrite import Unwritten
from checkmate.capture.sharded import collectives
from checkmate.codegen import transfers
from checkmate.codegen.boxed import ListCodeGen
from checkmate.codegen.writing_over import OVER, OWN, refuse_unwritable
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Start, Step, Wait
from checkmate.errors import SolverError
from checkmate.torch_internals import capturing
from checkmate.torch_internals.capturing import FakeTensor, is_sym_node

AGAIN = "_again"  # in a node's name: an op that runs another time
_CALLED = {Send: transfers.send, Wait: transfers.arrive, Fetch: transfers.fetch, Drop: transfers.drop}
Begin = Callable[[int], torch.Tensor]  # a call of a step that has so many bytes in a second memory, at most


@dataclass(frozen=True)
class Land:
    """The `Wait` of a fetched value, in a plan that is being written."""

    value: int


@dataclass(frozen=True)
class Modules:
    """The step as it runs: ``forward(inputs) -> results + saved tensors``, ``backward(saved + tangents) -> gradients``.

    Both take one list, which they clear, so that what it held can be freed.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule

    @property
    def again(self) -> tuple[str, ...]:
        """Names of the nodes that run an op again, in order."""
        nodes = (node for module in (self.forward, self.backward) for node in module.graph.nodes)
        return tuple(node.name for node in nodes if AGAIN in node.name)


def emit(
    joint: Joint, plan: Plan, begin: Begin = transfers.no_second_memory, homes: frozenset[int] = frozenset()
) -> Modules:
    """Write the modules of a plan.

    Args:
        begin: what a forward calls whose plan uses a second memory.
        homes: inputs that are at home there, and here from their fetch to their freeing only.

    Raises:
        SolverError: if the plan reads what is not at hand, or writes over what it must not; or if the step writes to
            what is at home otherwise than by an update.
    """
    for v in homes:
        if any(storage(node.meta["val"]) in joint.step.overwritten for node in joint.nodes_of_value[v]):
            raise SolverError(f"{joint.graph.values[v].name} is at home in a second memory, and the step writes to it.")
    # Tell waits for fetches apart from waits for sends.
    steps: list[Step | Land] = []
    going: dict[int, Step] = {}
    for step in plan.steps:
        if isinstance(step, Wait) and isinstance(going.get(step.value), Fetch):
            steps.append(Land(step.value))
            continue
        steps.append(step)
        if isinstance(step, (Send, Fetch)):
            going[step.value] = step
    # Find what the forward saves for the backward.
    before, after = steps[: plan.boundary], steps[plan.boundary :]
    tangents = _placeholders(joint, capturing._is_tangent, capturing._is_bwd_seed_offset, capturing._is_backward_state)
    saved = sorted(_saved(joint, after, tangents), key=is_unchecked)  # AOTAutograd wants the unchecked last
    numbers = [*joint.step.given_numbers]  # and numbers after them, the same of each plan
    # Write both, the forward first.
    kinds = (capturing.SavedForBackwardsAOTOutput, capturing.SavedForBackwardsNoVcCheckAOTOutput)
    inputs = _placeholders(joint, capturing._is_primal, capturing._is_fwd_seed_offset)
    times: Counter[fx.Node] = Counter()
    first = _Writer(joint, inputs, times, homes=homes)
    call = first.begin(begin, plan) if plan.moves or homes else None
    saved = saved if call is None else [call, *saved]
    descs = [kinds[is_unchecked(node)](i) for i, node in enumerate([*saved, *numbers])]
    forward = first.write(before, [*joint.step.forward_outputs, *saved, *numbers], [*joint.step.forward_descs, *descs])
    second = _Writer(joint, [*numbers, *saved, *tangents], times, call, homes)
    backward = second.write(after, joint.step.backward_outputs, joint.step.backward_descs)
    _draw_once(forward)
    for module in (forward, backward):
        refuse_unwritable(module)
    for node in backward.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return Modules(forward, backward)


def _draw_once(forward: fx.GraphModule) -> None:
    """Save no random state for a mask that the plan draws once, at once, from a tensor that is read later.

    To save it and to read it back costs as much as a small op, at each dropout. The bytes stay as in the plan.
    """
    states = forward.graph.find_nodes(op="call_function", target=randomness.save_state)
    for state in states:
        x, draw = state.args[0], state.next
        if list(state.users) == [draw] and any(user > draw for user in x.users):
            state.target = randomness.hold_place
            draw.target, draw.args = randomness.draw_once, (state, x, draw.args[2])
    if states:
        forward.recompile()


def _placeholders(joint: Joint, *kinds: Any) -> list[fx.Node]:
    return [node for is_kind in kinds for node in joint.step.placeholders if is_kind(node)]


def is_unchecked(node: fx.Node) -> bool:
    """Tell whether a saved node is one whose version autograd does not check."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _saved(joint: Joint, steps: Iterable[Step | Land], tangents: Iterable[fx.Node]) -> list[fx.Node]:
    """The saved tensors: values that the backward reads and neither makes nor fetches, and unchecked inputs."""
    at_hand = {*tangents, *joint.step.given_numbers}
    saved: dict[fx.Node, None] = {}

    def read(nodes: Iterable[fx.Node]) -> None:
        saved.update(dict.fromkeys(root for n in nodes for root in _roots(joint, n) if root not in at_hand))

    for step in steps:
        if isinstance(step, Run) and (node := joint.nodes[step.op]) is not None:
            read(node.all_input_nodes)
            op = joint.graph.ops[step.op]
            at_hand.update(output for v in (*op.outputs, *op.overwrites) for output in joint.nodes_of_value[v])
        elif isinstance(step, (Send, Wait)):
            read(joint.nodes_of_value[step.value])
        elif isinstance(step, Land):
            at_hand.update(joint.nodes_of_value[step.value])
    read(n for n in joint.step.backward_outputs if isinstance(n, fx.Node))
    # AOTAutograd counts unchecked inputs once: each plan saves all, as another may take over. They take no memory.
    saved.update(dict.fromkeys(n for n in joint.step.placeholders if is_unchecked(n) and n not in at_hand))
    return list(saved)


def _roots(joint: Joint, node: fx.Node) -> list[fx.Node]:
    """The roots of a view or number: placeholders, given numbers, outputs of ops; a root's own. Constants have none."""
    if node in joint.step.given_numbers or node.op == "placeholder":
        return [node]
    if any(node in joint.nodes_of_value[v] for v in joint.value_of[node]):
        return [] if node.op == "get_attr" else [node]
    return [root for a in node.all_input_nodes for root in _roots(joint, a)]


class _Writer:
    def __init__(
        self,
        joint: Joint,
        inputs: Sequence[fx.Node],
        times: Counter[fx.Node],
        call: fx.Node | None = None,
        homes: frozenset[int] = frozenset(),
    ) -> None:
        self.joint, self.homes = joint, homes
        self.times = times  # how often each op was written, in both modules together
        self.copies: Counter[fx.Node] = Counter()  # how often each other node was written in this one
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}  # for each node of the joint graph at hand, its copy here
        self.handed_over: dict[fx.Node, fx.Node] = {}  # values that the caller copies: free in the plan, yet returned
        self.ops = {node for node in joint.nodes if node is not None}
        self.views: dict[int, list[fx.Node]] = {}  # for each value, the views of it in env
        for node in inputs:
            self.env[node] = self.graph.placeholder(node.name)
            self.env[node].meta = dict(node.meta)
            if node.op == "call_function" and not is_sym_node(node):
                self.env[node].meta[OWN] = True
        self.call = None if call is None else self.env[call]  # which call of the step it is; None: nothing is sent yet
        self.sent: dict[int, fx.Node] = {}  # of what this module sends, what does so
        self.started: dict[int, fx.Node] = {}  # of ops that links carry now, what has launched them
        if self.call is not None:
            self.call.meta[transfers.IS_CALL] = True

    def begin(self, begin: Begin, plan: Plan) -> fx.Node:
        """Begin the module of a call with a second memory, where homes are."""
        call = self.graph.call_function(begin, (transfers.most_there(plan, self.joint.graph, self.homes),))
        # It stands among the fake tensors of the graph.
        modes = [
            val.fake_mode for n in self.joint.module.graph.nodes if isinstance(val := n.meta.get("val"), FakeTensor)
        ]
        with modes[0] if modes else nullcontext():
            call.meta["val"] = torch.empty(1, dtype=torch.int64, device="cpu")
        self.call = self.env[call] = call
        states: Any = {v: self.joint.held[v] for v in sorted(self.homes) if v in self.joint.held}
        if states:
            self.graph.call_function(transfers.adopt_held, (call, states)).meta["val"] = call.meta["val"]
        for v in sorted(self.homes - states.keys()):
            inputs = [self.env.pop(node) for node in self.joint.nodes_of_value[v]]
            self._call(transfers.adopt, v, self.joint.graph.values[v].name, *inputs)
        return call

    def write(self, steps: Iterable[Step | Land], outputs: Sequence[Any], descs: Sequence[Any]) -> fx.GraphModule:
        for step in steps:
            if isinstance(step, Run):
                self._run(step)
            elif isinstance(step, Free):
                self._forget(step.value)
                if step.value in self.homes and step.value in self.joint.held:
                    self._call(transfers.leave, step.value)
            elif isinstance(step, Start):
                node: Any = self.joint.nodes[step.op]
                self.started[step.op] = launched = self._copy(node, f"{node.name}_started")
                launched.target = node.target.begin
            else:
                self._transfer(step)
        # The backward ends a call with a second memory.
        if self.call is not None and self.call.op == "placeholder":
            self.graph.call_function(transfers.finish, (self.call,))
        results = tuple(self.handed_over.get(n) or self._at_hand(n) if isinstance(n, fx.Node) else n for n in outputs)
        self.graph.output(results).meta["desc"] = list(descs)
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        self.graph.set_codegen(ListCodeGen())
        return Unwritten(self.joint.module, self.graph)

    def _run(self, step: Run) -> None:
        op = step.op
        node, values = self.joint.nodes[op], self.joint.graph.ops[op]
        # An op of autograd's own hands over what is at hand.
        if node is None:
            joint, inputs = self.joint, set(self.joint.graph.ops[op].inputs)
            results = joint.step.forward_outputs if op < joint.graph.forward_length else joint.step.backward_outputs
            nodes = [n for n in results if isinstance(n, fx.Node) and inputs.intersection(joint.value_of[n])]
            self.handed_over |= {n: self._at_hand(n) for n in nodes}
            return
        # A copy of the node, named by how often it ran; a draw that runs again repeats its numbers.
        n = self.times[node]
        self.times[node] += 1
        name = f"{node.name}{AGAIN}{n}" if n else node.name
        if op in self.started:
            copy = self.graph.create_node(
                "call_function", collectives.end, (self.started.pop(op),), {}, name, node.type
            )
            copy.meta = dict(node.meta)
        else:
            copy = self._copy(node, name)
        if n:
            copy.target = randomness.drawn_again(copy.target)
        if step.over is not None:
            copy.meta[OVER] = position_of(self.joint, op, step.over)
        # Its results are in memory under the nodes that name them.
        outputs = [output for v in (*values.outputs, *values.overwrites) for output in self.joint.nodes_of_value[v]]
        if node in outputs:
            stays = node in self.env and not values.overwrites  # a copy still in memory does, as in the plan
            self.env[node] = self.env[node] if stays else copy
        else:
            self.env[node] = copy
            for output in outputs:
                self._at_hand(output)
            del self.env[node]
        if step.over is not None:
            self._forget(step.over)
        # What has landed from a home is to go back, as it was written to.
        for v in sorted(self.homes.intersection(values.overwrites)):
            self._call(transfers.overwrite, v, *map(self._at_hand, self.joint.nodes_of_value[v]))

    def _transfer(self, step: Send | Fetch | Wait | Drop | Land) -> None:
        v, nodes = step.value, self.joint.nodes_of_value[step.value]
        if not isinstance(step, Land):
            read = map(self._at_hand, nodes) if isinstance(step, (Send, Wait)) else ()
            node = self._call(_CALLED[type(step)], v, *read)
            if isinstance(step, Send):
                self.sent[v] = node
            return
        # Landed tensors replace those that the value's op made.
        landed = self._call(transfers.land, v)
        if not nodes:  # a state
            return
        if len(nodes) == 1:
            landed.meta = dict(nodes[0].meta)
            self.env[nodes[0]] = landed
            return
        landed.meta["val"] = tuple(node.meta["val"] for node in nodes)
        for i, node in enumerate(nodes):
            self.env[node] = self.graph.call_function(operator.getitem, (landed, i))
            self.env[node].meta = dict(node.meta)

    def _call(self, transfer: Callable[..., Any], v: int, *args: Any) -> fx.Node:
        """Write a call to the second memory."""
        assert self.call is not None
        # After the send, not the call itself: where a part of the backward runs, what is not sent stays.
        at = self.call if transfer is transfers.send else self.sent.get(v, self.call)
        node = self.graph.call_function(transfer, (at, v, *args))
        node.meta["val"] = self.call.meta["val"]
        return node

    def _forget(self, value: int) -> None:
        for node in (*self.joint.nodes_of_value[value], *self.views.pop(value, ())):
            # Numbers may be read from an input that is at home here, for the backward; Python lets go of it itself.
            if node.op != "placeholder" or value in self.homes:
                self.env.pop(node, None)

    def _at_hand(self, node: fx.Node) -> fx.Node:
        """The copy of a node in this module; views, getitems and constants are written where they are first needed."""
        if node not in self.env:
            if node in self.ops or node.op == "placeholder":
                raise SolverError(f"The plan reads {node.name} where it is not at hand.")
            n = self.copies[node]
            self.copies[node] += 1
            self.env[node] = self._copy(node, f"{node.name}_copy{n}" if n else node.name)
            for v in self.joint.value_of[node]:
                self.views.setdefault(v, []).append(node)
        return self.env[node]

    def _copy(self, node: fx.Node, name: str) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._at_hand)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = dict(node.meta)
        return copy
