"""Offload all: send everything that the forward makes for the backward, and fetch it just before. No recomputation.

What frameworks do that move activations to the host's memory (`torch.autograd.graph.save_on_cpu` at once, others by
streams): a value goes after its last use in the forward, and comes back when the op before its first use in the
backward runs. Nothing is chosen, so it is a yardstick.
"""

from __future__ import annotations

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.solvers.host.unroll import Swap, unroll
from checkmate.units import exact_bytes


def offload_all(task: Task, incumbent: Incumbent, *, threshold: int = 0, ahead: int = 1) -> Remarks:
    """The plan that sends all larger values which the backward reads. No plan where it does not fit.

    Args:
        threshold: bytes above which a value is sent.
        ahead: how many ops before its first use in the backward a value is asked for.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 2.0, 2.0)), 8, method="offload-all").cost
    5.0
    """
    problem, host = task.problem, task.problem.host
    assert host is not None
    swaps = [swap for swap in every_swap(problem, ahead) if problem.sizes[swap.value] > threshold]
    plan = unroll(task, swaps, {})
    if incumbent.offer_plan(plan, "offload-all"):
        return Remarks(details={"sent": len(plan.sent)})
    usage = simulator.simulate(plan, problem)
    there = f" and {exact_bytes(usage.peak_there)} there" if usage.peak_there > host.budget else ""
    return Remarks(f"its only plan takes {exact_bytes(usage.peak)} here{there}", {"sent": len(plan.sent)})


def every_swap(problem: Problem, ahead: int) -> list[Swap]:
    """Each value of the forward that the backward reads, if there are ops to run while it is away."""
    graph, limits = problem.graph, problem.limits
    found = []
    for v, value in enumerate(graph.values):
        if value.producer is None or v in graph.outputs or v in limits.gone or not problem.sizes[v]:
            continue
        early = [value.producer, *(k for k in graph.users[v] if k < graph.forward_length)]
        late = [k for k in graph.users[v] if k >= graph.forward_length]
        if value.producer < graph.forward_length and late and late[0] - ahead > early[-1]:
            found.append(Swap(v, early[-1], late[0] - ahead))
    return found
