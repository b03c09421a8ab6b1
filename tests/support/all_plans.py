"""The truth on tiny problems, also with a second memory or with links: the cheapest of all plans there are.

A search over states: which op runs for the first time next, what is at hand, what has a copy in the second memory, what
is under way, and when that and the links' last transfers end. From each state every legal step is taken: `Run` of the
next op or of an earlier one again, over a value or not, `Start`, `Free`, `Send`, `Fetch`, `Wait`, `Drop`. Ops may run
again in any order and any number of times, which schedules by stages do not do.

Left out is only what cannot help, each by an exchange of steps: to wait for a transfer or for an op on a link that has
ended is free and forbids nothing, so it is done at once; a value that no op can read any more is let go of at once, and
not sent or fetched; copies left at the end are dropped there. What is at home there begins there, and ends there and
current; what is kept begins and ends here as well. Of two ways to one state, the one that is later in every
clock is dropped, since the clocks only take maxima and sums of each other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from checkmate.core.graph import Graph, Op, Phase, Value
from checkmate.core.host import Host
from checkmate.core.limits import lives
from checkmate.core.plan import Drop, Fetch, Free, Plan, Run, Send, Start, Step, Wait
from checkmate.core.problem import Problem, Profile
from tests.support.oracle import (
    optima,
    random_problem,
    random_problem_with_overwrites,
    random_problem_with_ways,
)

Label = tuple[float, ...]  # now, each link's end, and the end of each transfer under way, by value


@dataclass(frozen=True)
class State:
    """Everything but the clocks."""

    turn: int = 0  # the op that runs for the first time next
    backward: bool = False  # the backward has begun
    here: frozenset[int] = frozenset()  # at hand
    there: frozenset[int] = frozenset()  # copies, complete or not
    sending: frozenset[int] = frozenset()
    fetching: frozenset[int] = frozenset()
    started: frozenset[int] = frozenset()  # ops on links
    runs: tuple[int, ...] = ()  # of the ops that a rule limits

    @property
    def going(self) -> list[int]:
        return sorted(self.sending | self.fetching)


@dataclass(frozen=True)
class Clocks:
    now: float
    busy: tuple[float, ...]  # where the last transfer there and back ends, alike on one link; the last op of each link
    ends: tuple[tuple[int, float], ...] = ()  # of each transfer under way, by value; of a started op k, by -1 - k

    def label(self) -> Label:
        return (self.now, *(max(self.now, end) for end in self.busy), *(end for _, end in self.ends))


Move = tuple[tuple[Step | None, ...], State, Clocks]  # None: the backward begins


def cheapest_plan(problem: Problem, budget: int, *, most_states: int = 10**7) -> tuple[float, Plan | None]:
    """The seconds of the cheapest plan within both budgets, infinite without one, and the plan.

    Raises:
        RuntimeError: if there are more states than that.
    """
    search = Moves(problem, budget)
    T, count = len(problem.graph.ops), itertools.count()
    seconds = np.where([op.link == "" for op in problem.graph.ops], problem.seconds, 0.0)
    left = [*np.cumsum(seconds[::-1])[::-1].tolist(), 0.0]  # seconds that the first runs of later ops take
    start = State(here=problem.kept, there=problem.homes, runs=(0,) * len(search.limited))
    clocks = Clocks(0, (0.0,) * (2 + len(problem.graph.links)))
    heap: list[tuple[float, int, int, State, Clocks, int]] = [(left[0], 0, next(count), start, clocks, -1)]
    labels: dict[State, list[Label]] = {start: [heap[0][4].label()]}
    history: list[tuple[int, tuple[Step | None, ...]]] = []  # (parent, steps) of each move
    while heap and problem.begin_bytes <= budget:
        _, _, _, state, clocks, origin = heapq.heappop(heap)
        if any(_earlier(other, clocks.label()) for other in labels[state] if other != clocks.label()):
            continue
        ended = state.turn == T and not state.going and not state.started and search.results <= state.here
        if ended and problem.homes <= state.there and problem.homes & state.here == problem.kept:
            return clocks.now, _plan(problem, history, origin, state)
        for steps, following, after in search.of(state, clocks):
            label = after.label()
            known = labels.setdefault(following, [])
            if any(_earlier(other, label) for other in known):
                continue
            known[:] = [other for other in known if not _earlier(label, other)] + [label]
            history.append((origin, steps))
            if len(history) > most_states:
                raise RuntimeError(f"more than {most_states} states")
            entry = (after.now + left[following.turn], -following.turn, next(count), following, after, len(history) - 1)
            heapq.heappush(heap, entry)
    return float("inf"), None


def smallest_peak(problem: Problem) -> int:
    """The smallest peak of all plans."""
    low = int(problem.unavoidable_bytes.max())
    return next(budget for budget in itertools.count(low) if cheapest_plan(problem, budget)[1] is not None)


def fastest(problem: Problem) -> list[tuple[int, float]]:
    """The interesting budgets of a problem, each with the least seconds of a plan of any order that fits it.

    Where a schedule fits, the best of them has these seconds in all problems that were tried (`test_every_plan`).
    """
    return [
        (budget, best if best < float("inf") else cheapest_plan(problem, budget)[0]) for budget, best in optima(problem)
    ]


def is_a_schedule(plan: Plan) -> bool:
    """Whether R can say what runs: in each stage, up to an op's first run, each op at most once, in their order."""
    turn, before = 0, -1
    for k in plan.runs:
        if k <= before:
            return False
        turn, before = (turn + 1, -1) if k == turn else (turn, k)
    return True


