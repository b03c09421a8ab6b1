"""The exact model on small graphs: the integer program of `checkmate.linear`, and beside a second memory its own.

With a second memory there are two programs. `checkmate.solvers.host.every_plan` asks of a plan only what all plans
obey, so that its optimum is a bound. `checkmate.solvers.host.stages` has plans whose transfers go by stages; its answer
becomes a plan, whose seconds the simulator tells. Where the two meet, the plan is the best there is.
"""

from __future__ import annotations

import numpy as np

from checkmate.core import simulator
from checkmate.core.plan import Plan
from checkmate.core.schedule import Schedule
from checkmate.errors import SolverError
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.obey import obeys
from checkmate.solvers.common.task import Task
from checkmate.solvers.host import every_plan, stages
from checkmate.solvers.host.lowering import as_plan, polished
from checkmate.solvers.linear import highs
from checkmate.solvers.linear import milp as linear
from checkmate.solvers.linear.equations import cost_unit
from checkmate.solvers.linear.highs import Outcome
from checkmate.solvers.linear.model import NONE, Model

SHARE_OF_BOUND = 0.4  # of the time
SHARE_OF_POLISH = 0.1  # of what is left, for each plan
ATTEMPTS = 3  # at a plan that breaks the budget by less than the solver's tolerance


def milp(
    task: Task,
    incumbent: Incumbent,
    *,
    formulation: str = "strengthened",
    start: Schedule | None = None,
    target: float | None = None,
    engine: str = "highs",
) -> Remarks:
    """The cheapest plan within a budget, proven or with a bound; with a second memory where the problem has one.

    Args:
        formulation: "strengthened", or "paper" for comparison, without a second memory.
        start: a known schedule to start from; the answer is never worse. Ignored where it does not fit the budget.
        target: stop at a plan that takes at most this many seconds.
        engine: "highs", or "pulp:" and the name of a solver that PuLP knows, without a second memory.

    Raises:
        ValueError: if the formulation is unknown, or is none for a second memory.
        SolverError: if the solver fails, or its answer does not pass the verifier.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
    >>> [solve(one, 7, method="milp").cost for one in (chain, chain.with_host(Host(8, 4.0, 4.0)))]
    [12.0, 8.5]
    """
    if task.problem.host is None:
        return linear.milp(task, incumbent, formulation=formulation, start=start, target=target, engine=engine)
    if formulation != "strengthened" or engine != "highs":
        asked = f"formulation={formulation!r}, engine={engine!r}"
        raise ValueError(f"With a second memory there is formulation='strengthened', engine='highs', not {asked}.")
    if start is not None and obeys(task.problem, start.R):
        incumbent.offer(start.R, "start")
    details: dict[str, object] = {"bound": prove(task.within(SHARE_OF_BOUND * task.clock.left), incumbent)}
    if incumbent.is_infeasible:
        return Remarks("no plan has all that ops need at hand within the budget", details)
    if incumbent.gap > task.gap and (target is None or incumbent.cost > target):
        details["stages"] = find(task, incumbent, target=target)
    return Remarks(details=details)


def prove(task: Task, incumbent: Incumbent) -> dict[str, float]:
    """A bound of all plans; what there is to say of the program."""
    model, _ = every_plan.build(task.problem, task.budget)
    result = highs.run(model, time_limit=task.clock.left, gap=task.gap, threads=task.threads)
    bound = result.bound * cost_unit(task.problem)
    incumbent.prove(bound)
    return {"columns": model.columns, "rows": model.rows, "seconds": bound}


def find(task: Task, incumbent: Incumbent, *, target: float | None = None) -> dict[str, float]:
    """The best plan by stages; what there is to say of the program, with its seconds and those of its plan."""
    problem, unit, margin = task.problem, cost_unit(task.problem), 0
    figures: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        model, x = stages.build(problem, task.budget - margin)
        start = None
        if incumbent.R is not None and incumbent.plan is None:
            there = x.ops.R != NONE
            start = (x.ops.R[there], incumbent.R[there].astype(float))
        result = highs.run(
            model,
            time_limit=task.clock.left,
            gap=task.gap,
            threads=task.threads,
            start=start,
            target=None if target is None else target / unit,
            on_incumbent=lambda found, model=model, x=x: _offer(task, incumbent, model, x, found),  # type: ignore[misc]
        )
        figures = {"columns": model.columns, "rows": model.rows, "bound": result.bound * unit}
        if result.x is None:
            break
        plan = plan_of(task, model, x, result.x)
        figures |= {"seconds": result.objective * unit, "simulated": simulator.cost(plan, problem)}
        usage = simulator.simulate(plan, problem)
        incumbent.offer_plan(plan, "milp")
        if (excess := usage.peak - task.budget) <= 0 or result.outcome is Outcome.INFEASIBLE:
            break
        margin += 2 * excess  # within the solver's tolerance, but not within the budget
    return figures


def plan_of(task: Task, model: Model, x: stages.Variables, found: np.ndarray) -> Plan:
    """The plan of an answer, polished where it fits."""
    families = {"R": x.ops.R, "S": x.ops.S, "K": x.K, "H": x.H, "Out": x.Out, "In": x.In, "E": x.E, "F": x.F}
    values = {name: model.value(found, family).round().astype(bool) for name, family in families.items()}
    plan = as_plan(task.problem, values)
    if simulator.verify(plan, task.problem, task.budget):
        return plan
    return polished(plan, task.problem, task.budget, task.clock.share(SHARE_OF_POLISH))


def _offer(task: Task, incumbent: Incumbent, model: Model, x: stages.Variables, found: np.ndarray) -> None:
    try:
        incumbent.offer_plan(plan_of(task, model, x, found), "milp")
    except SolverError:  # the answer at the end decides whether the solver is right
        return
