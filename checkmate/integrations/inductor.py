"""Inductor's memory budget by the peak of a step: what `torch.compile` saves for the backward, and what it makes again.

PyTorch has a knob for that, ``torch._functorch.config.activation_memory_budget``, a share of the bytes that it would
save. Its solvers choose by a knapsack of saved bytes; what is made again in the backward takes memory, too, which they
leave out: at small shares everything is made again at once, and the peak rises as the share falls (pytorch 197838).
`KnapsackSolver` chooses by the peak, simulated over the forward and the backward with all that they make, in the order
in which they run:

    torch._functorch.config.activation_memory_budget = 0.3
    torch._functorch.config.activation_memory_budget_solver = checkmate.integrations.inductor.KnapsackSolver()

    torch._inductor.config.reorder_for_peak_memory = False

Without the last line Inductor orders kernels anew by an estimate of its own, and may take more than was simulated: on
one thread of a CPU a quarter more. Kernels and their bits stay Inductor's. What a plan can be is what PyTorch's
partitioner knows: each op of the forward that is needed again runs again once, before its first reader
(`checkmate.solvers.kept_ops`). It cuts the graph once more when the solver has answered; so that it cuts where the plan
has it, the solver writes the tags that `torch.utils.checkpoint` writes, MUST_SAVE and MUST_RECOMPUTE, which the cut
obeys.

Random draws are never made again: a solver that lets them gives gradients of another dropout than the forward had
(pytorch 190758). But PyTorch asks a solver only where its own cuts save more than the share; where they save less, it
takes them, and these may draw again. `peak_budget` sets the share so small that the solver is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.errors import InfeasibleBudget
from checkmate.integrations import step_graph
from checkmate.integrations.step_graph import StepGraph, read_step
from checkmate.solvers import kept_ops
from checkmate.solvers.kept_ops import Choice, KeptOps, fewest_seconds, least_peak
from checkmate.torch_internals.aot import _is_tangent, functorch_config, get_default_op_list
from checkmate.torch_internals.inductor import CustomKnapsackSolver, get_hash_for_files, inductor_config
from checkmate.units import exact_bytes, format_bytes, format_seconds, parse_bytes

log = logging.getLogger("checkmate.integrations.inductor")
aten = torch.ops.aten
RECOMPUTES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
SMALLEST_SHARE = 1e-9  # of PyTorch's knob: at 0 it asks no solver
_DRAWS = "prims.inductor_"  # numbers from a seed, which only the seed is drawn for
_GIVEN = "checkmate_recompute_as_given"  # in the meta of a node: the tag that it had before ours


class KnapsackSolver(CustomKnapsackSolver):
    """A solver for PyTorch's ``activation_memory_budget`` that goes by the peak of forward and backward.

    At a share of s the peak is to be at most the smallest that is found, and s of the way from there to that of making
    nothing again but what Inductor computes within its kernels. Within that, the fewest seconds run again, as estimated
    for the kind of device (`checkmate.profiling.roofline`): the same plan wherever the same graph is compiled.

    Args:
        budget: bytes at the peak instead, such as ``"2 GB"``: parameters, buffers, batch, results and gradients of the
            compiled graph included, as simulated. The share then only has PyTorch ask.

    Raises:
        BudgetError: if the budget is no number of bytes.
        InfeasibleBudget: while a step is compiled, if no plan stays within the budget; it names the smallest peak.

    >>> import torch
    >>> solver = KnapsackSolver("2 GB")
    >>> with torch._functorch.config.patch(activation_memory_budget=0.1, activation_memory_budget_solver=solver):
    ...     pass  # whatever is compiled here for the first time is planned so
    """

    def __init__(self, budget: float | str | None = None) -> None:
        self.budget = None if budget is None else parse_bytes(budget)
        self.choice: Choice | None = None  # for the graph that was last asked about
        self.runs_again: list[str] = []  # the names of its nodes that run again

    def __call__(
        self,
        memory: Sequence[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: Sequence[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """Which of the nodes that the partitioner does not make again by itself are saved, and which are not.

        Args:
            memory: bytes of these nodes as shares of what PyTorch would save by default; not needed.
            joint_graph: forward and backward.
            max_memory: PyTorch's knob.
            node_info: which nodes are of the forward.
            all_recomputable_banned_nodes: these nodes.
        """
        step = read_joint_graph(joint_graph, node_info)
        plans = KeptOps(step.problem)
        choice = self.choose(plans, max_memory)
        log.info(
            "saves for the backward what %d of %d ops made; %d run again, estimated as %s; peak %s, %s without",
            len(choice.kept),
            plans.tables.boundary,
            len(choice.again),
            format_seconds(choice.seconds),
            *map(format_bytes, (choice.peak, plans.everything.peak)),
        )
        again = write_tags(step, choice)
        self.runs_again = sorted(node.name for node in again)
        banned = range(len(all_recomputable_banned_nodes))
        recomputed = [i for i in banned if all_recomputable_banned_nodes[i] in again]
        return [i for i in banned if all_recomputable_banned_nodes[i] not in again], recomputed

    def choose(self, plans: KeptOps, share: float) -> Choice:
        """The plan for a share, or for the budget."""
        highest, budget = plans.everything.peak, self.budget
        if budget is None:
            least = least_peak(plans)
            budget = least.peak + int(share * (highest - least.peak))
        choice = fewest_seconds(plans, budget)
        if choice is None:
            least = least_peak(plans)
            raise InfeasibleBudget(
                f"No plan of what is saved and what is made again once stays within {exact_bytes(budget)}. The "
                f"smallest peak that was found is {exact_bytes(least.peak)}; with nothing made again it is "
                f"{exact_bytes(highest)}.",
                budget=budget,
                min_budget=least.peak,
                op=plans.problem.graph.ops[least.at].name,
            )
        self.choice = choice
        return choice

    def uuid(self) -> tuple[bytes, int | None]:
        """What Inductor's cache of compiled code knows the solver by: its sources, and the budget."""
        return get_hash_for_files((__file__, step_graph.__file__, kept_ops.__file__)), self.budget


