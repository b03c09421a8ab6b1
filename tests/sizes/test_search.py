"""The largest size, against trying each one by brute force."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from benchmarks.networks.dags import unit_chain
from checkmate import Problem
from checkmate.sizes.search import KEEP_ALL, ONE_FORWARD, Attempt, SizeSearch, most_seconds, spread_sizes
from tests.sizes.test_sized_steps import grown
from tests.support.oracle import optimum, outcomes, random_problem
from tests.support.sampling import in_turn, long

BASE = random_problem(4, most_ops=4)


def _search_sizes(trace: Callable[[int], Problem], budget: int, **options: object) -> SizeSearch:
    settings = {"max_overhead": ONE_FORWARD, "largest": 1000, "try_seconds": 2.0}
    return SizeSearch(trace, budget, deadline=time.perf_counter() + 60, **{**settings, **options})


def _fits(problem: Problem, budget: int, overhead: float | str | None) -> bool:
    return optimum(outcomes(problem), budget) <= min(most_seconds(problem, overhead), 1e300)


@in_turn(seed=[*range(5), *map(long, range(5, 12))], overhead=[None, ONE_FORWARD, 0.1])
def test_it_is_the_largest_by_brute_force(seed: int, overhead: float | str | None) -> None:
    base = random_problem(seed, most_ops=4)
    budget = grown(base, 9, block=4).keep_all_peak
    search = _search_sizes(lambda n: grown(base, n, block=4), budget, max_overhead=overhead, largest=60)
    answer = search.run()
    assert answer.solution.peak <= budget
    assert _fits(grown(base, answer.size, block=4), budget, overhead)
    if answer.size < 60:
        assert not _fits(grown(base, answer.size + 1, block=4), budget, overhead)
        assert search.high.size == answer.size + 1
        assert search.high.refuted


@in_turn(to=[2, 8, 50])
def test_padding_is_climbed(to: int) -> None:
    """A step that pads what it gets to a multiple: its memory is a staircase."""
    trace = lambda n: grown(BASE, -(-n // to) * to)  # noqa: E731
    budget = trace(2 * to).keep_all_peak
    kept = _search_sizes(trace, budget, method=KEEP_ALL, max_overhead=0.0).run()
    assert kept.size == 2 * to
    search = _search_sizes(trace, budget)
    answer = search.run()
    assert answer.size % to == 0
    assert _fits(trace(answer.size), budget, ONE_FORWARD)
    assert not _fits(trace(answer.size + 1), budget, ONE_FORWARD)


def test_a_size_that_bends_upwards_is_found_all_the_same() -> None:
    """Memory that grows with the square, as that of attention does: a line through small sizes is far too low."""
    seen: list[Attempt] = []
    budget = grown(BASE, 300 * 300).keep_all_peak
    search = _search_sizes(lambda n: grown(BASE, n * n), budget, method=KEEP_ALL, report=seen.append)
    assert search.run().size == 300
    assert len(seen) <= 12


def test_few_sizes_are_tried_where_memory_is_on_a_line() -> None:
    seen: list[Attempt] = []
    budget = grown(BASE, 777, block=4).keep_all_peak
    search = _search_sizes(lambda n: grown(BASE, n, block=4), budget, method=KEEP_ALL, report=seen.append)
    assert search.run().size == 777
    assert search.high.size == 778
    assert len(seen) <= 6


def test_the_graph_may_change_with_the_size_and_what_never_grows_ends_at_the_largest() -> None:
    def trace(n: int) -> Problem:
        return Problem.from_dag([[k - 1] if k else [] for k in range(n)], [1] * n, [4] * n, outputs=range(n))

    search = _search_sizes(trace, 100)
    assert search.run().size == 25
    assert search.high.size == 26
    search = _search_sizes(lambda n: Problem.from_dag([[]], [1], [4]), 100, largest=700)
    assert search.run().size == 700
    assert search.high is None


def test_it_begins_at_the_smallest_and_says_if_that_does_not_fit() -> None:
    def trace(n: int) -> Problem:
        assert n >= 5
        return Problem.from_dag([[]], [1], [4 * n])

    assert _search_sizes(trace, 40, smallest=5).run().size == 10
    search = _search_sizes(trace, 19, smallest=5)
    assert search.run() is None
    assert search.high.refuted


def test_without_time_there_is_still_an_answer() -> None:
    budget = grown(BASE, 9).keep_all_peak
    search = SizeSearch(lambda n: grown(BASE, n), budget, None, deadline=0.0, try_seconds=1.0, largest=100)
    assert search.run().size == 1


@pytest.mark.slow
def test_other_methods_answer_with_their_own_plans() -> None:
    """None of them beats the largest by all methods, and each is under the cap."""
    base = unit_chain(8)
    budget = grown(base, 6).keep_all_peak
    sizes = {}
    for method in ("auto", KEEP_ALL, "chen-sqrt", "ap-greedy"):
        search = _search_sizes(lambda n: grown(base, n), budget, method=method, try_seconds=0.5)
        answer = search.run()
        assert answer.solution.method in (method, KEEP_ALL)
        assert answer.solution.cost <= answer.cap * (1 + 1e-9)
        sizes[method] = answer.size
    assert sizes[KEEP_ALL] == 6
    assert max(sizes.values()) == sizes["auto"] > 6


def test_every_attempt_is_reported() -> None:
    seen: list[Attempt] = []
    search = _search_sizes(lambda n: grown(BASE, n), grown(BASE, 9).keep_all_peak, report=seen.append)
    answer = search.run()
    assert answer in seen
    assert search.high in seen


def test_a_curve_has_both_ends() -> None:
    assert spread_sizes(1, 16, 16, 4) == [4, 8, 16]
    assert spread_sizes(1, 0, 9, 2) == [1, 5, 9]
    assert spread_sizes(7, 8, 10, 1) == [7, 8, 10]
