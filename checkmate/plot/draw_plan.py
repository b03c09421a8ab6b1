"""Pictures of plans and problems, with words and numbers in them: `schedule`, `memory`, `frontier`, `graph`.

Each draws on the Axes given, or on a new figure, and returns the Axes. What colours tell apart, hatches, markers or
line styles tell apart too, so that the pictures read in black and white. Axes are in bytes and seconds. Matplotlib is
imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution
from checkmate.inspection.timeline import OUTSIDE, Timeline, timeline
from checkmate.plot.draw_graph import graph as graph
from checkmate.plot.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, YELLOW, axes_of, halo, pyplot, units
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from checkmate.solvers.frontier import Row

LIGHT_GREEN, LIGHT_RED = "#7fcfb9", "#ea8a4d"  # on which a hatch can be seen, in grey too
ROLE_STYLES = {  # fill, hatch
    "parameters": ("#7f7f7f", ""),
    "buffers": ("#a6a6a6", ".."),
    "inputs": ("#c8c8c8", "--"),
    "other resident": ("#e3e3e3", "xx"),
    "results": (PURPLE, "\\\\"),
    "activations": (SKY, ""),
    "made again": (LIGHT_RED, "xxx"),
    "gradients": (LIGHT_GREEN, "//"),
    "workspace": (YELLOW, "..."),
}
FILLS = (SKY, ORANGE, LIGHT_GREEN, YELLOW, PURPLE, LIGHT_RED, "#bcd9ea", "#f3d9a0", "#a8d5c5", "#e8c4d8")
HATCHES = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo")
LINES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = "osD^vP*X<>pdh"
MOST_CELLS = 1000  # of a schedule's side: beyond it cells are averaged
NAMED = 30  # ops up to which axes bear their names
LEGEND_SIZE = 45  # square points of the marks in the legend of a schedule


def schedule(solution: Solution, *, ax: Axes | None = None) -> Axes:
    """R and S as a triangle: a row for each stage, a column for each op.

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
    plan = _with_plan(solution)
    again, kept = plan.recomputed, _kept(solution)
    T = len(again)
    ax = axes_of(ax, (7.5, 7.5))
    ax.imshow(_averaged(kept), cmap=_shades(), vmin=0, vmax=1, extent=(-0.5, T - 0.5, T - 0.5, -0.5), aspect="equal")
    cell = 400 / T  # points, about
    ax.scatter(range(T), range(T), s=max(1.0, (0.8 * cell) ** 2), marker="s", c="#222222", lw=0, label="first run")
    t, k = np.nonzero(np.tril(plan.R, -1))
    size = float(np.clip(cell**2, 14, 90))
    label = f"run again ({again.sum()} times)"
    ax.scatter(k, t, s=size, marker="X", c=RED, ec="black", lw=0.4, label=label, zorder=3)
    ax.set(xlabel="op, in the order of first execution", ylabel="stage, which ends with the first execution of its op")
    ax.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    ax.set_title(f"{solution.method}: {(again > 0).sum()} of {T} ops run again, {again.sum()} times in all", pad=22)
    if T <= NAMED:
        names = [op.name for op in solution.problem.graph.ops]
        ax.set_xticks(range(T), names, rotation=90)
        ax.set_yticks(range(T), names)
    _halves(ax, solution.problem.graph.forward_length, T)
    shade = pyplot().Rectangle((0, 0), 1, 1, color=_shades()(1.0), label="at hand when the stage begins")
    legend = ax.legend(handles=[*ax.get_legend_handles_labels()[0], shade], loc="upper right", framealpha=1.0)
    marks: list[Any] = legend.legend_handles[:2]
    for mark in marks:
        mark.set_sizes([LEGEND_SIZE])  # a mark as large as a cell of a small schedule covers the words
    return ax


def _kept(solution: Solution) -> np.ndarray:
    """(T, T) bool: some value of the op is at hand when the stage begins."""
    S = _with_plan(solution).S
    kept = np.zeros((len(S), len(S)), dtype=bool)
    for v, value in enumerate(solution.problem.graph.values):
        if value.producer is not None:
            kept[:, value.producer] |= S[:, v]
    return kept