@contextmanager
def peak_budget(budget: float | str) -> Iterator[KnapsackSolver]:
    """What is compiled within the block for the first time stays within a budget of bytes at its peak, as simulated.

    Both of PyTorch's settings in one line: the solver, and a share so small that it is asked. It is not where PyTorch's
    own cut saves less than the bytes of all inputs, parameters included; a warning says if it was not asked at all.

    Raises:
        BudgetError: if the budget is no number of bytes.

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
            "PyTorch asked for no plan within %s: nothing was compiled here for the first time, or its own cut saves "
            "less than the inputs take.",
            exact_bytes(solver.budget or 0),
        )


def read_joint_graph(joint_graph: fx.Graph, node_info: Any) -> StepGraph:
    """A joint graph as PyTorch's partitioner has it when it asks a solver, with what Inductor fuses.

    The backward is in the order in which the partitioner puts it: what depends on no gradient runs before its first
    reader.
    """
    nodes = list(joint_graph.nodes)
    handed_in = [n for n in nodes if n.op == "placeholder" and _is_tangent(n)]
    inputs = [n for n in nodes if n.op in ("placeholder", "get_attr") and n not in handed_in]
    forward = [n for n in nodes if n.op == "call_function" and node_info.is_required_fw(n)]
    types = get_default_op_list()

    def is_pointwise(node: fx.Node) -> bool:
        return types.is_fusible(node) or str(node.target).startswith(_DRAWS)

    def fuses(node: fx.Node, reader: fx.Node) -> bool:
        return is_pointwise(node) and (is_pointwise(reader) or reader.target is aten.cat.default)

    def once(node: fx.Node) -> str | None:
        return "is to be saved" if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE else None

    for node in forward:  # tags of ours, of when PyTorch asked before
        if _GIVEN in node.meta:
            node.meta["recompute"] = node.meta.pop(_GIVEN)
    return read_step(
        [*inputs, *forward], _backward(nodes, {*forward}, handed_in), handed_in=handed_in, once=once, fuses=fuses
    )


def _backward(nodes: Sequence[fx.Node], forward: set[fx.Node], handed_in: Sequence[fx.Node]) -> list[fx.Node]:
    place = {node: i for i, node in enumerate(nodes)}
    begin = min((place[user] for n in handed_in for user in n.users), default=0)
    found: dict[fx.Node, None] = {}
    for root in nodes[begin:]:
        stack, missing = [root], set[fx.Node]()
        while stack:
            n = stack.pop()
            if n.op == "call_function" and n not in forward and n not in found and n not in missing:
                missing.add(n)
                stack += n.all_input_nodes
        found.update(dict.fromkeys(sorted(missing, key=place.__getitem__)))
    return [*found]


def write_tags(step: StepGraph, choice: Choice) -> set[fx.Node]:
    """Have the partitioner's cut go where a plan has it; the nodes that run again."""
    again: set[fx.Node] = set()
    for k, node in enumerate(step.nodes):
        if node is None or step.problem.graph.ops[k].phase == "backward":
            continue
        node.meta[_GIVEN] = node.meta.get("recompute")
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if k in choice.again:
            again.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return again
