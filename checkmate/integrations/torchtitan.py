"""torchtitan's graph trainer within a budget of bytes: a memory policy that writes tags, and a pass that rewrites.

Written against torchtitan as of 21 August 2026 (commit b5bcd76), ``torchtitan/experiments/graph_trainer``. It traces a
whole step by `make_fx`, forward, loss and backward in one graph, and runs that graph after a list of passes. Of these

- a *memory policy*, ``f(gm, *, config) -> gm``, tags ops of the forward MUST_SAVE or MUST_RECOMPUTE; torchtitan's own
  pass then makes again what is tagged so, once, in front of its first reader in the backward. `register` registers ours
  by a name, `memory_policy` makes it. Gathered parameters (all-gathers of FSDP) are values like others there: a policy
  may gather them again, and every rank does so in one order, since the same graph gives the same tags.
- a *pass* is any ``(gm, example_inputs, **kwargs) -> gm``. `planned` makes one that rewrites the graph by a plan that
  no tags can say: ops that run more than twice, or in the forward, in the order in which they are needed. It takes the
  place of both passes, ``tag_with_memory_policy_pass`` and ``selective_activation_remat_pass``. What ranks send each
  other runs once there, in its order.

Both go by the bytes that the ops of the graph make, each by a kernel of its own, as torchtitan runs it unless all of it
is compiled. The bits are those of the graph as it was: ops run again, on the same values, and none that draws.

torchtitan is imported by `register` only: the other functions take and give `torch.fx` graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.capture.nodes import getitems, viewed
from checkmate.core.plan import Plan, Run
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.integrations.step_graph import StepGraph, read_step
from checkmate.solvers.kept_ops import KeptOps, fewest_seconds, least_peak
from checkmate.solvers.solve import solve
from checkmate.torch_internals.aot import detect_fake_mode
from checkmate.units import exact_bytes, parse_bytes

NAME = "checkmate"
_REGISTRY = "torchtitan.experiments.graph_trainer.registry"
_LOSS = ("lm_head", "loss")  # modules in whose backward torchtitan makes nothing again
Pass = Callable[..., fx.GraphModule]


def register(budget: float | str, name: str = NAME) -> None:
    """Register `memory_policy` with torchtitan, for ``config.compile.memory_policy = "checkmate"``.

    Its command line knows only torchtitan's own names: set the field where the config is made, in Python.

    Raises:
        BudgetError: if the budget is no number of bytes.
        Unsupported: if torchtitan is not installed, or has no registry of memory policies.
    """
    policy = memory_policy(budget)
    try:
        register_memory_policy = import_module(_REGISTRY).register_memory_policy
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"torchtitan's graph trainer is not here ({error}). It is in torchtitan's repository, not in each of its "
            'releases: pip install "git+https://github.com/pytorch/torchtitan".'
        ) from error
    register_memory_policy(name)(policy)


def memory_policy(budget: float | str) -> Pass:
    """A memory policy of torchtitan's: tags by which a step stays within a budget of bytes at its peak, as simulated.

    All that the graph is given, parameters and states included, counts, and what it returns. Tags say which ops run
    again, each once: the fewest seconds that are found (`checkmate.solvers.kept_ops`).

    Raises:
        BudgetError: if the budget is no number of bytes.
        InfeasibleBudget: when it is called, if no tags keep the step within it; it names the smallest peak.
    """
    most = parse_bytes(budget)

    def policy(gm: fx.GraphModule, *, config: Any = None) -> fx.GraphModule:
        step = read_graph(gm, by_tags=True)
        plans = KeptOps(step.problem)
        choice = fewest_seconds(plans, most)
        if choice is None:
            least = least_peak(plans)
            raise InfeasibleBudget(
                f"No tags keep the step within {exact_bytes(most)}; the smallest peak that was found is "
                f"{exact_bytes(least.peak)}. The pass checkmate.integrations.torchtitan.planned may go lower.",
                budget=most,
                min_budget=least.peak,
                op=step.problem.graph.ops[least.at].name,
            )
        tags = {node: CheckpointPolicy.MUST_SAVE for node in step.nodes if node is not None}
        tags |= {node: CheckpointPolicy.MUST_RECOMPUTE for k in choice.again if (node := step.nodes[k]) is not None}
        for node in _forward(gm)[0]:
            origin = viewed(node)
            while origin.target is operator.getitem:
                origin = viewed(origin.all_input_nodes[0])
            if node.op == "call_function" and origin in tags:
                node.meta["recompute"] = tags[origin]
        return gm

    return policy


def planned(budget: float | str, *, time_limit: float = 60.0) -> Pass:
    """A pass that rewrites a graph of a whole step by a plan within a budget of bytes at its peak, as simulated.

    Args:
        budget: bytes; all that the graph is given and returns counts.
        time_limit: seconds to look for a plan.

    Raises:
        BudgetError: if the budget is no number of bytes.
        InfeasibleBudget: when it is called, if no plan stays within it; it names the smallest budget that works.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: x.exp().sin().sum(), tracing_mode="fake")(torch.ones(100))
    >>> planned("1 MB")(gm)(torch.zeros(1))
    tensor(0.8415)
    """
    most = parse_bytes(budget)

    def checkmate_pass(gm: fx.GraphModule, example_inputs: Any = None, **options: Any) -> fx.GraphModule:
        step = read_graph(gm)
        solution = solve(step.problem, most, time_limit=time_limit, progress=False)
        if solution.plan is None:
            assert solution.refusal is not None  # `solve` says why there is none
            least, op = solution.refusal.min_budget, solution.refusal.op
            raise InfeasibleBudget(solution.message, budget=most, min_budget=least, op=op)
        return rewrite(gm, step, solution.plan)

    return checkmate_pass


def read_graph(gm: fx.GraphModule, *, by_tags: bool = False) -> StepGraph:
    """A graph of a whole step, in its order, as one half, or as a forward and a backward for tags.

    By tags all-gathers may run again, and nothing does of the head and the loss of a language model.
    """
    forward, backward = _forward(gm)

    def once(node: fx.Node) -> str | None:
        module = node.meta.get("custom", {}).get("module_fqn", "")
        return "is of the loss" if by_tags and module.startswith(_LOSS) else None

    if by_tags:
        return read_step(forward, backward, once=once, gathers_again=True)
    return read_step([*forward, *backward], [])


def _forward(gm: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes up to the first of the backward, and those from there on."""
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    begin = next((i for i, n in enumerate(nodes) if n.meta.get("autograd_backward")), len(nodes))
    late = [n for n in nodes[begin:] if n.op in ("placeholder", "get_attr")]
    return [*late, *nodes[:begin]], [n for n in nodes[begin:] if n not in late]


