"""Where a heuristic may put checkpoints: every op of a chain, articulation points, or all ops of the forward in a row.

A checkpoint is an op whose outputs the forward keeps. Only the forward counts here, and of it only what may be missing
later: values that no op makes, results of the step, values of pinned ops (random masks, say) and values of no bytes are
always at hand, so they neither need a checkpoint nor tie two ops together.

Articulation points are the generalization to any graph in Jain et al., "Checkmate", MLSys 2020. We differ from it in
two ways, without which a captured transformer or a network with batch norms has hardly any. A point counts only where
it parts what comes before it from what comes after: an op on one of two branches that also has a side input of its own
is an articulation point of the undirected graph, but the other branch leads around it. And what is made without the
batch, such as an attention mask that all blocks read, does not tie them together, no more than a weight does.

Paper: https://arxiv.org/abs/1910.02653
"""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from checkmate.core.problem import Problem


def droppable(problem: Problem) -> frozenset[int]:
    """The values of the forward that can be missing later: of some size, no results, not of pinned ops.

    >>> sorted(droppable(Problem.from_dag([[], [0], [1]], seconds=[1] * 3, sizes=[4, 0, 4])))
    [0]
    """
    graph = problem.graph
    ops = (op for op in graph.ops[: graph.forward_length] if op.pinned is None)
    return frozenset(v for op in ops for v in op.outputs if problem.sizes[v] > 0).difference(graph.outputs)


def flow(problem: Problem) -> nx.DiGraph:
    """The forward ops that may run again, by index, with an edge from each to those that read what it may drop.

    Constants are left out: ops that use no input of the step, nor does any ancestor, in a graph in which some op does.

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
    """All forward ops that may run again, in the order in which they run.

    >>> linearized(Problem.from_dag([[], [0], [0, 1], [2]], seconds=[1] * 4, sizes=[4] * 4))
    (0, 1, 2)
    """
    made_by = {problem.graph.values[v].producer for v in droppable(problem)}
    return tuple(sorted(k for k in made_by if k is not None))


def articulation_points(problem: Problem) -> tuple[int, ...]:
    """The forward ops that part what comes before them from what comes after, ascending.

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
    """The forward ops that may run again, in order, less the side inputs: ops that read only what is always at hand.

    Where an op reads several of those and nothing else, the first of them begins the chain.

    >>> chain(Problem.from_dag([[], [0], [], [1, 2], [3]], seconds=[1] * 5, sizes=[4] * 5))
    (0, 1, 3)
    """
    line = flow(problem)
    inner = {k for k in line if line.in_degree(k)}
    beside = {k: {p for j in line.succ[k] for p in line.pred[j]} for k in line if k not in inner}
    return tuple(k for k in line if k in inner or not any(p in inner or p < k for p in beside[k]))


def why_no_chain(problem: Problem) -> str | None:
    """What makes the forward no chain, in words; None if it is one.

    It is one if nothing in the forward is read twice, and each op of `chain` reads of the chain only the op before it.
    Outputs that only the backward reads, such as the indices of a max-pool, do not matter.

    >>> why_no_chain(Problem.from_dag([[], [0], [0, 1], [2]], seconds=[1] * 4, sizes=[4] * 4))
    'what op0 makes is read by op1 and op2'
    """
    ops, line, on_chain = problem.graph.ops, flow(problem), chain(problem)
    for k in line:
        if line.out_degree(k) > 1:
            readers = sorted(line.succ[k])
            return f"what {ops[k].name} makes is read by {ops[readers[0]].name} and {ops[readers[1]].name}"
    before = dict(zip(on_chain[1:], on_chain[:-1], strict=True))
    for k in on_chain:
        for j in sorted(line.pred[k]):
            if j in on_chain and j != before[k]:
                return f"{ops[k].name} reads what {ops[j].name} makes, with {ops[before[k]].name} in between"
    return None


CANDIDATES: dict[str, Callable[[Problem], tuple[int, ...]]] = {
    "chain": chain,
    "ap": articulation_points,
    "linearized": linearized,
}
