"""A schedule as a picture: which ops run in each stage (R), and which values stay from stage to stage (S)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.core.solution import Solution, check_plan
from checkmate.plot.style import RED, axes_of, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 1000  # of a schedule's side: beyond it cells are averaged
NAMED = 30  # ops up to which axes bear their names
LEGEND_SIZE = 45  # square points of the marks in the legend


def schedule(solution: Solution, *, ax: Axes | None = None) -> Axes:
    """Draw R and S as a triangle: a row for each stage, a column for each op.

    Filled squares are first executions (R on the diagonal), crosses are rematerializations (R below it), and what is
    shaded is at hand when the stage begins (S; an op's column is shaded where any of its values is). Dashed lines
    divide forward from backward. Of more than 1,000 ops, the shade is the share of neighbouring cells at hand.

    Raises:
        ValueError: if the solution has no plan.
        ImportError: without Matplotlib.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1], forward=2)
    >>> schedule(solve(problem, 100)).get_title()
    'checkpoint-all: 0 of 4 ops run again, 0 times in all'
    """
    # The cells: kept values as a shade, first runs and reruns as marks.
    _, plan = check_plan(solution, "draw")
    again, ops, forward = plan.recomputed, solution.problem.graph.ops, solution.problem.graph.forward_length
    T, kept = len(again), np.zeros_like(plan.R)  # [t, k]: some value of op k is in memory when stage t begins
    for v, value in enumerate(solution.problem.graph.values):
        if value.producer is not None:
            kept[:, value.producer] |= plan.S[:, v]
    ax = axes_of(ax, (7.5, 7.5))
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("kept", ["white", "#9ecae1"])
    ax.imshow(_averaged(kept), cmap=shades, vmin=0, vmax=1, extent=(-0.5, T - 0.5, T - 0.5, -0.5), aspect="equal")
    cell = 400 / T  # points, about
    ax.scatter(range(T), range(T), s=max(1.0, (0.8 * cell) ** 2), marker="s", c="#222222", lw=0, label="first run")
    t, k = np.nonzero(np.tril(plan.R, -1))
    size = float(np.clip(cell**2, 14, 90))
    label = f"run again ({again.sum()} times)"
    ax.scatter(k, t, s=size, marker="X", c=RED, ec="black", lw=0.4, label=label, zorder=3)
    # Axes, title, and names if there is room.
    ax.set(xlabel="op, in the order of first execution", ylabel="stage, which ends with the first execution of its op")
    ax.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    in_place = f", {solution.runs_over} runs write over an input" if solution.runs_over else ""
    title = f"{solution.method}: {(again > 0).sum()} of {T} ops run again, {again.sum()} times in all{in_place}"
    ax.set_title(title, pad=22)
    if T <= NAMED:
        names = [op.name for op in ops]
        ax.set_xticks(range(T), names, rotation=90)
        ax.set_yticks(range(T), names)
    # The border between forward and backward.
    if 0 < forward < T:
        ax.axvline(forward - 0.5, color="black", ls="--", lw=0.8)
        ax.axhline(forward - 0.5, color="black", ls="--", lw=0.8)
        for name, middle in (("forward", forward / 2), ("backward", (forward + T) / 2)):
            ax.text(middle - 0.5, 1.01, name, ha="center", va="bottom", transform=ax.get_xaxis_transform())
            ax.text(1.01, middle - 0.5, name, ha="left", va="center", rotation=270, transform=ax.get_yaxis_transform())
    # The legend, with marks of one size.
    shade = pyplot().Rectangle((0, 0), 1, 1, color=shades(1.0), label="at hand when the stage begins")
    legend = ax.legend(handles=[*ax.get_legend_handles_labels()[0], shade], loc="upper right", framealpha=1.0)
    marks: list[Any] = legend.legend_handles[:2]
    for mark in marks:
        mark.set_sizes([LEGEND_SIZE])  # a mark as large as a cell of a small schedule covers the words
    return ax


def _averaged(cells: np.ndarray) -> np.ndarray:
    """(n, n) float: the cells, or if they are too many to see, averages of square blocks."""
    side = -(-len(cells) // MOST_CELLS)
    if side == 1:
        return cells.astype(float)
    edges = np.arange(0, len(cells), side)
    sums = np.add.reduceat(np.add.reduceat(cells.astype(np.float32), edges, axis=0), edges, axis=1)
    widths = np.diff([*edges, len(cells)])
    return sums / np.outer(widths, widths)
