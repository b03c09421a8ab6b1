"""Cost against peak as a picture: a line of plans for each method, and the area proven empty."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.plot.style import BLUE, GREEN, LINES, MARKERS, ORANGE, PURPLE, RED, SKY, axes_of, units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from checkmate.solvers.frontier import Row


@dataclass(frozen=True)
class MethodLine:
    """The plans found by a method, as a line."""

    name: str
    label: str  # the name, and for how many budgets it has a plan if not for all
    points: list[tuple[int, float]]  # peak in bytes and seconds of the step, ascending


def by_method(rows: Iterable[Row]) -> list[MethodLine]:
    """Lines by method, in the order of the rows."""
    rows_of: dict[str, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row.method, []).append(row)
    lines = []
    for name, method_rows in rows_of.items():
        plans = [(row.peak, row.cost) for row in method_rows if row.peak is not None]
        label = name if len(plans) == len(method_rows) else f"{name} ({len(plans)} of {len(method_rows)} budgets)"
        lines.append(MethodLine(name, label, sorted(set(plans))))
    return lines


def proven_area(
    rows: list[Row], points: Iterable[tuple[float, float]]
) -> tuple[list[tuple[float, float]], float, float]:
    """The area proven to hold no schedule, in a picture of these points: peak in bytes and seconds of the step.

    It lies below a line of steps, of which this gives the corners, each up to its peak: at the best bound of any row
    whose budget is no smaller, beyond all budgets at the seconds of a step that runs each op once. Then come the lowest
    and the highest seconds of the picture.
    """
    base = rows[0].solution.problem.keep_all_cost
    budgets = sorted({row.budget for row in rows})
    bounds = [max(base, *(row.bound for row in rows if row.budget >= budget)) for budget in budgets]
    peaks, costs = zip(*(list(points) or [(budgets[-1], base)]), strict=True)
    highest = max([*costs, *filter(math.isfinite, bounds)])
    margin = 0.08 * (highest - base) or 0.05 * base or 1.0
    bottom, top = base - margin, highest + 2 * margin
    left, right = (f(*peaks, *budgets) for f in (min, max))
    room = 0.05 * (right - left) or 0.05 * right
    edges, heights = [left - room, *budgets, right + room], [bounds[0], *bounds, base]
    return [(edge, min(height, top)) for edge, height in zip(edges, heights, strict=True)], bottom, top


def frontier(rows: Iterable[Row], *, ax: Axes | None = None) -> Axes:
    """Draw seconds of the step against its peak, for each method; the shaded area is proven to have no schedule.

    Marks are plans. The thin steps between them say that a plan fits larger budgets too, not that others were looked
    for. Methods that have no plan for any of the budgets stand in the title of the legend.

    Raises:
        ValueError: if there is no row.
        ImportError: without Matplotlib.

    >>> import checkmate
    >>> problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1])
    >>> ax = frontier(checkmate.frontier(problem, [9, 12], jobs=1))
    >>> ax.get_legend_handles_labels()[1]
    ['auto', 'proven: no schedule is here']
    """
    rows = list(rows)
    if not rows:
        raise ValueError("There are no rows to draw.")
    ax = axes_of(ax, (8.5, 6))
    lines = by_method(rows)
    looks = zip(cycle((BLUE, RED, GREEN, PURPLE, ORANGE, "black", SKY)), cycle(MARKERS), cycle(("-", *LINES)))
    for method, (color, marker, style) in zip((line for line in lines if line.points), looks, strict=False):
        peaks, costs = zip(*method.points, strict=True)
        ax.step(peaks, costs, where="post", color=color, ls=style, lw=0.8, alpha=0.5)
        ax.plot(peaks, costs, color=color, ls="", marker=marker, ms=7, mfc="white", mew=1.6, label=method.label)
    # The area proven to have no schedule; the picture fits it and the lines.
    points = [point for line in ax.lines for point in np.asarray(line.get_xydata()).tolist()]
    corners, bottom, top = proven_area(rows, points)
    edges, heights = zip(*corners, strict=True)
    look: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": "#888888", "hatch": "////", "linewidth": 0.8}
    ax.fill_between(edges, bottom, heights, step="pre", label="proven: no schedule is here", zorder=0, **look)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(bottom, top))
    units(ax, x="B", y="s")
    # A second scale at the right: seconds relative to running each op once, if that takes any.
    base = rows[0].solution.problem.keep_all_cost
    if base > 0:
        there_and_back: Any = (lambda seconds: seconds / base - 1, lambda over: (1 + over) * base)
        right = ax.secondary_yaxis("right", functions=there_and_back)
        right.yaxis.set_major_formatter("{x:+.1%}")
        right.set_ylabel("recomputation")
    ax.set(xlabel="peak", ylabel="step", title="Cost against peak")
    none = [line.name for line in lines if not line.points]
    title = f"no plan within any of these budgets: {', '.join(none)}" if none else None
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, title=title)
    return ax
