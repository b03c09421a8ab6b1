"""Optimal persistent checkpoints of chains, against all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from checkmate import Problem, Status
from checkmate.solvers.baselines.rotor import Chain, CostTable, measure, runs_of, segments_of
from checkmate.solvers.common.schedules import peak_of
from tests.solvers.checks import solve
from tests.solvers.steps import STEPS
from tests.support.sampling import in_turn

CHAINS = ("vgg", "resnet", "mobilenet", "gpt")


def strategies(s: int, t: int) -> Iterator[list[tuple[str, int]]]:
    """Every persistent schedule of segments s to t, as what it does: hold and let go are of what leaves a segment."""
    for inner in strategies(s + 1, t) if s < t else [[]]:
        yield [("keep", s), *inner, ("backward", s)]
    for r in range(s + 1, t + 1):
        for after in strategies(r, t):
            for again in strategies(s, r - 1):
                yield [*(("pass", k) for k in range(s, r)), ("hold", r - 1), *after, ("let go", r - 1), *again]


def outcome(chain: Chain, actions: list[tuple[str, int]]) -> tuple[float, int]:
    """Extra seconds and the peak of a strategy, followed step by step."""
    held: dict[int, int] = {}  # bytes of checkpoints and of what is kept, by the segment they leave or belong to
    kept: dict[int, int] = {}
    ran, done = set(), set()
    seconds, peak, last = 0.0, 0, len(chain) - 1
    for i, (what, k) in enumerate(actions):
        if what == "hold":
            held[k] = chain.output[k]
            continue
        if what == "let go":
            del held[k]
            continue
        if what == "backward":
            del kept[k]
            done.add(k)
            own, last = chain.always[k] + chain.backward_peak[k], k - 1
        else:
            times, peaks = (
                (chain.pass_seconds, chain.pass_peak) if what == "pass" else (chain.keep_seconds, chain.keep_peak)
            )
            seconds += times[k] if k in ran else 0.0
            ran.add(k)
            # what enters is counted here where it was just passed; else it is held, or belongs to what is kept
            follows = i > 0 and actions[i - 1] == ("pass", k - 1)
            own = peaks[k] + chain.always[last] + chain.gradient[last] + (chain.output[k - 1] if follows else 0)
        waiting = sum(chain.replay[j] for j in ran - set(kept) - done)
        peak = max(peak, sum(held.values()) + sum(kept.values()) + waiting + own)
        if what == "keep":
            kept[k] = chain.kept[k]
    return seconds, int(peak)


def random_segments(seed: int, length: int) -> Chain:
    rng = np.random.default_rng(seed)
    output, inner, gradient = (rng.integers(0, 6, length) for _ in range(3))
    passing = rng.integers(1, 6, length).astype(float)
    replay = rng.integers(0, 4, length) * (rng.random(length) < 0.4)
    return Chain(
        pass_seconds=passing,
        keep_seconds=passing + rng.integers(0, 3, length),
        output=output,
        kept=output + inner,
        gradient=gradient,
        pass_peak=output + rng.integers(0, 4, length),
        keep_peak=output + inner + rng.integers(0, 4, length),
        backward_peak=gradient + output + inner + rng.integers(0, 4, length),
        replay=replay,
        always=rng.integers(0, 9, length),
    )


@in_turn(seed=range(60))
def test_the_table_is_the_best_of_all_strategies(seed: int) -> None:
    length = 1 + seed % 5
    chain, slots = random_segments(seed, length), 60
    known = [outcome(chain, actions) for actions in strategies(0, length - 1)]
    table = CostTable.of(chain, 1, slots)
    for m in range(slots + 1):
        best = min((seconds for seconds, peak in known if peak <= m), default=np.inf)
        assert table.seconds[0, length - 1][m] == pytest.approx(best)
    assert sum(np.isfinite(table.seconds[0, length - 1])) > 0


@in_turn(seed=range(20))
def test_what_the_table_says_it_does_takes_the_seconds_it_says(seed: int) -> None:
    """Coarser slots round up: they take no fewer seconds."""
    chain = random_segments(seed, 6)
    table = CostTable.of(chain, 1, 60)
    for m in np.flatnonzero(np.isfinite(table.seconds[0, 5])):
        actions = [(what, k) for what, k in table.actions(0, len(table.chain) - 1, int(m)) if what != "backward"]
        again = [(what, k) for i, (what, k) in enumerate(actions) if k in {before for _, before in actions[:i]}]
        seconds = sum(chain.pass_seconds[k] if what == "pass" else chain.keep_seconds[k] for what, k in again)
        assert seconds == pytest.approx(table.seconds[0, 5][m])
    fine, coarse = table.seconds[0, 5], CostTable.of(chain, 7, 10).seconds[0, 5]
    assert all(coarse[m] >= fine[min(60, 7 * m)] for m in range(11))
    assert np.isfinite(coarse[-1])


@pytest.mark.parametrize("name", CHAINS)
def test_the_model_of_memory_is_close_to_the_simulator(name: str) -> None:
    """The chain's bytes of keeping all are at least those of the simulator, and at most seven percent more."""
    problem = STEPS[name]
    segments = segments_of(problem)
    unit = problem.keep_all_peak // 1000
    table = CostTable.of(measure(problem, segments), unit, 1100)
    least = int(np.argmax(table.seconds[0, len(segments) - 1] == 0.0))
    R = runs_of(problem, segments, table.actions(0, len(segments) - 1, least))
    assert (R == np.eye(len(R), dtype=bool)).all()
    assert problem.keep_all_peak == peak_of(problem, R) <= least * unit <= 1.07 * problem.keep_all_peak
    assert measure(problem, segments).replay.any() or name != "gpt"  # the bytes of pinned ops are counted


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("fine", [False, True])
def test_what_a_segment_reads_enters_it_or_is_at_hand_anyway(name: str, fine: bool) -> None:
    problem = STEPS[name]
    graph, segments = problem.graph, segments_of(problem, fine=fine)
    assert [k for s in segments for k in s.forward] == list(range(graph.forward_length))
    assert [k for s in reversed(segments) for k in s.backward] == list(range(graph.forward_length, len(graph.ops)))
    anyway = {*graph.outputs, *(v for op in graph.ops if op.pinned for v in op.outputs)}
    for enters, segment in zip([None, *(s.leaves for s in segments)], segments, strict=False):
        made = {v for k in segment.forward for v in graph.ops[k].outputs}
        allowed = made | anyway | {enters}
        assert all(v in allowed for k in segment.forward for v in graph.ops[k].inputs)
        late = {v for k in segment.backward for v in graph.ops[k].inputs}
        assert {v for v in late if graph.values[v].producer < graph.forward_length} <= allowed


APPLIES_NOT: dict[str, tuple[list[list[int]], int | None, str]] = {
    # each op reads all before it, so that nothing flows through one value
    "the forward is no chain": ([[], [0], [0, 1], [0, 1, 2], [0, 3], [1, 4], [2, 5]], 4, "does not apply: "),
    "there is no backward": ([[], [0], [0, 1]], None, "does not apply: "),
    "the backward runs in another order": ([[], [0], [1], [2], [0], [2, 3, 4]], 4, "op5 of the backward reads v"),
}


@pytest.mark.parametrize("case", APPLIES_NOT)
def test_where_it_does_not_apply_it_says_so(case: str) -> None:
    deps, forward, says = APPLIES_NOT[case]
    problem = Problem.from_dag(deps, seconds=[1] * len(deps), sizes=[1] * len(deps), forward=forward)
    solution = solve("rotor", problem, problem.keep_all_peak - 1)
    assert solution.status is Status.NOT_FOUND
    assert solution.message.startswith("does not apply: ")
    assert says in solution.message
