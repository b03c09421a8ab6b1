"""POET: recomputation and paging in one integer program, in which the device pays for each page as for an op.

Patil et al., "POET: Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", ICML 2022:

    SRam[t+1] <= SRam[t] + R[t] + MIn[t],  SSd[t+1] <= SSd[t] + MOut[t],  MIn[t] <= SSd[t],  MOut[t] <= SRam[t]
    min Σ_t Σ_k (energy of op k) R[t, k] + (of paging) (MIn[t, k] + MOut[t, k])      within the RAM of the device

Here with seconds for energy, and with values in place of ops: SRam is S of `checkmate.solvers.linear.equations`,
where bytes are counted, too. Pages move between two stages; of what stage t keeps, K[t, v] was there before they do:

    S[t, v] <= K[t-1, v] + MIn[t, v],  K[t, v] + Σ_k FREE[t, v, k] <= R[t, prod(v)] + S[t, v],  MOut[t, v] <= K[t-1, v]
    SSd[t, v] <= SSd[t-1, v] + MOut[t, v],  MIn[t, v] <= SSd[t-1, v],  Σ_v M_v SSd[t, v] <= bytes there

The program pays for a page by itself; in the plan, as on a device with direct memory access, pages move to where ops
run beside them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.host.exact import may_go, plan_of
from checkmate.solvers.linear import equations, highs
from checkmate.solvers.linear.links import link_seconds
from checkmate.solvers.linear.model import NONE, Model, after, before, pairs

MOST_OPS = 200  # beyond this the program takes gigabytes, and finds nothing in minutes


def poet(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan of POET's integer program, by HiGHS; no plan if HiGHS finds none in time.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 4.0, 4.0)), 6, method="poet").cost
    8.5
    """
    problem = task.problem
    if (count := len(problem.graph.ops)) > MOST_OPS:
        return Remarks(f"its integer program is of use up to {MOST_OPS} ops, and there are {count}")
    model, R, page_in = build(problem, task.budget)
    result = highs.run(model, time_limit=task.clock.left, gap=task.gap, threads=task.threads)
    figures: dict[str, float] = {"columns": model.columns, "rows": model.rows}
    if result.x is None:
        return Remarks(f"HiGHS ends without a plan: {result.outcome.value}", figures)
    figures["one device"] = result.objective * equations.cost_unit(problem)
    runs, pages = (model.value(result.x, family).round().astype(bool) for family in (R, page_in))
    plan = plan_of(problem, task.budget, runs, pages)
    if plan is None:
        return Remarks("there is no room for its pages beside what ops need while they move", figures)
    incumbent.offer(plan, "poet")
    return Remarks(details=figures | {"overlapped": simulator.cost(plan, problem)})


def build(problem: Problem, budget: int) -> tuple[Model, np.ndarray, np.ndarray]:
    """The program under a budget in bytes, in units of the mean op's seconds, with the columns of R and MIn."""
    assert problem.host is not None
    known, plain = equations.build(problem, budget)  # where R, S, FREE and OVER can be one, and how large U
    model, seconds = Model(), problem.seconds / equations.cost_unit(problem)
    R, S, FREE, OVER, U = (family != NONE for family in (plain.R, plain.S, plain.FREE, plain.OVER, plain.U))
    # R, S, FREE, OVER, U of recomputation alone: SRam is S.
    x = equations.Variables(
        R=model.variables(R, name="R", lower=np.eye(len(R)), cost=seconds, integer=True),
        S=model.variables(S, name="SRam", integer=True),
        FREE=model.variables(FREE, name="FREE"),
        OVER=model.variables(OVER, name="OVER"),
        U=model.variables(U, name="U", upper=np.where(U, known.upper[plain.U], 0.0)),
        touches=plain.touches,
    )
    # Pages: at hand after the ops of a stage (K), in the second memory (SSd), sent and fetched there.
    away = may_go(problem, S & after(S, False))
    out, back = link_seconds(problem, problem.host)
    K = model.variables(after(S, False), name="K", integer=True)
    SSd = model.variables(away, name="SSd", integer=True)
    MOut = model.variables(away, name="MOut", cost=out, integer=True)
    MIn = model.variables(before(away, False), name="MIn", cost=back, integer=True)
    equations.depend_until_freed(model, x)
    equations.keep_or_free(model, x, K)  # values in memory after the ops, before pages move
    for name, first, others, upper in (
        ("stay or page in", x.S, [(before(K), -1.0), (MIn, -1.0)], 0.0),
        ("page out", MOut, [(before(K), -1.0)], 0.0),
        ("copy", SSd, [(before(SSd), -1.0), (MOut, -1.0)], 0.0),
        ("page in", MIn, [(before(SSd), -1.0)], 0.0),
        ("page out once", MOut, [(before(SSd), 1.0)], 1.0),
        ("page in what is away", MIn, [(before(K), 1.0)], 1.0),
    ):
        pairs(model, name, first, others, upper=upper)
    unit = equations.size_unit(problem)
    model.constrain("fit there", [(SSd, problem.sizes / unit)], upper=problem.host.budget / unit)
    # The bytes of both memories.
    equations.begin_stage(model, x, problem)
    equations.run_and_free(model, x, problem)
    equations.fit(model, x, problem, budget)
    equations.fit_first_runs(model, replace(x, S=before(K)), problem, budget)
    if x.touches.saved.any():
        equations.write_over(model, x)
        equations.keep_one_copy(model, x)
    equations.run_at_most(model, x.R, problem)
    return model, x.R, MIn
