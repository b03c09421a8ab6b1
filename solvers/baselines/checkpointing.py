"""Checkpoints along the forward: at every k-th candidate, or wherever enough bytes have come together since the last.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, for chains; general graphs as in Jain et al.,
"Checkmate", MLSys 2020. A checkpoint is an op whose outputs the forward keeps. The checkpoints and all ops after the
last of them reach the backward (which begins there); the backward makes the other values again, segment by segment.

    chen-*        a candidate is every op of a chain; where the forward is none, the method does not apply and says so
    ap-*          articulation points of the forward: ops that part what comes before them from what comes after
    linearized-*  every op of the forward, in the order in which it runs

*-sqrt keeps candidates k - 1, 2k - 1, … with k = ⌊√candidates⌋: one schedule, whatever the budget. *-greedy adds up
bytes since the last checkpoint and keeps the candidate at which they exceed b, for the best of many b; with b = ∞ it
keeps everything. Values that are always at hand (no op makes them, results, values of pinned ops, values of no bytes)
need no checkpoint and tie no two ops together.

We differ from the papers:

1. A schedule comes from simulating what is kept, not from a formula. An op is kept with all its outputs, so that the
   indices of a max-pool come with the values.
2. An op on one of two branches that also has a side input of its own is an articulation point of the undirected graph,
   but the other branch leads around it: it does not count.
3. Ops that use no input of the step, such as those of an attention mask, tie nothing together, no more than weights do.

Two yardsticks choose nothing. "checkpoint-all" keeps everything, as PyTorch does by itself. "last-node" keeps only the
outputs of the op before, the most recomputation there is: n² / 8 runs for the step of a chain of n ops, up to n² / 2
with residual connections. Its peak is not the least: on branches more can be made again than was let go.

Papers: https://arxiv.org/abs/1604.06174 and https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isqrt

import networkx as nx
import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import kept_by_the_forward, on_demand
from checkmate.units import exact_bytes, format_bytes

TRIES = 64  # settings that are simulated, by default
COARSE = 0.5  # the share of them that spreads over all settings; the others go to where the best was
MOST_SELECTIONS = 4096  # values of b that are thought of


def checkpoint_all(task: Task, incumbent: Incumbent) -> Remarks:
    """Run each op once, where that fits the budget.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0]], seconds=[1, 1], sizes=[4, 4])
    >>> solve(problem, 8, method="checkpoint-all").cost
    2.0
    """
    if incumbent.offer(np.eye(len(task.problem.graph.ops), dtype=bool), "checkpoint-all"):
        return Remarks(method="checkpoint-all")
    return Remarks(f"keeping everything takes {format_bytes(task.problem.keep_all_peak)}")


def last_node(task: Task, incumbent: Incumbent) -> Remarks:
    """After each op keep its outputs only, with results and values of pinned ops. No plan if that does not fit.

    >>> from checkmate import Problem, solve
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[1] * 5, sizes=[1] * 5, forward=3)
    >>> solve(chain, 3, method="last-node").cost
    8.0
    """
    last = {t: op.outputs for t, op in enumerate(task.problem.graph.ops)}
    remedy = ", and it has no other schedule"
    return cheapest(task, incumbent, "last-node", 1, lambda _: on_demand(task.problem, last), remedy=remedy)


def sqrt(kind: str) -> Callable[[Task, Incumbent], Remarks]:
    """Make the method that keeps every ⌊√n⌋-th of the n `CANDIDATES`. No plan if it does not apply or does not fit.

    >>> from checkmate import solve
    >>> deps = [[], [0], [1], [2], [3], [2, 4], [1, 5], [0, 6]]
    >>> chain = Problem.from_dag(deps, seconds=[1] * 8, sizes=[1] * 8, forward=5)
    >>> solve(chain, 4, method="chen-sqrt").cost, solve(chain, 3, method="chen-sqrt").status
    (10.0, Status.NOT_FOUND)
    """
    name = "chen" if kind == "chain" else kind
    remedy = f", and it has no other schedule; {name}-greedy adapts to the budget"

    def run(task: Task, incumbent: Incumbent) -> Remarks:
        problem = task.problem
        if kind == "chain" and (no := does_not_apply(problem, "ap-sqrt and linearized-sqrt")):
            return no
        candidates = CANDIDATES[kind](problem)
        k = max(1, isqrt(len(candidates)))
        checkpoints = candidates[k - 1 :: k]
        R = kept_by_the_forward(problem, kept(problem, checkpoints))
        details = {"candidates": len(candidates), "checkpoints": len(checkpoints)}
        return cheapest(task, incumbent, f"{name}-sqrt", 1, lambda _: R, details, remedy=remedy)

    return run


def greedy(kind: str) -> Callable[..., Remarks]:
    """Make the method that keeps a candidate if the bytes since the last checkpoint exceed b, for the best b.

    Its option ``tries`` says how many b are simulated. No plan where it does not apply, or no b fits.
    """
    name = "chen-greedy" if kind == "chain" else f"{kind}-greedy"

    def run(task: Task, incumbent: Incumbent, *, tries: int = TRIES) -> Remarks:
        problem, graph = task.problem, task.problem.graph
        if kind == "chain" and (no := does_not_apply(problem, "ap-greedy and linearized-greedy")):
            return no
        candidates, values = CANDIDATES[kind](problem), droppable(problem)
        forward = graph.ops[: graph.forward_length]
        filled = list(accumulate(sum(int(problem.sizes[v]) for v in op.outputs if v in values) for op in forward))
        choices = [[candidates[i] for i in places] for places in selections([filled[k] for k in candidates])]

        def runs(i: int) -> np.ndarray:
            return kept_by_the_forward(problem, kept(problem, choices[i]))

        figures = {"candidates": len(candidates), "selections": len(choices)}
        best = [{"checkpoints": len(places)} for places in choices]
        return cheapest(task, incumbent, name, len(choices), runs, figures, best.__getitem__, tries=tries)

    return run


def cheapest(
    task: Task,
    incumbent: Incumbent,
    method: str,
    settings: int,
    runs: Callable[[int], np.ndarray],
    figures: Mapping[str, int] = {},
    of_best: Callable[[int], Mapping[str, int]] = lambda best: {},
    *,
    tries: int = 1,
    remedy: str = "",
) -> Remarks:
    """Offer the schedules of settings 0, …, settings - 1: neither cost nor peak is monotone in the setting.

    All are tried, if the tries suffice. Else half of the tries spread evenly, and the others halve the gaps between
    settings tried, first those beside the best so far: the cheapest that fits, or where none does the one of the
    smallest peak. One at least is tried. ``runs`` gives R (T, T) of a setting; the details are the ``figures``, and
    those that ``of_best`` gives of the best setting; ``remedy`` ends the message where none fits.
    """
    coarse = settings if settings <= tries else max(2, int(COARSE * tries))
    waiting = sorted({round(i) for i in np.linspace(0, settings - 1, coarse).tolist()})
    tried: list[int] = []
    best = closest = None
    while waiting:
        setting = waiting.pop(0)
        tried.append(setting)
        least = incumbent.least_peak
        if incumbent.offer(runs(setting), method):
            best = setting
        if incumbent.least_peak != least:
            closest = setting
        if task.clock.is_over:
            break
        if not waiting and len(tried) < tries:
            # the middle of the widest gap beside the best, else of the widest at all
            beside = closest if best is None else best
            gaps = [(beside in (a, b), b - a, (a + b) // 2) for a, b in pairwise(sorted(tried)) if b - a > 1]
            waiting = [max(gaps)[2]] if gaps else []
    details = {**figures, **({} if best is None else of_best(best)), "tried": len(tried)}
    if best is not None:
        return Remarks(details=details)
    peak = incumbent.least_peak
    assert peak is not None
    return Remarks(f"the smallest peak it reaches is {exact_bytes(peak)}{remedy}", {**details, "peak": peak})


def selections(filled: Sequence[int], most: int = MOST_SELECTIONS) -> list[tuple[int, ...]]:
    """The distinct sets of checkpoints that the rule "bytes since the last exceed b" gives, from b = 0 to b = ∞.

    ``filled[i]`` are the bytes that the forward makes and may drop, from its start up to and with candidate i; a choice
    lists the places of candidates. At b = 0 all are checkpoints, at b = ∞ none. There are at most ``most`` choices, and
    one more; where that is not all of them, they are of as many b that grow by equal factors.

    >>> selections([4, 8, 12])
    [(0, 1, 2), (1,), (2,), ()]
    """

    def by_bytes(b: float) -> tuple[tuple[int, ...], int]:
        """The set for b, and the smallest sum that made a checkpoint: any b below that sum gives the same set."""
        chosen, before, smallest = [], 0, 0
        for i, bytes_so_far in enumerate(filled):
            since = bytes_so_far - before
            if since > b:
                chosen.append(i)
                before = bytes_so_far
                smallest = min(smallest or since, since)
        return tuple(chosen), smallest

    # Step from each b to the next that changes the set.
    choices: list[tuple[int, ...]] = []
    b = 0
    while len(choices) < most:
        chosen, smallest = by_bytes(b)
        choices.append(chosen)
        if not chosen:
            return choices
        b = smallest
    # Too many sets: a geometric selection of b.
    growing = np.geomspace(by_bytes(0)[1], filled[-1], most - 1).tolist()
    return [*dict.fromkeys([choices[0], *(by_bytes(b)[0] for b in growing), ()])]


def kept(problem: Problem, checkpoints: Sequence[int]) -> set[int]:
    """The values of the forward that reach the backward: those of checkpoints, and of all ops after the last one."""
    graph, last = problem.graph, max(checkpoints, default=-1)
    outputs = {v for op in graph.ops[: graph.forward_length] for v in op.outputs}
    dropped = {v for k in set(range(last + 1)).difference(checkpoints) for v in graph.ops[k].outputs}
    return outputs - (dropped & droppable(problem))


def droppable(problem: Problem) -> frozenset[int]:
    """The values of the forward that a checkpointing may drop: with bytes, no results, not made by pinned ops."""
    graph = problem.graph
    ops = (op for op in graph.ops[: graph.forward_length] if op.pinned is None)
    return frozenset(v for op in ops for v in op.outputs if problem.sizes[v] > 0).difference(graph.outputs)


def flow(problem: Problem) -> nx.DiGraph:
    """The forward ops that may run again, by index, with an edge from each op to the readers of its droppable values.

    Ops that use no input of the step, nor does any ancestor of theirs, are left out if some op of the graph uses one.

    >>> flow(Problem.from_dag([[], [0], [0, 1], [2]], seconds=[1] * 4, sizes=[4] * 4)).edges
    OutEdgeView([(0, 1), (0, 2), (1, 2)])
    """
    graph, values = problem.graph, droppable(problem)
    of_inputs: set[int] = set()
    for k, op in enumerate(graph.ops[: graph.forward_length]):
        reads = [graph.values[v] for v in op.inputs]
        if any(value.role == "input" or value.producer in of_inputs for value in reads):
            of_inputs.add(k)
    line = nx.DiGraph()
    line.add_nodes_from(k for k in linearized(problem) if k in of_inputs or not of_inputs)
    for k in list(line):
        line.add_edges_from(
            (p, k) for v in graph.ops[k].inputs if v in values and (p := graph.values[v].producer) in line
        )
    return line


def linearized(problem: Problem) -> tuple[int, ...]:
    """The forward ops that may run again, in execution order."""
    made_by = {problem.graph.values[v].producer for v in droppable(problem)}
    return tuple(sorted(k for k in made_by if k is not None))


def articulation_points(problem: Problem) -> tuple[int, ...]:
    """The forward ops that separate all earlier ops from all later ones, ascending.

    Two neighbours of an op stay connected without it exactly if their edges to it lie in one biconnected component. So
    the op parts before from after where no component has an edge into it and an edge out of it.

    >>> deps = [[], [0], [1], [1, 2], [3], [4]]  # a branch around op 2
    >>> articulation_points(Problem.from_dag(deps, seconds=[1] * 6, sizes=[4] * 6))
    (1, 3)
    """
    line = flow(problem)
    gone_around = set()
    for component in nx.biconnected_component_edges(line.to_undirected()):
        gone_around |= {min(edge) for edge in component} & {max(edge) for edge in component}
    return tuple(k for k in line if line.in_degree(k) and line.out_degree(k) and k not in gone_around)


def chain(problem: Problem) -> tuple[int, ...]:
    """The forward ops that may run again, in order, without side inputs: ops that read only values always in memory.

    Where an op reads several of those and nothing else, the first of them begins the chain.

    >>> chain(Problem.from_dag([[], [0], [], [1, 2], [3]], seconds=[1] * 5, sizes=[4] * 5))
    (0, 1, 3)
    """
    line = flow(problem)
    inner = {k for k in line if line.in_degree(k)}
    beside = {k: {p for j in line.succ[k] for p in line.pred[j]} for k in line if k not in inner}
    return tuple(k for k in line if k in inner or not any(p in inner or p < k for p in beside[k]))


def why_no_chain(problem: Problem) -> str | None:
    """The reason why the forward is no chain, in words; None if it is a chain.

    It is one if nothing in the forward is read twice, and each op of `chain` reads of the chain only the op before it.
    Outputs that only the backward reads, such as the indices of a max-pool, do not matter.
    """
    ops, line, on_chain = problem.graph.ops, flow(problem), chain(problem)
    for k in line:
        if line.out_degree(k) > 1:
            first, second = sorted(line.succ[k])[:2]
            return f"what {ops[k].name} makes is read by {ops[first].name} and {ops[second].name}"
    for before, k in pairwise(on_chain):
        for j in sorted(line.pred[k]):
            if j in on_chain and j != before:
                return f"{ops[k].name} reads what {ops[j].name} makes, with {ops[before].name} in between"
    return None


def does_not_apply(problem: Problem, instead: str) -> Remarks | None:
    """Remarks for a chain method if the forward is no chain, naming other methods; None if it is one."""
    if reason := why_no_chain(problem):
        return Remarks(f"it is for chains, and this forward is none ({reason}); {instead} apply to any graph")
    return None


CANDIDATES: dict[str, Callable[[Problem], tuple[int, ...]]] = {
    "chain": chain,
    "ap": articulation_points,
    "linearized": linearized,
}
