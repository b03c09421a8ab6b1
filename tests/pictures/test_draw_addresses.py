"""The picture of addresses: a box for each copy of a value, from when it is made to when it goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import checkmate
from checkmate import Problem

matplotlib: Any = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt: Any = pytest.importorskip("matplotlib.pyplot")


def test_each_box_is_where_it_is_placed() -> None:
    problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[128, 256, 256, 64])
    placed = checkmate.addresses(checkmate.solve(problem, "1 kB"))
    ax = checkmate.plot.addresses(placed)
    ax.figure.canvas.draw()
    drawn = [path.get_extents().extents.tolist() for boxes in ax.collections for path in boxes.get_paths()]
    expected = [[box.first, box.offset, box.last + 1, box.offset + box.bytes] for box in placed.boxes]
    assert sorted(drawn) == sorted(np.array(expected, dtype=float).tolist())
    assert ax.get_ylim()[1] >= placed.height
    plt.close("all")


def test_a_gap_is_in_the_title_and_nothing_is_refused() -> None:
    box = checkmate.addresses(checkmate.solve(Problem.from_dag([[]], seconds=[1], sizes=[64]), 64)).boxes[0]
    ax = checkmate.plot.addresses(checkmate.Addresses((box,), height=100, bound=90))
    assert ax.get_title() == "An arena of 100 B, at most 10.00% could be saved"
    plt.close("all")
    with pytest.raises(ValueError, match="nothing to draw"):
        checkmate.plot.addresses(checkmate.Addresses((), height=0, bound=0))
