"""The paper's equations term by term, of R and S: what the simulator and the verifier of plans are held against.

Of schedules without a second memory. Equation numbers are those of `checkmate.core.schedule`.
"""

from __future__ import annotations

import numpy as np

from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule


def bytes_in_memory(schedule: Schedule, problem: Problem) -> np.ndarray:
    """(T, T) int64: U[t, k], bytes in memory while op k runs in stage t, or would, Eqs. (2)-(5); 0 for k > t.

    U[t, k+1] = U[t, k] - freed_t(k) + R[t, k+1] Σ_{v in out(k+1)} M_v, with FREE[t, v, k] = 1 where op k is the
    last to touch v in stage t and v is not kept for stage t+1. Workspace is added where the op runs, less the most
    that a way of it saves which writes over a v with FREE[t, v, k] = 1 (`checkmate.core.inplace`).
    """
    graph, sizes = problem.graph, problem.sizes
    T, results = len(graph.ops), set(graph.outputs)
    U = np.zeros((T, T), dtype=np.int64)
    for t in range(T):
        kept = schedule.S[t + 1] if t + 1 < T else np.isin(np.arange(len(graph.values)), graph.outputs)
        # The stage begins with the kept values, Eq. (2).
        live = problem.resident + int(sizes @ schedule.S[t])
        for k in range(t + 1):
            op = graph.ops[k]
            if not schedule.R[t, k]:
                U[t, k] = live
                continue
            # Second copies of results count while the op runs only.
            new = sum(int(sizes[v]) for v in op.outputs if not (v in results and t > k))
            second_copies = sum(int(sizes[v]) for v in op.outputs if v in results and t > k)
            # FREE[t, v, k], Eq. (5): not kept, and not read later in the stage.
            freed = {
                v
                for v in {*op.inputs, *op.outputs}
                if not kept[v]
                and not any(schedule.R[t, j] for j in graph.users[v] if k < j <= t)
                and graph.values[v].producer is not None
            }
            saved = problem.saved(k, freed)
            U[t, k] = live + new + second_copies + int(problem.workspace[k]) - (saved[1] if saved else 0)
            live += new - sum(int(sizes[v]) for v in freed)
    return U


def peak(schedule: Schedule, problem: Problem) -> int:
    """The largest U, in bytes."""
    return int(bytes_in_memory(schedule, problem).max())


def violations(schedule: Schedule, problem: Problem, budget: int | None = None) -> list[str]:
    """The equations that do not hold: name, place and amount. Empty if all hold."""
    graph, R, S = problem.graph, schedule.R, schedule.S
    T, V = len(graph.ops), len(graph.values)
    if R.shape != (T, T) or S.shape != (T, V):
        return [f"R and S have shapes {R.shape} and {S.shape}, not {(T, T)} and {(T, V)}"]
    # R: each op runs in its own stage, none of a later one, and none more often than it may.
    absent = np.flatnonzero(~R.diagonal())
    found = [f"(8a) R[{t}, {t}] = 0: {graph.ops[t].name} does not run in its own stage" for t in absent]
    found += [f"(8c) R[{t}, {k}] = 1 though {k} > {t}" for t, k in np.argwhere(np.triu(R, 1))]
    for k, op in enumerate(graph.ops):
        if op.pinned and R[:, k].sum() > 1:
            found.append(f"pinned: {op.name} runs {R[:, k].sum()} times though it {op.pinned}")
    for k, by in problem.limits.last_stage.items():
        for t in np.flatnonzero(R[by + 1 :, k]) + by + 1:
            found.append(f"overwritten: R[{t}, {k}] = 1 though {graph.ops[by].name} has overwritten what it reads")
    # S: an op reads what is kept or made, and only what is at hand is kept.
    for t, k in np.argwhere(np.tril(R)):
        for v in graph.ops[k].inputs:
            value = graph.values[v]
            if value.producer is not None and not (R[t, value.producer] or S[t, v]):
                found.append(f"(1b) R[{t}, {k}] = 1 but {value.name} is neither kept nor made in stage {t}")
    for t, v in np.argwhere(S):
        p = graph.values[v].producer
        if p is None or p >= t:
            found.append(f"(8b) S[{t}, {v}] = 1 but {graph.values[v].name} is not made before stage {t}")
        elif not (R[t - 1, p] or S[t - 1, v]):
            found.append(f"(1c) S[{t}, {v}] = 1 but {graph.values[v].name} is not at hand in stage {t - 1}")
    for v in graph.outputs:
        p = graph.values[v].producer
        if p is not None and not S[p + 1 :, v].all():
            found.append(f"output: {graph.values[v].name} is a result of the step but is not kept to its end")
    # U: the budget holds.
    if budget is not None and not found:
        U = bytes_in_memory(schedule, problem)
        for t, k in np.argwhere(U > budget):
            found.append(f"(9) U[{t}, {k}] = {U[t, k]} exceeds the budget of {budget} by {U[t, k] - budget}")
    return found