class Moves:
    """The steps that are legal in a state."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget, self.host = problem, budget, problem.host
        graph, self.limits = problem.graph, problem.limits
        self.limited = [*self.limits.max_runs]
        self.homes, self.kept = problem.homes, problem.kept
        made = {v for v, value in enumerate(graph.values) if value.producer is not None}
        self.results = frozenset(made.intersection(graph.outputs))
        self.inputs = [made.union(self.homes).intersection(op.inputs) for op in graph.ops]
        self.size = problem.sizes.tolist()
        self.read = lives(graph, self.limits.last_stage)[1]
        self.savings = [dict(of) for of in problem.savings]
        self.has_backward = graph.forward_length < len(graph.ops)
        self.links = {name: 2 + i for i, name in enumerate(graph.links)}
        self.touches = [frozenset((*op.inputs, *op.outputs)) for op in graph.ops]

    def of(self, state: State, clocks: Clocks) -> Iterator[Move]:
        for steps, following, after in self._single(state, clocks):
            yield self._tidied((steps,), following, after)

    def _tidied(self, steps: tuple[Step | None, ...], state: State, clocks: Clocks) -> Move:
        for v, end in clocks.ends:
            if end <= clocks.now and (v >= 0 or -1 - v < state.turn):
                step = Wait(v) if v >= 0 else Run(-1 - v)
                steps, state, clocks = (*steps, step), *self._waited(state, clocks, v)
        for v in self._may_go(state) - self.kept:
            if self.read[v] < state.turn:
                steps, state = (*steps, Free(v)), replace(state, here=state.here - {v})
        return steps, state, clocks

    def _single(self, state: State, clocks: Clocks) -> Iterator[tuple[Step | None, State, Clocks]]:
        live = self.problem.resident + sum(self.size[v] for v in state.here | state.fetching)
        live += sum(self._held(k) for k in state.started)
        may_begin = self.has_backward and state.turn >= self.problem.graph.forward_length
        if may_begin and not state.backward and not self.limits.recomputed & state.here and not state.started:
            yield None, replace(state, backward=True), clocks
        for k in range(min(state.turn + 1, len(self.inputs))):
            if self._may_run(state, k):
                for over in (None, *self.savings[k]):
                    yield from self._run(state, clocks, k, over, live)
        for k, op in enumerate(self.problem.graph.ops):
            if op.link and k not in state.started:
                yield from self._start(state, clocks, k, live)
            if k in state.started and k < state.turn:
                yield Run(k), *self._waited(state, clocks, -1 - k)
        for v in self._may_go(state):
            yield Free(v), replace(state, here=state.here - {v}), clocks
        for v in state.going:
            yield Wait(v), *self._waited(state, clocks, v)
        if self.host is not None:
            yield from self._transfers(state, clocks, live, self.host)

    def _may_go(self, state: State) -> frozenset[int]:
        """Values that may be freed: at hand, no results, on no link, and current at home if they have one there."""
        return state.here - self.results - state.sending - self._busy(state) - (self.homes - state.there)

    def _may_run(self, state: State, k: int) -> bool:
        op = self.problem.graph.ops[k]
        if k in state.started:
            return False
        if k < state.turn:
            most = dict(zip(self.limited, state.runs, strict=True)).get(k, 0) < self.limits.max_runs.get(k, 1)
            return op.pinned is None and most and state.turn <= self.limits.last_stage.get(k, state.turn)
        return (op.phase == "backward") == state.backward

    def _run(
        self, state: State, clocks: Clocks, k: int, over: int | None, live: int
    ) -> Iterator[tuple[Step | None, State, Clocks]]:
        going = state.sending | state.fetching
        made = self.problem.graph.ops[k].outputs
        new = sum(self.size[v] for v in made) + int(self.problem.workspace[k])
        new -= 0 if over is None else self.savings[k][over]
        if not self.inputs[k] <= state.here or going.intersection(made) or over in going or live + new > self.budget:
            return
        changed = self.problem.graph.ops[k].overwrites
        if self._busy(state).intersection((*made, *changed, over)) or going.intersection(changed):
            return
        following, after, end = self._begun(state, clocks, k)
        following = replace(following, here=state.here.union(made) - {over}, there=state.there.difference(changed))
        yield Run(k, over), following, replace(after, now=end)

    def _start(self, state: State, clocks: Clocks, k: int, live: int) -> Iterator[tuple[Step | None, State, Clocks]]:
        op = self.problem.graph.ops[k]
        if k > state.turn:  # before its turn
            may = not self.inputs[k] and (op.phase == "backward") == state.backward
        else:
            may = self._may_run(state, k)
        touched = self._busy(state).union(state.sending, state.fetching).intersection(op.outputs)
        if not may or not self.inputs[k] <= state.here or touched or state.here.intersection(op.outputs):
            return
        if live + self._held(k) > self.budget:
            return
        following, after, end = self._begun(replace(state, started=state.started | {k}), clocks, k)
        yield Start(k), following, replace(after, ends=tuple(sorted((*clocks.ends, (-1 - k, end)))))

    def _begun(self, state: State, clocks: Clocks, k: int) -> tuple[State, Clocks, float]:
        """Count a run, and pass the turn on; the clocks of the links, and when the op ends."""
        turn = state.turn + (k == state.turn)
        while turn in state.started:
            turn += 1
        runs = tuple(n + (k == op) for op, n in zip(self.limited, state.runs, strict=True))
        link = self.links.get(self.problem.graph.ops[k].link)
        begin = clocks.now if link is None else max(clocks.now, clocks.busy[link])
        end = begin + float(self.problem.seconds[k])
        busy = tuple(end if i == link else other for i, other in enumerate(clocks.busy))
        return replace(state, turn=turn, runs=runs), replace(clocks, busy=busy), end

    def _held(self, k: int) -> int:
        return sum(self.size[v] for v in self.problem.graph.ops[k].outputs) + int(self.problem.workspace[k])

    def _busy(self, state: State) -> frozenset[int]:
        """Values that ops on links read and make."""
        return frozenset().union(*(self.touches[k] for k in state.started))

    def _waited(self, state: State, clocks: Clocks, v: int) -> tuple[State, Clocks]:
        here = state.here.union({v} & state.fetching if v >= 0 else self.problem.graph.ops[-1 - v].outputs)
        after = replace(state, here=here, sending=state.sending - {v}, fetching=state.fetching - {v})
        after = replace(after, started=state.started - {-1 - v})
        now = max(clocks.now, dict(clocks.ends)[v])
        return after, replace(clocks, now=now, ends=tuple((w, end) for w, end in clocks.ends if w != v))

    def _transfers(
        self, state: State, clocks: Clocks, live: int, host: Host
    ) -> Iterator[tuple[Step | None, State, Clocks]]:
        going = state.sending | state.fetching
        room = host.budget - sum(self.size[v] for v in state.there | self.homes)
        for v in state.here - state.there - going - self.results - self.limits.recomputed:
            if v in self.homes or (self.size[v] <= room and self.read[v] >= state.turn):
                following = replace(state, there=state.there | {v}, sending=state.sending | {v})
                yield Send(v), following, _on_link(clocks, v, host.seconds_to_send(self.size[v]), 0, host)
        for v in state.there - state.here - going:
            if live + self.size[v] <= self.budget and (self.read[v] >= state.turn or v in self.kept):
                following = replace(state, fetching=state.fetching | {v})
                yield Fetch(v), following, _on_link(clocks, v, host.seconds_to_fetch(self.size[v]), 1, host)
        for v in state.there - going - self.homes:
            yield Drop(v), replace(state, there=state.there - {v}), clocks


def _on_link(clocks: Clocks, v: int, seconds: float, link: int, host: Host) -> Clocks:
    end = max(clocks.now, clocks.busy[link]) + seconds
    there_and_back = (end, end) if host.one_link else ((end, clocks.busy[1]) if link == 0 else (clocks.busy[0], end))
    busy = (*there_and_back, *clocks.busy[2:])
    return replace(clocks, busy=busy, ends=tuple(sorted((*clocks.ends, (v, end)))))


def _earlier(one: Label, other: Label) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def _plan(problem: Problem, history: list[tuple[int, tuple[Step | None, ...]]], at: int, end: State) -> Plan:
    parts = []
    while at >= 0:
        at, steps = history[at]
        parts.append(steps)
    found = [step for steps in reversed(parts) for step in steps] + [Drop(v) for v in sorted(end.there - problem.homes)]
    boundary = found.index(None) if None in found else len(found)
    return Plan(tuple(step for step in found if step is not None), boundary)


def random_dag(seed: int, *, ops: int = 5) -> Problem:
    """A small problem of nothing but ops and values, each op reading one or two of the earlier ones."""
    rng = np.random.default_rng((seed, 6))
    later = [rng.choice(k, int(rng.integers(1, min(k, 2) + 1)), replace=False).tolist() for k in range(1, ops)]
    deps: list[list[int]] = [[], *later]
    return Problem.from_dag(deps, rng.integers(1, 4, ops).tolist(), rng.integers(1, 6, ops).tolist(), [ops - 1])


def random_problem_with_host(seed: int, *, most_ops: int = 5) -> Problem:
    """A small problem of any kind beside a second memory: slow or fast, large or small, with one link or two."""
    rng = np.random.default_rng((seed, 3))
    kinds = (random_problem, random_problem, random_problem_with_ways, random_problem_with_overwrites)
    problem = kinds[int(rng.integers(4))](seed, most_ops=most_ops)
    return problem.with_host(_host(rng, rooms=[4, 10, 100], speeds=[1.0, 2.0, 4.0, 8.0, 32.0]))


def random_problem_with_homes(seed: int, *, most_ops: int = 4) -> Problem:
    """A small step that updates some of its parameters; most are at home in a second memory, and some of these kept."""
    rng = np.random.default_rng((seed, 12))
    problem = random_problem_with_overwrites(seed, most_ops=most_ops)
    given = [v for v, value in enumerate(problem.graph.values) if value.producer is None]
    values = list(problem.graph.values)
    for v in given:
        values[v] = replace(values[v], size_bytes=int(rng.integers(1, 8)))
    homes = [v for v in given if rng.random() < 0.75] or given[-1:]
    resident = problem.resident + sum(values[v].size_bytes for v in given)
    profile = replace(problem.profile, resident_bytes=resident)
    problem = replace(problem, graph=replace(problem.graph, values=tuple(values)), profile=profile)
    least = sum(values[v].size_bytes for v in homes)
    host = _host(rng, rooms=[least, least + 6, least + 100], speeds=[1.0, 2.0, 4.0, 8.0])
    return problem.with_host(host).with_homes(homes, [v for v in homes if rng.random() < 0.3])


def _host(rng: np.random.Generator, *, rooms: list[int], speeds: list[float]) -> Host:
    room, send, fetch = int(rng.choice(rooms)), float(rng.choice(speeds)), float(rng.choice(speeds))
    latency = float(rng.choice([0.0, 0.0, 0.25]))
    return Host(room, send, fetch, one_link=bool(rng.random() < 0.3), latency=latency)


def random_chain_with_host(seed: int, *, most_ops: int = 7) -> Problem:
    """A small training step beside a second memory: layers, and gradients that read what they made; where it pays."""
    rng = np.random.default_rng((seed, 4))
    T = int(rng.integers(5, most_ops + 1))
    forward = (T + 1) // 2
    deps: list[list[int]] = [[k - 1] if k else [] for k in range(T)]
    for k in range(forward, T):
        deps[k] = sorted({k - 1, T - 1 - k})
        if rng.random() < 0.3:
            deps[k] = sorted({*deps[k], int(rng.integers(forward))})
    sizes = rng.integers(1, 10, T)
    sizes[forward:] = rng.integers(1, 6, T - forward)
    workspace = rng.integers(0, 4, T) * (rng.random(T) < 0.3)
    results = sorted({T - 1, *(rng.choice(np.arange(forward, T), 1).tolist() if rng.random() < 0.3 else [])})
    problem = Problem.from_dag(
        deps, rng.integers(1, 6, T).tolist(), sizes.tolist(), results, workspace.tolist(), forward=forward
    )
    return problem.with_host(_host(rng, rooms=[6, 12, 100], speeds=[1.0, 2.0, 4.0, 8.0]))


def added(ops: list[Op], values: list[Value], name: str, reads: list[int], size: int, phase: Phase, link: str) -> int:
    """The value of a new op; sums over ranks run once."""
    values.append(Value(f"{name}'s", size, len(ops)))
    pinned = "sums over ranks" if name.startswith("sum") else None
    ops.append(Op(name, name, tuple(reads), (len(values) - 1,), phase, pinned, link=link))
    return len(values) - 1


def random_chain_with_links(seed: int, *, most_layers: int = 2) -> Problem:
    """A small training step whose parameters are gathered from other ranks, and whose gradients are summed over them.

    Layers read what the one before made and a gathered parameter; the backward reads both, gathered once or again. One
    link carries all, or a link gathers and another one sums.
    """
    rng = np.random.default_rng((seed, 7))
    ops: list[Op] = []
    values: list[Value] = []
    seconds: list[float] = []

    def add(name: str, reads: list[int], size: int, phase: Phase, link: str = "") -> int:
        seconds.append(float(rng.integers(1, 6)))
        return added(ops, values, name, reads, size, phase, link)

    layers = int(rng.integers(1, most_layers + 1))
    values += [Value(f"shard{i}", 1, None, "parameter") for i in range(layers)]
    summing = "sums" if rng.random() < 0.3 else "gathers"
    made, gathered = list[int](), list[int]()
    for i in range(layers):
        gathered.append(add(f"gather{i}", [i], int(rng.integers(1, 8)), "forward", "gathers"))
        made.append(add(f"layer{i}", [*made[-1:], gathered[-1]], int(rng.integers(1, 8)), "forward"))
    gradient, results = made[-1], list[int]()
    for i in reversed(range(layers)):
        read = {gradient, *(made[i - 1 : i] if i else ()), *((gathered[i],) if rng.random() < 0.8 else ())}
        gradient = add(f"gradient{i}", sorted(read), int(rng.integers(1, 8)), "backward")
        results.append(add(f"sum{i}", [gradient], int(rng.integers(1, 4)), "backward", summing))
    if rng.random() < 0.4:  # what takes no time, as to hand something over, and may want it made again at the very end
        results.append(add("hand over", [int(rng.choice(made))], 1, "backward"))
        seconds[-1] = 0.0
    graph = Graph(tuple(ops), tuple(values), tuple(results))
    workspace = rng.integers(0, 3, len(ops)) * (rng.random(len(ops)) < 0.3)
    return Problem(graph, Profile(np.array(seconds), workspace))


def random_chain_split_over_ranks(seed: int) -> Problem:
    """A small training step of layers that are split over ranks: what each makes is summed before the next reads it."""
    rng = np.random.default_rng((seed, 11))
    ops: list[Op] = []
    values = [Value("batch", 1, None, "input")]

    def add(name: str, reads: list[int], phase: Phase) -> int:
        link = "ranks" if name.startswith("sum") else ""
        return added(ops, values, name, reads, int(rng.integers(1, 8)), phase, link)

    made = [0]
    layers = int(rng.integers(1, 3))
    for i in range(layers):
        made.append(add(f"sum{i}", [add(f"layer{i}", made[-1:], "forward")], "forward"))
    gradient, results = made.pop(), list[int]()
    for i in reversed(range(layers)):
        of_input = add(f"of_input{i}", [gradient], "backward")
        summed = add(f"sum_back{i}", [of_input], "backward")
        results.append(add(f"of_weight{i}", [gradient, made[i]], "backward"))
        gradient = summed
    graph = Graph(tuple(ops), tuple(values), (*results, gradient))
    return Problem(graph, Profile(rng.integers(1, 6, len(ops)).astype(float), [0] * len(ops)))