def rewrite(gm: fx.GraphModule, step: StepGraph, plan: Plan) -> fx.GraphModule:
    """The graph with its ops as a plan runs them; what runs again stands there again, views are made where read."""
    return _Rewriting(gm, step).run(plan)


class _Rewriting:
    def __init__(self, gm: fx.GraphModule, step: StepGraph) -> None:
        self.gm, self.step, self.op_of = gm, step, step.op_of()
        self.graph = fx.Graph()
        self.now: dict[fx.Node, fx.Node] = {}  # the copy that readers read
        self.later: set[fx.Node] = set()  # copies that another was made before, or of such
        self.mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
        self.effects = [n for n in gm.graph.nodes if n not in self.op_of and n.op == "call_function" and n.is_impure()]

    def run(self, plan: Plan) -> fx.GraphModule:
        place = {n: i for i, n in enumerate(self.gm.graph.nodes)}
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.now[node] = self.graph.node_copy(node)
        for k in (s.op for s in plan.steps if isinstance(s, Run)):
            node = self.step.nodes[k]
            assert node is not None  # nothing is handed in within a whole step
            while self.effects and place[self.effects[0]] < place[node]:
                self.show(self.effects.pop(0))
            again = node in self.now
            self._forget(node)
            self._copy(node, again=again)
            for face in getitems(node):  # at once, so that nothing holds all outputs for the sake of one
                self.show(face)
        for node in self.effects:
            self.show(node)
        (output,) = self.gm.graph.find_nodes(op="output")
        self.graph.node_copy(output, self.show)
        for n in reversed(self.graph.nodes):
            if n.target is operator.getitem and not n.users:
                self.graph.erase_node(n)
        self.graph.lint()
        return fx.GraphModule(self.gm, self.graph)

    def show(self, node: fx.Node) -> fx.Node:
        """What stands for a node now; a view of the latest copy."""
        if node not in self.now:
            self._copy(node)
        return self.now[node]

    def _forget(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            n = stack.pop()
            self.now.pop(n, None)
            stack += [user for user in n.users if user not in self.op_of and user in self.now]

    def _copy(self, node: fx.Node, *, again: bool = False) -> None:
        copy = self.graph.node_copy(node, self.show)
        if again or any(a in self.later for a in copy.all_input_nodes):
            self.later.add(copy)
            args: Any
            args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
            if self.mode is not None and callable(copy.target):
                with self.mode, torch.no_grad():
                    copy.meta["val"] = copy.target(*args, **kwargs)
        self.now[node] = copy
