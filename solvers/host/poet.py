"""POET: recompute and page in one integer program, by which one device pays for each page as for each op.

Patil et al., "POET: Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", ICML 2022:

    SRam[t+1] <= SRam[t] + R[t] + MIn[t],  SSd[t+1] <= SSd[t] + MOut[t],  MIn[t] <= SSd[t],  MOut[t] <= SRam[t]
    min Σ_t Σ_k (energy of op k) R[t, k] + (of paging) (MIn[t, k] + MOut[t, k])      within the RAM of the device

Here with seconds in place of energy. That is `checkmate.solvers.host.stages` with all transfers between the stages: E
is MOut and F is MIn, H is SSd and S is SRam. Values stand for ops, and bytes are counted as there. The program pays for
a page by itself; in the plan, as on a device with direct memory access, pages move to where ops run beside them.
"""

from __future__ import annotations

from checkmate.core import simulator
from checkmate.solvers.common.incumbent import Incumbent, Remarks
from checkmate.solvers.common.task import Task
from checkmate.solvers.host.exact import plan_of
from checkmate.solvers.host.stages import build, host_of
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import cost_unit

METHOD = "poet"
MOST_OPS = 200  # beyond this the program takes gigabytes, and finds nothing in minutes


def poet(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan of its integer program, by HiGHS; no plan where that finds none in time.

    Raises:
        ValueError: if the problem has no second memory.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 4.0, 4.0)), 6, method="poet").cost
    8.5
    """
    problem = task.problem
    host_of(problem)
    if (count := len(problem.graph.ops)) > MOST_OPS:
        return Remarks(f"its integer program is of use up to {MOST_OPS} ops, and there are {count}")
    model, x = build(problem, task.budget, beside=False)
    result = highs.run(model, time_limit=task.clock.left, gap=task.gap, threads=task.threads)
    figures: dict[str, float] = {"columns": model.columns, "rows": model.rows}
    if result.x is None:
        return Remarks(f"HiGHS ends without a plan: {result.outcome.value}", figures)
    plan = plan_of(task, model, x, result.x)
    incumbent.offer_plan(plan, METHOD)
    figures |= {"one device": result.objective * cost_unit(problem), "overlapped": simulator.cost(plan, problem)}
    return Remarks(details=figures)
