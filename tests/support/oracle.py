"""The truth on small problems: every schedule there is, tried one by one; and random problems to try them on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from checkmate.core import simulator
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.inplace import InPlace
from checkmate.core.problem import Problem, Profile
from checkmate.core.rules import with_rules
from checkmate.core.schedule import Schedule


def all_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every R with R[t, t] = 1 and nothing above the diagonal, with the least S for it; valid or not."""
    T = len(problem.graph.ops)
    below = np.tril_indices(T, -1)
    for runs in itertools.product((False, True), repeat=len(below[0])):
        R = np.eye(T, dtype=bool)
        R[below] = runs
        yield Schedule.from_runs(problem.graph, R)


_known: dict[int, tuple[Problem, list[tuple[float, int]]]] = {}  # many tests ask for the same drawn problems


def outcomes(problem: Problem) -> list[tuple[float, int]]:
    """The (cost in seconds, simulated peak in bytes) of every valid schedule."""
    if id(problem) not in _known:
        plans = (simulator.lower(problem, schedule) for schedule in all_schedules(problem))
        valid = (plan for plan in plans if not simulator.check_plan(plan, problem))
        found = [(simulator.cost(plan, problem), simulator.simulate(plan, problem).peak) for plan in valid]
        _known[id(problem)] = problem, found
    return _known[id(problem)][1]


def optimum(outcomes: list[tuple[float, int]], budget: int) -> float:
    """The least cost of a schedule that fits the budget; infinite if none does."""
    return min((cost for cost, peak in outcomes if peak <= budget), default=float("inf"))


def interesting_budgets(outcomes: list[tuple[float, int]]) -> list[int]:
    """The budgets at which the optimum changes, descending, and one byte below the smallest."""
    budgets = []
    best = float("inf")
    for peak, cost in sorted((peak, cost) for cost, peak in outcomes):
        if cost < best - 1e-12:
            best = cost
            budgets.append(peak)
    return [*reversed(budgets), budgets[0] - 1]


def optima(problem: Problem) -> list[tuple[int, float]]:
    """The interesting budgets of a problem, each with the least cost of a schedule that fits it."""
    known = outcomes(problem)
    return [(budget, optimum(known, budget)) for budget in interesting_budgets(known)]


Make = Callable[..., Problem]  # draws a problem by its seed


def drawn(make: Make, seeds: Iterable[int], *, larger: int = 1000) -> Iterator[Problem]:
    """Problems of at most four ops; each ``larger``th may have five."""
    return (make(seed, most_ops=4 if seed % larger else 5) for seed in seeds)


def best_within(problems: Iterable[Problem]) -> Iterator[tuple[Problem, int, float]]:
    """Each problem with each of its interesting budgets, and the least cost of a schedule that fits it."""
    return ((problem, budget, best) for problem in problems for budget, best in optima(problem))


def pinned(problem: Problem, *which: int) -> Problem:
    """The problem, these ops of which must not run again."""
    why = "draws random numbers"
    ops = tuple(replace(op, pinned=why) if k in which else op for k, op in enumerate(problem.graph.ops))
    return replace(problem, graph=replace(problem.graph, ops=ops))


