"""A solver for `torch.compile`'s memory budget that takes bytes and measures by the peak of forward and backward.

The page docs/inductor.md says what is promised, and why PyTorch's own solvers are not enough (pytorch 197838, 190758).
A plan is one that PyTorch's partitioner can follow: an op of the forward runs again once at most, before its first
reader (`checkmate.solvers.kept_ops`). It cuts the graph once more when the solver has answered, and obeys the tags that
`torch.utils.checkpoint` writes, so the solver writes these: MUST_SAVE and MUST_RECOMPUTE. Random draws are never made
again.

The joint graph is read as a `Problem` whose nodes are PyTorch's, in the order in which its two halves will run. Views
are no ops. Inductor computes pointwise ops within the kernels of their readers where these stand near: no op that it
does not fuse stands in between, or else the kernels are two and the tensor is made. Such a node *melts* into each of
its readers, and they read what it reads.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.capture.device import as_allocated, main_device
from checkmate.capture.higher_order.table import runs_once
from checkmate.capture.nodes import (
    is_collective,
    is_mutating,
    is_random,
    is_view,
    leaf_nodes,
    storage,
    target_name,
    tensors,
    written,
)
from checkmate.capture.provenance import where
from checkmate.core.graph import Graph, Op, Phase, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.solution import infeasible
from checkmate.devices import kind_of
from checkmate.errors import Unsupported
from checkmate.profiling.data_sheets import DEVICES
from checkmate.profiling.roofline import roofline_seconds
from checkmate.solvers import kept_ops
from checkmate.solvers.kept_ops import Choice, KeptOps, fewest_seconds, least_peak
from checkmate.torch_internals.aot import _is_tangent, functorch_config, get_default_op_list
from checkmate.torch_internals.inductor import CustomKnapsackSolver, get_hash_for_files, inductor_config
from checkmate.torch_internals.trees import tree_leaves
from checkmate.units import exact_bytes, format_bytes, format_seconds, parse_budget

log = logging.getLogger("checkmate.integrations.inductor")
SMALLEST_SHARE = 1e-9  # of PyTorch's knob: at 0 it asks no solver
_GIVEN = "checkmate_recompute_as_given"  # in the meta of a node: the tag that it had before ours
aten = torch.ops.aten
_UNKNOWN = 4096  # of a size that is left open, as PyTorch's partitioner takes it
_REDUCES = 4  # an op whose result has so many times fewer bytes than what it reads does not melt: it is dear, and small
_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten.detach.default, aten.alias.default}
_DRAWS = "prims.inductor_"  # numbers from a seed, which only the seed is drawn for
_ESTIMATED_AS = {"cpu": "laptop"}  # else as an A100: only the ratio of products to copies matters
_UNKNOWN_COST = (Unsupported, KeyError, TypeError, IndexError, AttributeError, ValueError)


class KnapsackSolver(CustomKnapsackSolver):
    """A solver for ``torch._functorch.config.activation_memory_budget_solver``.

    With bytes it finds what to save by itself, within them, and runs the fewest seconds again, as estimated for the
    kind of device. The page docs/inductor.md says which settings it needs, all of which `peak_budget` makes, and what
    is promised.

    Args:
        budget: bytes at the peak, as simulated, such as ``"8 GB"``: parameters, buffers, batch, results and gradients
            included. None: `activation_memory_budget` of the way from the smallest peak to that of saving all.

    Raises:
        BudgetError: if the budget is no number of bytes.
        InfeasibleBudget: while a step is compiled, if no plan stays within the budget; it names the smallest.

    >>> import torch
    >>> solver = KnapsackSolver("8 GB")
    >>> with torch._functorch.config.patch(activation_memory_budget=1e-9, activation_memory_budget_solver=solver):
    ...     pass  # code first compiled here is planned within the budget
    """

    def __init__(self, budget: float | str | None = None) -> None:
        self.budget = None if budget is None else parse_budget(budget)
        self.choice: Choice | None = None  # for the graph that was last asked about; None: not asked
        self.runs_again: list[str] = []  # the names of its nodes that run again

    def __call__(
        self,
        memory: Sequence[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: Sequence[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Indices of the nodes to save and to recompute, among ``all_recomputable_banned_nodes``.

        PyTorch calls it; ``max_memory`` is its knob, ``node_info`` says which nodes are of the forward.
        """
        for node in joint_graph.nodes:  # tags of ours, of when PyTorch asked before
            if _GIVEN in node.meta:
                node.meta["recompute"] = node.meta.pop(_GIVEN)
        step = read_joint_graph(joint_graph, node_info)
        plans = KeptOps(step.problem)
        choice = self.choice = self.choose(plans, max_memory)
        log.info(
            "saves for the backward what %d of %d ops made; %d run again, estimated as %s; peak %s, %s without",
            len(choice.kept),
            plans.tables.boundary,
            len(choice.again),
            format_seconds(choice.seconds),
            *map(format_bytes, (choice.peak, plans.everything.peak)),
        )
        again: set[fx.Node] = set()
        for k, op in enumerate(step.problem.graph.ops):
            if op.phase == "forward" and (node := step.nodes[k]) is not None:
                policy = CheckpointPolicy.MUST_RECOMPUTE if k in choice.again else CheckpointPolicy.MUST_SAVE
                node.meta.update({_GIVEN: node.meta.get("recompute"), "recompute": policy})
                if k in choice.again:
                    again.add(node)
        self.runs_again = sorted(node.name for node in again)
        places = range(len(all_recomputable_banned_nodes))
        recomputed = [i for i in places if all_recomputable_banned_nodes[i] in again]
        return sorted({*places}.difference(recomputed)), recomputed

    def choose(self, plans: KeptOps, share: float) -> Choice:
        """The plan for the budget, or, if the solver has no budget, for a share."""
        highest, budget = plans.everything.peak, self.budget
        if budget is None:
            least = least_peak(plans)
            budget = least.peak + int(share * (highest - least.peak))
        if (choice := fewest_seconds(plans, budget)) is None:
            least = least_peak(plans)
            why = f"No plan of what is saved and what is made again once stays within {exact_bytes(budget)}."
            note = f", and {exact_bytes(highest)} with nothing made again"
            raise infeasible(why, budget, least.peak, plans.problem.graph.ops[least.at].name, note=note)
        return choice

    def uuid(self) -> tuple[bytes, int | None]:
        """The solver's key in Inductor's cache of compiled code: its sources, and the budget."""
        return get_hash_for_files((__file__, kept_ops.__file__)), self.budget