def _averaged(cells: np.ndarray) -> np.ndarray:
    """(n, n) float: the cells, or where there are too many to see the averages of square blocks of them."""
    side = -(-len(cells) // MOST_CELLS)
    if side == 1:
        return cells.astype(float)
    edges = np.arange(0, len(cells), side)
    sums = np.add.reduceat(np.add.reduceat(cells.astype(np.float32), edges, axis=0), edges, axis=1)
    widths = np.diff([*edges, len(cells)])
    return sums / np.outer(widths, widths)


def _halves(ax: Axes, forward: int, T: int) -> None:
    """Lines between forward and backward, with their names along the top and the right edge."""
    if not 0 < forward < T:
        return
    ax.axvline(forward - 0.5, color="black", ls="--", lw=0.8)
    ax.axhline(forward - 0.5, color="black", ls="--", lw=0.8)
    for name, middle in (("forward", forward / 2), ("backward", (forward + T) / 2)):
        ax.text(middle - 0.5, 1.01, name, ha="center", va="bottom", transform=ax.get_xaxis_transform())
        ax.text(1.01, middle - 0.5, name, ha="left", va="center", rotation=270, transform=ax.get_yaxis_transform())


def memory(
    solution: Solution,
    *,
    compare: Sequence[Solution] = (),
    by: Literal["role", "module"] = "role",
    ax: Axes | None = None,
) -> Axes:
    r"""Bytes at hand over the seconds of the step, as stacked areas: what they are, or whose.

    The budget is a line, the peak bears its bytes and its op. Other solutions, for example with other budgets, are
    lines, their steps as long as they take.

    Args:
        solution: one with a plan.
        compare: more of them.
        by: "role" tells apart parameters, activations, what is made again, gradients, ...; "module" the modules.
        ax: where to draw.

    Raises:
        ValueError: if a solution has no plan, or ``by`` is neither.
        ImportError: without Matplotlib.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1], forward=2)
    >>> [text.get_text() for text in memory(solve(problem, 13)).texts]
    ['forward', 'backward', 'peak 12 B\nop2']
    """
    line, others = _timeline(solution), [_timeline(other) for other in compare]
    rows = line.by(by)
    ax = axes_of(ax, (10, 5))
    _stack(ax, line, rows, ROLE_STYLES if by == "role" else _styles(rows))
    for other, its, style in zip(compare, others, cycle(LINES)):
        label = f"{other.method}, budget {format_bytes(other.budget)}"
        (drawn,) = ax.step(_begins(its), _held(its.bytes), where="post", color="#003050", ls=style, lw=1.3, label=label)
        drawn.set_path_effects(halo())
    ax.axhline(solution.budget, color="black", ls=(0, (8, 3)), lw=1.2, label=f"budget {format_bytes(solution.budget)}")
    highest = max(1, *(its.peak for its in (line, *others)))
    ceiling = max(highest, solution.budget if solution.budget <= 1.5 * highest else 0)  # one far above is in the legend
    longest = max(its.seconds for its in (line, *others))
    ax.set(xlim=(0, longest or 1.0), ylim=(0, 1.4 * ceiling))
    _name_halves(ax, line)
    _name_peak(ax, line, 1.18 * ceiling)
    units(ax, x="s", y="B")
    ax.set(xlabel="time in the step", ylabel="bytes at hand", title=_memory_title(solution))
    handles, labels = ax.get_legend_handles_labels()
    order = [*reversed(range(len(rows))), *range(len(rows), len(labels))]  # as the areas lie upon each other
    ax.legend([handles[i] for i in order], [labels[i] for i in order], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _stack(ax: Axes, line: Timeline, rows: dict[str, np.ndarray], styles: Mapping[str, tuple[str, str]]) -> None:
    """An area for each row, the first one lowest, and a line around all of them."""
    at = _begins(line)
    if rows:
        areas = ax.stackplot(at, [_held(row) for row in rows.values()], step="post", labels=list(rows))
        for area, name in zip(areas, rows, strict=True):
            fill, hatch = styles[name]
            area.set(facecolor=fill, hatch=hatch, edgecolor="#404040", linewidth=0)
    ax.step(at, _held(line.bytes), where="post", color="black", lw=0.7)


def _memory_title(solution: Solution) -> str:
    step = f"{format_seconds(solution.cost)} ({solution.overhead:+.2%} recomputation)"
    return f"{solution.method}: peak {format_bytes(solution.peak or 0)}, step {step}"


def _begins(line: Timeline) -> np.ndarray:
    """(N + 1,) seconds at which each execution begins, and the last one ends."""
    return np.array([*(moment.begin for moment in line.moments), line.seconds])


def _held(row: np.ndarray) -> np.ndarray:
    return np.append(row, row[-1])


def _name_halves(ax: Axes, line: Timeline) -> None:
    if not 0 < line.boundary < len(line.moments):
        return
    border = line.moments[line.boundary].begin
    ax.axvline(border, color="black", ls=":", lw=1)
    for name, side, shift in (("forward", "right", -4), ("backward", "left", 4)):
        ax.annotate(name, (border, 0.99), (shift, 0), ax.get_xaxis_transform(), "offset points", ha=side, va="top")


def _name_peak(ax: Axes, line: Timeline, height: float) -> None:
    moment = line.peak_moment
    middle = moment.begin + moment.seconds / 2
    where = f"\n{moment.where}" if moment.where else ""
    left = middle < line.seconds / 2
    ax.annotate(
        f"peak {format_bytes(line.peak)}\n{moment.name}{where}",
        (middle, line.peak),
        (middle + (0.03 if left else -0.03) * line.seconds, height),
        ha="left" if left else "right",
        va="center",
        fontsize="small",
        bbox={"boxstyle": "round", "fc": "white", "ec": "black", "lw": 0.5},
        arrowprops={"arrowstyle": "-|>", "color": "black"},
    )


def _styles(rows: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    known = {"resident": ROLE_STYLES["parameters"], OUTSIDE: ROLE_STYLES["inputs"]}
    rest = zip(cycle(FILLS), cycle(HATCHES))
    return {name: known.get(name) or next(rest) for name in rows}


def frontier(
    rows: Iterable[Row],
    *,
    peers: Mapping[str, Iterable[tuple[float, float]]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Seconds of the step against its peak, for each method; shaded is where no plan can be, as far as proven.

    Args:
        rows: of `checkmate.frontier`.
        peers: points of other tools for the same step by name, each a pair of peak in bytes and seconds.
        ax: where to draw.

    Raises:
        ValueError: if there is no row.
        ImportError: without Matplotlib.

    >>> import checkmate
    >>> problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1])
    >>> ax = frontier(checkmate.frontier(problem, [9, 12], jobs=1), peers={"by hand": [(12, 5.0)]})
    >>> ax.get_legend_handles_labels()[1]
    ['auto', 'by hand', 'proven: no plan is here']
    """
    rows = list(rows)
    if not rows:
        raise ValueError("There are no rows to draw.")
    ax = axes_of(ax, (8.5, 6))
    _draw_methods(ax, rows)
    for (name, points_of), marker in zip((peers or {}).items(), cycle("*XP+1234")):
        ax.plot(*zip(*points_of, strict=True), color="black", ls="", marker=marker, ms=9, label=name)
    _shade_bound(ax, rows)
    units(ax, x="B", y="s")
    _relative(ax, rows[0].solution.problem.keep_all_cost)
    ax.set(xlabel="peak", ylabel="step", title="Cost against peak")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    return ax


def _draw_methods(ax: Axes, rows: list[Row]) -> None:
    """For each method a line through its plans; how many budgets it has none for stands in its label."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row.method, []).append(row)
    looks = zip(cycle((BLUE, RED, GREEN, PURPLE, ORANGE, "black", SKY)), cycle(MARKERS), cycle(("-", *LINES)))
    for (method, mine), (color, marker, style) in zip(by_method.items(), looks, strict=False):
        points = sorted({(row.peak, row.cost) for row in mine if row.peak is not None})
        found = sum(row.peak is not None for row in mine)
        label = method if found == len(mine) else f"{method} ({found} of {len(mine)} budgets)"
        peaks, costs = zip(*points, strict=True) if points else ((), ())
        ax.step(peaks, costs, where="post", color=color, ls=style, marker=marker, ms=6, mfc="white", label=label)


def _relative(ax: Axes, base: float) -> None:
    """A second scale at the right: seconds relative to running each op once, if that takes any."""

    def over(seconds: Any) -> Any:
        return seconds / base - 1

    def seconds(over: Any) -> Any:
        return (1 + over) * base

    if base > 0:
        right = ax.secondary_yaxis("right", functions=(over, seconds))
        right.yaxis.set_major_formatter("{x:+.1%}")
        right.set_ylabel("recomputation")


def _shade_bound(ax: Axes, rows: list[Row]) -> None:
    """Shade below the best bound of each budget, which holds for the peaks up to it; beyond all, below running once."""
    base = rows[0].solution.problem.keep_all_cost
    lines = [points for points in (np.asarray(line.get_xydata()) for line in ax.lines) if len(points)]
    points = np.concatenate(lines) if lines else np.array([[rows[-1].budget, base]])
    budgets = sorted({row.budget for row in rows})
    bounds = [max(base, *(row.bound for row in rows if row.budget >= budget)) for budget in budgets]
    known = [*points[:, 1], *(bound for bound in bounds if np.isfinite(bound))]
    margin = 0.08 * (max(known) - base) or 0.05 * base or 1.0
    bottom, top = base - margin, max(known) + 2 * margin
    left, right = (f(*points[:, 0], *budgets) for f in (min, max))
    room = 0.05 * (right - left) or 0.05 * right
    edges = [left - room, *budgets, right + room]
    heights = np.minimum([bounds[0], *bounds, base], top)
    look: dict[str, Any] = {
        "facecolor": "#dddddd",
        "edgecolor": "#888888",
        "hatch": "////",
        "linewidth": 0.8,
        "zorder": 0,
    }
    ax.fill_between(edges, bottom, heights, step="pre", label="proven: no plan is here", **look)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(bottom, top))


def _with_plan(solution: Solution) -> Schedule:
    """The solution's schedule.

    Raises:
        ValueError: if it has none.
    """
    if solution.schedule is None:
        raise ValueError(f"There is no plan to draw: {solution.message or solution.status.meaning}")
    return solution.schedule


def _timeline(solution: Solution) -> Timeline:
    _with_plan(solution)
    assert solution.plan is not None
    return timeline(solution.plan, solution.problem)


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kept", ["white", "#9ecae1"])