@cache
def random_problem(seed: int, *, most_ops: int = 5) -> Problem:
    """A small problem with all that the model knows.

    Several outputs of an op, values that nobody reads, inputs that no op makes, several results, results that are read,
    workspace, pinned ops, resident bytes, and sizes of zero.
    """
    rng = np.random.default_rng(seed)
    T = int(rng.integers(3, most_ops + 1))
    values = [Value("x", int(rng.integers(1, 9)), None, "input")]
    ops: list[Op] = []
    for k in range(T):
        count = min(len(values), int(rng.integers(1, 4)))
        recent = {len(values) - 1} if rng.random() < 0.7 else set()
        inputs = tuple(sorted(recent | set(rng.choice(len(values), count, replace=False).tolist())))
        made = 1 + int(rng.random() < 0.35)
        outputs = tuple(range(len(values), len(values) + made))
        values += [Value(f"v{v}", int(rng.integers(0, 10)), k) for v in outputs]
        pinned = "draws random numbers" if rng.random() < 0.12 else None
        ops.append(Op(f"op{k}", "op", inputs, outputs, "forward" if k < T // 2 else "backward", pinned))
    made_values = np.arange(1, len(values))
    extra = rng.choice(made_values, int(rng.integers(0, 3)), replace=False).tolist()
    results = tuple(sorted({ops[-1].outputs[0], *extra}))
    seconds = rng.integers(1, 6, T).astype(float) if rng.random() < 0.5 else rng.random(T) + 0.1
    workspace = rng.integers(0, 5, T) * (rng.random(T) < 0.4)
    resident = int(rng.integers(0, 20)) if rng.random() < 0.5 else 0
    return Problem(Graph(tuple(ops), tuple(values), results), Profile(seconds, workspace, resident))


@cache
def random_problem_with_ways(seed: int, *, most_ops: int = 5) -> Problem:
    """A small problem, most ops of which may write over some input; a way may need more or less workspace."""
    problem, rng = random_problem(seed, most_ops=most_ops), np.random.default_rng((seed, 1))
    ops, values = problem.graph.ops, list(problem.graph.values)
    for k, op in enumerate(ops):
        mine = [v for v in op.inputs if values[v].producer is not None and v not in problem.graph.outputs]
        if mine and rng.random() < 0.8:
            size = values[int(rng.choice(mine))].size_bytes
            values[op.outputs[0]] = Value(f"v{op.outputs[0]}", size, k)
    graph = replace(problem.graph, values=tuple(values))
    ways = [
        InPlace(k, made, v, int(rng.integers(0, 5)) if rng.random() < 0.4 else int(problem.workspace[k]))
        for k, op in enumerate(ops)
        for v in op.inputs
        for made in op.outputs
        if values[v].producer is not None and v not in graph.outputs and values[made].size_bytes == values[v].size_bytes
    ]
    return replace(problem, graph=graph, profile=replace(problem.profile, ways=tuple(ways)))


@cache
def random_ruled_problem(seed: int, *, most_ops: int = 5) -> Problem:
    """A small problem most of which is forward, each op of it under a rule of its own or under none."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, most_ops=most_ops)
    ops, results = problem.graph.ops, set(problem.graph.outputs)
    forward = len(ops) - int(rng.integers(1, 3))
    ops = tuple(
        replace(op, tags=(f"tag{k}",), phase="forward" if k < forward else "backward") for k, op in enumerate(ops)
    )
    rules: dict[str, str | int] = {}
    for k, op in enumerate(ops[:forward]):
        ask = ["keep", "once", "recompute", "recompute", 2, 3][int(rng.integers(6))]
        if rng.random() < 0.6 and not (ask == "recompute" and (op.pinned or results.intersection(op.outputs))):
            rules[f"tag{k}"] = ask
    rules = rules or {"tag0": 2}
    return with_rules(replace(problem, graph=replace(problem.graph, ops=ops)), rules)


@cache
def random_problem_with_overwrites(seed: int, *, most_ops: int = 5) -> Problem:
    """A small problem, some later ops of which overwrite what earlier ones read; these make nothing, or something."""
    problem, rng = random_problem(seed, most_ops=most_ops), np.random.default_rng((seed, 2))
    ops, values = [*problem.graph.ops], list(problem.graph.values)
    for u in sorted(rng.choice(np.arange(1, len(ops)), int(rng.integers(1, 3)), replace=False).tolist()):
        p = len(values)
        values.append(Value(f"p{u}", 4, None, "parameter"))
        for k in {u, *rng.choice(len(ops), 2, replace=False).tolist(), int(rng.integers(u))}:
            ops[k] = replace(ops[k], inputs=(*ops[k].inputs, p))
        ops[u] = replace(ops[u], pinned=f"overwrites p{u}", overwrites=(p,))
    return replace(problem, graph=_without_outputs(replace(problem.graph, ops=tuple(ops), values=tuple(values)), rng))


def _without_outputs(graph: Graph, rng: np.random.Generator) -> Graph:
    """The graph, some of whose ops that overwrite something make nothing, as an update of a parameter does."""
    gone = {v for op in graph.ops if op.overwrites and rng.random() < 0.6 for v in op.outputs}
    gone -= set(graph.outputs[-1:])  # a step has a result
    kept = [v for v in range(len(graph.values)) if v not in gone]
    new = {v: i for i, v in enumerate(kept)}

    def renamed(vs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[v] for v in vs if v in new)

    ops = tuple(
        replace(op, inputs=renamed(op.inputs), outputs=renamed(op.outputs), overwrites=renamed(op.overwrites))
        for op in graph.ops
    )
    return Graph(ops, tuple(graph.values[v] for v in kept), renamed(graph.outputs))


PLAIN_AND_WAYS: list[Make] = [random_problem, random_problem_with_ways]
ALL_KINDS: list[Make] = [*PLAIN_AND_WAYS, random_problem_with_overwrites, random_ruled_problem]
