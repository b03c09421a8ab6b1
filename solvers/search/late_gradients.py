"""Lower a step's smallest budget: make large gradients last, and gradients that wait for clipping twice.

A gradient that nothing reads stays from the moment it is made. Where it is larger than its op's inputs, it is better
made at the end (`late_results`): the gradient of a fully connected layer's weight behind a convolutional network has
hundreds of megabytes, and is made first. No sum changes by that, as each op computes what it did. At budgets at which
PyTorch's order has plans another one is worth little, so that order stays unless the other one has a plan below what
every plan in PyTorch's needs.

A gradient that is clipped by the norm of all waits until the last of them is known. It can be kept, or let go and made
again when it is read: the backward runs twice then, or as much of it as leads there. In between are plans that keep
what is made last, for which the second way would be the longest (`second_runs`).

Where blocks share weights, the gradients of their first backward wait in the same way, for those of the second. There
it pays close to the smallest budget to make the last of them twice, from one gradient that is kept (`last_twice`).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem, Profile
from checkmate.solvers.common.flat_problem import Tables
from checkmate.solvers.search.greedy import GRID, DeadEnd, run_pass

WORTH = 0.01  # of the smallest budget: what another order must save, and what must wait for a second run to matter
SHARES = (1.0, 63 / 64, 31 / 32, 15 / 16, 7 / 8, 0.75, 0.5, 0.0)  # of the bytes that wait, to make a second time
LONG = 0.25  # of the stages of the backward: what is read sooner does not wait
SECONDS_LAST = 0.08  # of the step: what takes longer is not worth a second run


def late_results(graph: Graph) -> list[int] | None:
    """An order of the step's ops with a lower smallest budget; None if there is none, or hardly lower.

    Nothing but the bytes of values counts, so that the answer is the same wherever and whenever a step is captured.

    Args:
        graph: of the step.

    >>> from checkmate.core.graph import Op, Value
    >>> forward = Op("a", "f", (), (0,)), Op("b", "f", (0,), (1,))
    >>> backward = Op("db", "f", (1,), (2,), "backward"), Op("c", "f", (0, 1), (3,), "backward")
    >>> sizes = [10, 10, 50, 80]
    >>> graph = Graph(forward + backward, tuple(Value(f"v{k}", n, k) for k, n in enumerate(sizes)), (2,))
    >>> late_results(graph)
    [0, 1, 3, 2]
    """
    # Last those ops whose unread results are larger than the inputs that wait with them. What must run once may write
    # to what others read: ops before the last such one stay where they are.
    T, results = len(graph.ops), set(graph.outputs)
    begin = max([graph.forward_length, *(k + 1 for k, op in enumerate(graph.ops) if op.pinned)])
    late: set[int] = set()
    for k, op in enumerate(graph.ops[begin:], begin):
        unread = all(v in results and not graph.users[v] for v in op.outputs)
        output_bytes = sum(graph.values[v].size_bytes for v in op.outputs)
        read = [graph.values[v] for v in op.inputs if v not in results]
        if unread and output_bytes > sum(value.size_bytes for value in read if value.producer is not None):
            late.add(k)
    order = sorted(range(T), key=late.__contains__)
    if order == sorted(order):
        return None
    # It is taken if it has a plan below what every plan in PyTorch's order needs.
    costs = Profile(np.ones(T), np.zeros(T, dtype=np.int64))
    later = Problem(graph.in_order(order), costs)
    budget = (1 - WORTH) * int(Problem(graph, costs).unavoidable_bytes.max())
    if int(later.unavoidable_bytes.max()) > budget:
        return None
    stages = run_pass(Tables.of(later), int(budget), GRID[0])
    return None if isinstance(stages, DeadEnd) else order


def second_runs(problem: Problem, *, shares: tuple[float, ...] = SHARES) -> list[dict[int, range]]:
    """For each share of the waiting bytes, the backward ops to run a second time, and in which stage.

    Values wait that the backward makes, and does not read for long. Of all moments the one counts at which they wait
    longest, all together. An op runs again when something needs it for the first time after that, or before another op
    overwrites what it reads. Steps in which next to nothing waits give no dictionaries.

    >>> step = Problem.from_dag([[], [0], [1], [2], [1, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=1)
    >>> second_runs(step, shares=(1.0, 0.0))  # op 1 makes what op 4 reads
    [{1: range(4, 5)}, {}]
    """
    graph, results = problem.graph, set(problem.graph.outputs)
    # The stage before which values wait longest, all together, and these, in the order in which they are made. Bytes
    # do not count in it: on its way through a step a gradient of activations is large, and read soon.
    begins = graph.forward_length
    long = LONG * (len(graph.ops) - begins)
    outputs = [(k, v) for k, op in enumerate(graph.ops) if k >= begins and op.pinned is None for v in op.outputs]
    waits = [
        (before, after, v)
        for k, v in outputs
        if v not in results
        for before, after in pairwise((k, *graph.users[v]))
        if after - before >= long
    ]
    stages = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for before, after, _ in waits:
        stages[before + 1] += after - before
        stages[after + 1] -= after - before
    moment = int(stages.cumsum().argmax())
    waiting = [v for before, after, v in waits if before < moment < after]
    # For each share of these bytes, the ops to run again.
    total = sum(problem.sizes[v] for v in waiting)
    if total <= WORTH * problem.unavoidable_bytes.max():
        return []
    sums = list(accumulate(int(problem.sizes[v]) for v in waiting))
    chosen = dict.fromkeys(sum(size <= share * total for size in sums) for share in shares)
    homes: list[dict[int, range]] = []
    for n in chosen:
        # Their ops run again after the moment, and those that make the unkept values they need.
        kept = results.union(waiting[n:])
        deadlines = {v: min(k for k in graph.users[v] if k > moment) for v in waiting[:n]}
        homes.append({})
        for k in reversed(range(begins, moment)):
            op = graph.ops[k]
            stages_of = [deadlines[v] for v in op.outputs if v in deadlines]
            stage = min([*stages_of, problem.limits.last_stage.get(k, len(graph.ops))])
            if stages_of and op.pinned is None and stage > moment:
                homes[-1][k] = range(stage, stage + 1)
                deadlines |= {v: min(stage, deadlines.get(v, stage)) for v in op.inputs if v not in kept}
    return homes


def last_twice(problem: Problem) -> list[dict[int, range]]:
    """Ways to make again what the backward makes last among values that wait: the ops, and in which stages they may.

    In each way all values up to some op stay, and those after it that wait are let go of. A way that frees more bytes
    takes more seconds; the fewest come first.

    >>> deps, seconds = [[], [0], [0, 1], [1], [3], [2, 4]], [1, 1, 0.1, 1, 1, 1]
    >>> step = Problem.from_dag(deps, seconds=seconds, sizes=[1, 1, 4, 1, 1, 1], forward=1)
    >>> last_twice(step)  # op 2 makes what op 5 reads
    [{2: range(4, 6)}]
    """
    graph, begins, users = problem.graph, problem.graph.forward_length, problem.graph.users
    long, results = LONG * (len(graph.ops) - begins), set(graph.outputs)
    made_by = [-1 if value.producer is None else value.producer for value in graph.values]
    late = [[v for v in op.inputs if made_by[v] >= begins] for op in graph.ops]
    waits = [v for v, k in enumerate(made_by) if k >= begins and v not in results and users[v]]
    waits = [v for v in waits if users[v][0] - made_by[v] >= long]
    ways: list[tuple[float, int, dict[int, range]]] = []
    for last_kept in {made_by[v] for values in late for v in values}:
        # The ops that lead from what stays to what goes.
        todo = gone = [v for v in waits if made_by[v] > last_kept]
        again, kept = set[int](), set[int]()
        while todo:
            ops = {made_by[v] for v in todo} - again
            again |= ops
            inputs = [v for k in ops for v in late[k]]
            kept.update(v for v in inputs if made_by[v] <= last_kept)
            todo = [v for v in inputs if made_by[v] > last_kept]
        seconds = float(problem.seconds[[*again]].sum())
        if again and seconds <= SECONDS_LAST * problem.keep_all_cost and not any(graph.ops[k].pinned for k in again):
            # They run again as late as what goes is read, each of them in a stage of its own if need be.
            first, last = (pick(users[v][i] for v in gone) for pick, i in ((min, 0), (max, -1)))
            stages = range(max(max(again) + 1, first - len(again)), last + 1)
            freed = int(problem.sizes[gone].sum()) - int(problem.sizes[[*kept.difference(waits)]].sum())
            ways.append((seconds, freed, dict.fromkeys(sorted(again), stages)))
    choices, most = list[dict[int, range]](), WORTH * problem.unavoidable_bytes.max()
    for _, freed, homes in sorted(ways, key=lambda way: way[0]):
        if freed > most:
            choices, most = [*choices, homes], freed
    return choices
