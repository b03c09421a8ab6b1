"""A solver for `torch.compile`'s memory budget that takes bytes and measures by the peak of forward and backward.

PyTorch's own solvers choose by a knapsack of the bytes that are saved. What is made again in the backward takes memory,
too: at small shares all of it is made at once, and the peak rises as the share falls (pytorch 197838). `KnapsackSolver`
simulates the peak with all that the forward and the backward make, in the order in which they run. A plan is one that
PyTorch's partitioner can follow: an op of the forward runs again once at most, before its first reader
(`checkmate.solvers.kept_ops`). It cuts the graph once more when the solver has answered, and obeys the tags that
`torch.utils.checkpoint` writes, so the solver writes these: MUST_SAVE and MUST_RECOMPUTE.

Random draws are never made again: a solver that lets them gives gradients of another dropout than the forward had
(pytorch 190758).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.core.solution import infeasible
from checkmate.integrations import step_graph
from checkmate.integrations.step_graph import read_joint_graph
from checkmate.solvers import kept_ops
from checkmate.solvers.kept_ops import Choice, KeptOps, fewest_seconds, least_peak
from checkmate.torch_internals.aot import functorch_config
from checkmate.torch_internals.inductor import CustomKnapsackSolver, get_hash_for_files, inductor_config
from checkmate.units import exact_bytes, format_bytes, format_seconds, parse_budget

log = logging.getLogger("checkmate.integrations.inductor")
SMALLEST_SHARE = 1e-9  # of PyTorch's knob: at 0 it asks no solver
_GIVEN = "checkmate_recompute_as_given"  # in the meta of a node: the tag that it had before ours


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
        return get_hash_for_files((__file__, step_graph.__file__, kept_ops.__file__)), self.budget


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
