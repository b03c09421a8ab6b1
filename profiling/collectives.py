"""What collectives take, by their bytes and ranks: from a latency and a rate, or off a table of measured ones.

    seconds = latency + traffic / rate
    traffic = bytes (n - 1) / n          of n ranks; twice that of an all-reduce, a reduce-scatter and an all-gather

The bytes are those of the whole: what an all-gather makes, what a reduce-scatter or an all-reduce reads. The traffic is
what each rank sends and receives in a ring, and the least that any algorithm moves (Patarasuk & Yuan, JPDC 2009).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from checkmate.profiling.data_sheets import Device

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)  # by PyTorch's names of the functional ones

# What all-reduces of 8 ranks reach of an H100's data sheet in Vidur's table (Agrawal et al., MLSys 2024);
# `benchmarks.sharded.collectives` holds it against those of 2 and of 4, and against others.
LATENCY, EFFICIENCY = 28e-6, 0.8

Point = tuple[float, float]  # bytes of the whole, and seconds


def traffic(collective: str, whole_bytes: float, ranks: int | None) -> float:
    """Bytes that each rank sends, and as many that it receives; of as many ranks as can be where that is not known.

    >>> traffic(ALL_GATHER, 800, 4), traffic(ALL_REDUCE, 800, 4), traffic(REDUCE_SCATTER, 800, None)
    (600.0, 1200.0, 800.0)
    """
    share = 1.0 if ranks is None else (ranks - 1) / ranks
    return (2 if collective == ALL_REDUCE else 1) * whole_bytes * share


@dataclass(frozen=True)
class Link:
    """What ranks reach of each other.

    >>> Link(latency=1e-5, rate=1e9).seconds(ALL_GATHER, 4_000_000, ranks=4)
    0.00301
    """

    latency: float  # seconds that each collective takes at least
    rate: float  # bytes per second that a rank sends, while it receives as many

    def seconds(self, collective: str, whole_bytes: float, ranks: int | None) -> float:
        """Seconds of one collective."""
        return self.latency + traffic(collective, whole_bytes, ranks) / self.rate


def link_of(device: Device) -> Link:
    """What devices of one kind reach of each other, by their data sheet.

    >>> from checkmate.profiling.data_sheets import DEVICES
    >>> round(link_of(DEVICES["h100"]).rate / 1e9)
    360
    """
    return Link(LATENCY, EFFICIENCY * device.link)


def fitted(collective: str, points: Sequence[Point], ranks: int) -> Link:
    """The latency and rate of which the squared errors, as shares of what was measured, are least.

    Raises:
        ValueError: if there are not two sizes, or larger ones do not take longer.

    >>> link = fitted(ALL_GATHER, [(2e6, 2e-3), (4e6, 3e-3), (8e6, 5e-3)], ranks=2)
    >>> round(link.latency, 6), round(link.rate)
    (0.001, 1000000000)
    """
    moved = np.array([traffic(collective, whole, ranks) for whole, _ in points])
    seconds = np.array([took for _, took in points])
    if len(set(moved)) < 2:
        raise ValueError(f"A latency and a rate follow from two sizes or more, not from {len(set(moved))}.")
    found = np.linalg.lstsq(np.stack([1 / seconds, moved / seconds], axis=1), np.ones(len(points)), rcond=None)[0]
    if found[0] < 0:  # a rate alone is nearest
        found = np.array([0.0, (moved / seconds).sum() / (moved**2 / seconds**2).sum()])
    if found[1] <= 0:
        raise ValueError("No rate explains collectives of which larger ones do not take longer.")
    return Link(float(found[0]), float(1 / found[1]))


def interpolated(points: Sequence[Point], whole_bytes: float) -> float:
    """Seconds by what was measured, on lines between neighbours, of which the last goes on.

    What is smaller than all that was measured takes as long as the smallest.

    Args:
        points: ascending, two at least.

    >>> points = [(1000, 1.0), (2000, 1.5), (4000, 2.5)]
    >>> [interpolated(points, whole) for whole in (10, 3000, 6000)]
    [1.0, 2.0, 3.5]
    """
    if whole_bytes <= points[0][0]:
        return points[0][1]
    i = min(bisect_right(points, whole_bytes, key=lambda point: point[0]), len(points) - 1)
    (low, short), (high, long) = points[i - 1], points[i]
    return short + (long - short) * (whole_bytes - low) / (high - low)


@dataclass(frozen=True)
class CollectiveTable:
    """What collectives of one process group took.

    >>> table = CollectiveTable(2, {ALL_GATHER: ((1000, 1.0), (2000, 1.5))})
    >>> table.seconds(ALL_GATHER, 1500), table.seconds(ALL_REDUCE, 1500)
    (1.25, None)
    """

    ranks: int
    points: Mapping[str, tuple[Point, ...]]  # by collective, each ascending

    def seconds(self, collective: str, whole_bytes: float) -> float | None:
        """Seconds of one collective, interpolated; None where none of its kind was measured."""
        points = self.points.get(collective, ())
        return interpolated(points, whole_bytes) if len(points) > 1 else None
