"""What collectives cost: by hand, by what others measured, and off a table."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.sharded.graph import fitted, table
from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.profiling.mesh import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    REDUCE_SCATTER,
    Link,
    interpolated,
    link_of,
    traffic,
)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (1, 2, 8, 64, None):
        both = traffic(REDUCE_SCATTER, 1e9, ranks) + traffic(ALL_GATHER, 1e9, ranks)
        assert traffic(ALL_REDUCE, 1e9, ranks) == both
    assert traffic(ALL_REDUCE, 1e9, 1) == 0
    assert traffic(ALL_GATHER, 1e9, None) >= traffic(ALL_GATHER, 1e9, 10**6)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("latency", [0.0, 3e-5])
def test_a_fit_finds_the_link_that_made_the_points(collective: str, latency: float) -> None:
    link = Link(latency, 2e10)
    points = [(2.0**n, link.seconds(collective, 2.0**n, 4)) for n in range(12, 28, 3)]
    found = fitted(collective, points, 4)
    assert found.rate == pytest.approx(link.rate, rel=1e-6)
    assert found.latency == pytest.approx(latency, abs=1e-12)


def test_a_fit_has_no_latency_below_zero() -> None:
    """Seconds that grow faster than bytes: a line through them would begin below zero."""
    found = fitted(ALL_GATHER, [(1e6, 1e-4), (2e6, 4e-4), (4e6, 1.6e-3)], 2)
    assert found.latency == 0.0
    assert found.rate > 0


@pytest.mark.parametrize("points", [[(1e6, 1e-3)], [(1e6, 1e-3), (1e6, 2e-3)], [(1e6, 2e-3), (2e6, 1e-3)]])
def test_what_no_link_explains_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="rate"):
        fitted(ALL_GATHER, points, 2)


def test_a_table_gives_back_its_points_and_lines_between() -> None:
    points = table("colls8_8")["1", 8][ALL_GATHER]
    for (low, short), (high, long) in itertools.pairwise(points):
        assert interpolated(points, low) == pytest.approx(short)
        assert interpolated(points, (low + high) / 2) == pytest.approx((short + long) / 2)
    assert interpolated(points, points[0][0] / 8) == points[0][1]
    (_, before), (last, took) = points[-2:]
    assert interpolated(points, 1.5 * last) == pytest.approx(took + (took - before))


def test_an_estimate_for_nvlink_is_near_what_others_have() -> None:
    """All-gathers of 8 ranks of a node, of 8 MiB and more: no constant was set by them."""
    link = link_of(DEVICES["h100"])
    for whole, seconds in table("colls8_8")["1", 8][ALL_GATHER]:
        assert link.seconds(ALL_GATHER, whole, 8) == pytest.approx(seconds, rel=0.05)


def test_a_device_has_a_link() -> None:
    assert link_of(DEVICES["a100"]).rate < link_of(DEVICES["h100"]).rate
    with pytest.raises(ValueError, match="positive"):
        Device("none", {"float32": 1.0}, 1.0, 0.0, link=0.0)