@contextmanager
def peak_budget(budget: float | str) -> Iterator[KnapsackSolver]:
    """Keep the simulated peak of steps that are first compiled in this block within a budget of bytes.

    It sets all that `KnapsackSolver` needs. A warning says if PyTorch did not ask it: its cache on disk may have the
    code for this budget, or its own cut may save less than the bytes of all inputs, parameters included.

    Raises:
        BudgetError: if the budget is no number of bytes.

    >>> import torch
    >>> model = torch.nn.Linear(8, 8)
    >>> with peak_budget("1 GB"):
    ...     torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
    """
    solver = KnapsackSolver(budget)
    asked = functorch_config.patch(activation_memory_budget=SMALLEST_SHARE, activation_memory_budget_solver=solver)
    with asked, inductor_config.patch(reorder_for_peak_memory=False):
        yield solver
    if solver.choice is None:
        log.warning(
            "PyTorch asked for no plan within %s: nothing was compiled here for the first time, or it has the code of "
            "such a plan on disk, or its own cut saves less than the inputs take.",
            exact_bytes(solver.budget or 0),
        )


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A step as ops and values, with the nodes they stand for."""

    problem: Problem
    nodes: tuple[fx.Node | None, ...]  # for each op its node; None: stands for what the caller hands in


def read_joint_graph(joint_graph: fx.Graph, node_info: Any) -> StepGraph:
    """Read a joint graph; ``node_info`` tells forward nodes. Costs are estimated for the kind of device.

    The backward is in the order in which the partitioner puts it: an op that depends on no gradient runs before its
    first reader.

    Raises:
        Unsupported: if there is no op.
    """
    nodes = list(joint_graph.nodes)
    handed_in = [n for n in nodes if n.op == "placeholder" and _is_tangent(n)]
    inputs = [n for n in nodes if n.op in ("placeholder", "get_attr") and n not in handed_in]
    forward = dict.fromkeys(n for n in nodes if n.op == "call_function" and node_info.is_required_fw(n))
    place = {node: i for i, node in enumerate(nodes)}
    begin = min((place[user] for n in handed_in for user in n.users), default=0)
    backward: dict[fx.Node, None] = {}
    for root in nodes[begin:]:
        # Before each node put the ops that it depends on and that have not run.
        stack, missing = [root], set[fx.Node]()
        while stack:
            n = stack.pop()
            if n.op == "call_function" and n not in forward and n not in backward and n not in missing:
                missing.add(n)
                stack += n.all_input_nodes
        backward.update(dict.fromkeys(sorted(missing, key=place.__getitem__)))
    return _Reader([*inputs, *forward], [*backward], handed_in).read()


class _Reader:
    def __init__(self, forward: list[fx.Node], backward: list[fx.Node], handed_in: list[fx.Node]) -> None:
        self.forward, self.backward, self.handed_in = forward, backward, handed_in
        self.place = {node: i for i, node in enumerate((*forward, *backward))}
        device = main_device(t for node in self.place for t in _tensors(node))
        self.block_bytes = kind_of(device).block_bytes
        self.device = DEVICES[_ESTIMATED_AS.get(device.type, "a100")]
        self.pointwise = get_default_op_list()
        self.values: list[Value] = []
        self.made: dict[fx.Node, tuple[int, ...]] = {}  # the values of each op and input
        self.by_storage: dict[int, int] = {}
        self.shown: dict[fx.Node, tuple[int, ...]] = {}  # the values behind any node
        self.written = {  # storages that ops write to, with the place of the last that does
            storage(t): i for n, i in self.place.items() for w in written(n) for t in _tensors(w)
        }
        self.hard_before = [0, *accumulate(self._is_op(n) and not self._is_pointwise(n) for n in self.place)]
        self.melted = {n for n in self.place if self._is_op(n) and self._melts(n)}

    def read(self) -> StepGraph:
        ops: list[Op] = []
        nodes: list[fx.Node | None] = []
        # Inputs of the step.
        for node in self.forward:
            if node.op != "call_function":
                self._make(node, None)
        halves: tuple[tuple[Phase, list[fx.Node]], ...] = (("forward", self.forward), ("backward", self.backward))
        # Ops, each with the values behind its inputs; ops that Inductor fuses into readers are none.
        for phase, half in halves:
            if phase == "backward" and self.handed_in:
                made = tuple(v for n in self.handed_in for v in self._make(n, len(ops)))
                ops.append(Op("tangents", "autograd", (), made, "backward", "is handed in by autograd"))
                nodes.append(None)
            for node in half:
                if self._is_op(node) and node not in self.melted:
                    read = dict.fromkeys(v for a in node.all_input_nodes for v in self._behind(a))
                    made = () if is_mutating(node) else self._make(node, len(ops))
                    inputs = tuple(v for v in read if v not in made)
                    ops.append(Op(node.name, target_name(node), inputs, made, phase, self._pinned(node), where(node)))
                    nodes.append(node)
        if not ops:
            raise Unsupported("The graph has no op to plan.")
        # Results are the values that the graph returns.
        (output,) = next(iter(self.place)).graph.find_nodes(op="output")
        shown = dict.fromkeys(v for n in leaf_nodes(tree_leaves(output.args)) for v in self._behind(n))
        results = tuple(v for v in shown if self.values[v].producer is not None)
        profile = Profile(
            [self._seconds(op, node) for op, node in zip(ops, nodes, strict=True)],  # type: ignore[arg-type]
            [0] * len(ops),  # type: ignore[arg-type]
            sum(value.size_bytes for value in self.values if value.producer is None),
            f"roofline estimate for {self.device.name}",
            estimated=tuple(range(len(ops))),
        )
        return StepGraph(Problem(Graph(tuple(ops), tuple(self.values), results), profile), tuple(nodes))

    def _is_op(self, node: fx.Node) -> bool:
        is_call = node.op == "call_function" and node.target is not operator.getitem and not _is_view(node)
        return is_call and bool(_tensors(node) or is_mutating(node))

    def _is_pointwise(self, node: fx.Node) -> bool:
        return self.pointwise.is_fusible(node) or str(node.target).startswith(_DRAWS)

    def _melts(self, node: fx.Node) -> bool:
        """Tell whether Inductor fuses it into its readers, which are in the same half and near."""
        if not self._is_pointwise(node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if is_random(node) or is_mutating(node) or _is_to_be_saved(node) or storage(node.meta["val"]) in self.written:
            return False
        if _bytes_of(node) * _REDUCES < sum(map(_bytes_of, node.all_input_nodes)):
            return False
        readers = [*self._readers(node)]
        fused = (n.op == "call_function" and (self._is_pointwise(n) or n.target is aten.cat.default) for n in readers)
        if not readers or not all(fused):
            return False
        at, border = self.place[node], len(self.forward)
        last = max((i for n in readers if ((i := self.place[n]) < border) == (at < border)), default=at)
        return self.hard_before[last] == self.hard_before[at]

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        for user in node.users:
            if user in self.place and user.op == "call_function" and _is_view(user):
                yield from self._readers(user)
            elif user in self.place or user.op == "output":
                yield user

    def _pinned(self, node: fx.Node) -> str | None:
        """The reason why an op must not run again; None if it may."""
        read = (storage(t) for a in node.all_input_nodes for t in _tensors(a))
        reasons = {
            "writes into what is there": is_mutating(node),
            "draws random numbers": is_random(node),
            "exchanges data with other ranks": is_collective(node),
            "makes what an op writes to": any(storage(t) in self.written for t in _tensors(node)),
            "reads what the step overwrites": any(self.written.get(key, -1) > self.place[node] for key in read),
            "is to be saved": _is_to_be_saved(node),
        }
        return next((why for why, holds in reasons.items() if holds), None) or runs_once(node)

    def _make(self, node: fx.Node, producer: int | None) -> tuple[int, ...]:
        """The values that an op or an input makes, one per storage."""
        made: dict[int, None] = {}
        for i, tensor in enumerate(_tensors(node)):
            known = self.by_storage.get(storage(tensor))
            if known is None or (producer is not None and known not in made):
                known = self.by_storage[storage(tensor)] = len(self.values)
                size = as_allocated(_number(tensor.untyped_storage().nbytes()), self.block_bytes)
                role = "input" if producer is None else "intermediate"
                self.values.append(Value(f"{node.name}[{i}]", size, producer, role))  # type: ignore[arg-type]
            made[known] = None
        self.made[node] = tuple(made)
        return self.made[node]

    def _behind(self, node: fx.Node) -> tuple[int, ...]:
        """The values that are read through a node."""
        if node in self.made:
            return self.made[node]
        if node not in self.shown:
            values = [v for a in node.all_input_nodes for v in self._behind(a)]
            if node.target is operator.getitem:
                own = [self.by_storage.get(storage(t)) for t in _tensors(node)]
                values = [v for v in own if v in values] or values
            elif _is_view(node):
                values = [*self._behind(node.all_input_nodes[0])] if node.all_input_nodes else []
            elif is_mutating(node):
                values = [v for target in written(node) for v in self._behind(target)]
            self.shown[node] = tuple(dict.fromkeys(values))
        return self.shown[node]

    def _seconds(self, op: Op, node: fx.Node | None) -> float:
        if node is None:
            return 0.0
        with suppress(*_UNKNOWN_COST):
            if not self._is_pointwise(node):
                return roofline_seconds(node, self.device)
        return self.device.seconds(0, "float32", sum(self.values[v].size_bytes for v in {*op.inputs, *op.outputs}))


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS or is_view(node)


def _is_to_be_saved(node: fx.Node) -> bool:
    return node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return tensors(node.meta.get("val"))


def _bytes_of(node: fx.Node) -> int:
    return sum(_number(t.numel()) * t.element_size() for t in _tensors(node))


def _number(size: Any) -> int:
    """A size as a number; a symbolic size has its value at tracing."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else _UNKNOWN
