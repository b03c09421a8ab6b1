"""Pictures of plans, by Matplotlib: memory over the step, the schedule, cost against peak; and their style.

Matplotlib is imported at the first picture. What colours tell apart, hatches, markers or line styles tell apart too,
so that pictures read in black and white. The page takes roles' styles, lines of methods and the proven area from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from checkmate.core.solution import Solution, require_plan
from checkmate.look.timeline import OUTSIDE, Timeline, timeline
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from checkmate.solvers.frontier import Row

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (  # told apart by colour-blind eyes (Okabe and Ito)
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
LIGHT_GREEN, LIGHT_RED = "#7fcfb9", "#e28e4d"  # mixed with white, so that a hatch can be seen on them, in grey too
ROLE_LOOKS = {  # of the roles of `checkmate.look.timeline`: fill, hatch, words in legends
    "parameters": ("#7f7f7f", "", ""),
    "buffers": ("#a6a6a6", "..", ""),
    "inputs": ("#c8c8c8", "--", "the batch"),
    "optimizer state": ("#b5b5b5", "++", "with sums of gradients"),
    "other resident": ("#e3e3e3", "xx", "there all the time"),
    "results": (PURPLE, "\\\\", "loss, gradients of parameters"),
    "activations": (SKY, "", "made by the forward"),
    "made again": (LIGHT_RED, "xxx", "recomputed"),
    "fetched": (ORANGE, "||", "from the second memory"),
    "gradients": (LIGHT_GREEN, "//", "on their way back"),
    "workspace": (YELLOW, "...", "of the op that runs"),
}
FILLS = (SKY, ORANGE, LIGHT_GREEN, YELLOW, PURPLE, LIGHT_RED, "#bcd9ea", "#f3d9a0", "#a8d5c5", "#e8c4d8")
MODULE_LOOKS = {"resident": ("#7f7f7f", ""), OUTSIDE: ("#c8c8c8", "--")}
HATCHES = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo")
LINES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# A fill and a hatch for each link, in turn.
LANES = ((BLUE, "//"), (ORANGE, "||"), (PURPLE, "\\\\"), (GREEN, "--"), (SKY, "xx"), (YELLOW, ".."))
MARKERS = "osD^vP*X<>pdh"
OTHER = "#003050"  # of the lines of other plans
NAMED = 30  # ops up to which axes bear their names
MOST_CELLS = 1000  # of a schedule's side: beyond it cells are averaged
LEGEND_SIZE = 45  # square points of the marks in the legend
BEYOND = 1.5  # a budget that is so many times as high as all that is drawn would flatten it


def axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given axes, or those of a new figure of this size in inches; a TypeError for anything else."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Pictures need Matplotlib: pip install 'checkmate-torch[plot]'") from error
    if ax is not None and not hasattr(ax, "get_subplotspec"):
        raise TypeError(f"ax is one Axes to draw on, such as plt.subplots()[1], not {type(ax).__name__}.")
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def units(ax: Axes, *, x: str, y: str) -> None:
    """Numbers with their unit along both axes: 2 GB, 15 ms."""
    from matplotlib.ticker import EngFormatter

    ax.xaxis.set_major_formatter(EngFormatter(unit=x))
    ax.yaxis.set_major_formatter(EngFormatter(unit=y))


def memory(
    solution: Solution,
    *,
    compare: Sequence[Solution] = (),
    by: Literal["role", "module"] = "role",
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the bytes in memory over the seconds of the step, as stacked areas by role or by module.

    The budget is a line that bears its bytes, the peak bears its bytes and its op. Other solutions, for example plain
    PyTorch (the method "checkpoint-all"), are lines, which the legend names; where one takes longer, the end of the
    step that is drawn is named. Strips below show what links carry, where the step waits for it, and the bytes of
    values that wait in a second memory.

    Args:
        by: "role" tells apart parameters, activations, what is made again, gradients, ...; "module" the modules.

    Raises:
        TypeError: if ``ax`` is no Axes.
        ValueError: if a solution has no plan, or ``by`` is neither.
        ImportError: without Matplotlib.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1], forward=2)
    >>> ax = memory(solve(problem, 13))
    >>> ax.get_title(), [text.get_text() for text in ax.texts]
    ('plain PyTorch: peak 12 B\nstep 4.0 s', ['forward', 'backward', 'budget 13 B', 'peak 12 B\nop2'])
    """
    line, *others = (timeline(require_plan(plan, "draw")[0], plan.problem) for plan in (solution, *compare))
    rows = line.by(by)
    ax = axes_of(ax, (10, 5 + 0.35 * len(line.lanes) + (1.3 if line.crossings else 0)))
    from matplotlib.patheffects import Normal, Stroke

    def along(row: np.ndarray) -> np.ndarray:  # as `Timeline.begins`, to the end of the step
        return np.append(row, row[-1])

    # An area for each row, the first one lowest, and a line around all of them.
    looks = zip(cycle(FILLS), cycle(HATCHES))
    if rows:
        areas = ax.stackplot(line.begins, [*map(along, rows.values())], step="post", labels=list(rows))
        for area, name in zip(areas, rows, strict=True):
            fill, hatch, *_ = ROLE_LOOKS[name] if by == "role" else MODULE_LOOKS.get(name) or next(looks)
            area.set(facecolor=fill, hatch=hatch, edgecolor="#404040", linewidth=0)
    ax.step(line.begins, along(line.bytes), where="post", color="black", lw=0.7)
    # A line for each other plan.
    for other, its, style in zip(compare, others, cycle(LINES)):
        label = f"{_called(other)}: peak {format_bytes(its.peak)}"
        (drawn,) = ax.step(its.begins, along(its.bytes), where="post", color=OTHER, ls=style, lw=1.3, label=label)
        drawn.set_path_effects([Stroke(linewidth=3, foreground="white"), Normal()])
    # The budget, and the words at lines and at the peak.
    highest = max(1, *(its.peak for its in (line, *others)))
    longest = max(its.seconds for its in (line, *others)) or 1.0
    beyond, budget = solution.budget > BEYOND * highest, f"budget {format_bytes(solution.budget)}"
    ceiling = highest if beyond else max(highest, solution.budget)
    level = f"{budget}, above this picture" if beyond else budget
    ax.axhline(solution.budget, color="black", ls=(0, (8, 3)), lw=1.2, label=level)
    ax.set(xlim=(0, longest), ylim=(0, 1.4 * ceiling))
    _label(ax, line, "" if beyond else budget, solution.budget, longest, 1.18 * ceiling)
    units(ax, x="s", y="B")
    called = _called(solution)
    more = "" if called == "plain PyTorch" else f" ({solution.overhead:+.2%} {solution.spent_on})"
    title = f"{called}: peak {format_bytes(solution.peak or 0)}\nstep {format_seconds(solution.cost)}{more}"
    ax.set(xlabel="time since the step began", ylabel="memory in use", title=title)
    # The legend, with meanings of roles.
    handles, labels = ax.get_legend_handles_labels()
    order = [*reversed(range(len(rows))), *range(len(rows), len(labels))]  # as the areas lie upon each other
    meanings = {name: words for name, (*_, words) in ROLE_LOOKS.items() if by == "role" and words}
    words = [f"{labels[i]}: {meanings[labels[i]]}" if labels[i] in meanings else labels[i] for i in order]
    ax.legend([handles[i] for i in order], words, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    if line.lanes:
        _links(ax, line)
    return ax


def _called(solution: Solution) -> str:
    """The name of a plan: plain PyTorch if it runs each op once and keeps all, else planned within a budget."""
    plan, problem = require_plan(solution, "draw")[0], solution.problem
    keeps_all = solution.peak == problem.keep_all_peak and len(plan.runs) == len(problem.graph.ops)
    is_plain = keeps_all and not (plan.moves or plan.started)
    return "plain PyTorch" if is_plain else f"planned within {format_bytes(solution.budget)} ({solution.method})"


def _label(ax: Axes, line: Timeline, budget: str, level: int, longest: float, height: float) -> None:
    """Label both halves, the budget unless empty, the end of the step if it ends sooner, and the peak."""
    below_top: dict[str, Any] = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
    # The border between forward and backward.
    if 0 < line.boundary < len(line.moments):
        border = line.moments[line.boundary].begin
        ax.axvline(border, color="black", ls=":", lw=1)
        for name, side, shift in (("forward", "right", -4), ("backward", "left", 4)):
            ax.annotate(name, (border, 0.99), (shift, 0), ha=side, **below_top)
    moment = line.peak_moment
    middle = moment.begin + moment.seconds / 2
    if budget:  # at the end away from the peak
        end, side, shift = (1.0, "right", -5) if middle < longest / 2 else (0.0, "left", 5)
        place: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points", "ha": side}
        paper = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.85}
        ax.annotate(budget, (end, level), (shift, 4), va="bottom", fontsize="small", bbox=paper, **place)
    # The end of a step that is shorter than the picture.
    if line.seconds < longest:
        ax.axvline(line.seconds, color="black", ls=":", lw=1)
        ax.annotate("end", (line.seconds, 0.99), (4, 0), ha="left", **below_top)
    # The peak, with its op.
    over, where = f" over {moment.over}" if moment.over else "", f"\n{moment.where}" if moment.where else ""
    words = f"peak {format_bytes(line.peak)}\n{moment.name}{over}{where}"
    aside, side = (0.03, "left") if middle < line.seconds / 2 else (-0.03, "right")
    at = (middle, line.peak), (middle + aside * line.seconds, height)
    box, arrow = {"boxstyle": "round", "fc": "white", "ec": "black", "lw": 0.5}, {"arrowstyle": "-|>", "color": "black"}
    ax.annotate(words, *at, ha=side, va="center", fontsize="small", bbox=box, arrowprops=arrow)


def _links(ax: Axes, line: Timeline) -> None:
    """Draw strips below the memory, on its seconds: a lane per link, and the bytes in a second memory."""
    # The Axes become lower, to make room for the strips below; in no grid they keep their height.
    count = len(line.lanes)
    heights = [0.5 * count, *[1.2] * bool(line.crossings)]  # where the picture is 6 high
    place = ax.get_subplotspec()
    if place is None:
        bottoms = [-(0.06 * (i + 1) + sum(heights[: i + 1]) / 6) for i in range(len(heights))]
        strips = [ax.inset_axes((0.0, b, 1.0, h / 6), sharex=ax) for b, h in zip(bottoms, heights, strict=True)]
    else:
        rows = place.subgridspec(1 + len(heights), 1, height_ratios=(6, *heights))
        ax.set_subplotspec(rows[0])
        strips = [ax.figure.add_subplot(rows[1 + i], sharex=ax) for i in range(len(heights))]
    # The use of each link, and where the step waits for it.
    lanes, waits = strips[0], False
    for i, ((name, uses), (fill, hatch)) in enumerate(zip(line.lanes.items(), cycle(LANES))):
        look: dict[str, Any] = {"facecolor": fill, "hatch": hatch, "edgecolor": "white", "lw": 0.4, "label": name}
        lanes.broken_barh([(use.begin, use.end - use.begin) for use in uses], (i + 0.1, 0.8), **look)
        if stalls := [use.stall for use in uses if use.waited]:
            look = {"facecolor": "none", "edgecolor": RED, "linewidth": 1.5, "label": "" if waits else "the step waits"}
            lanes.broken_barh([(begin, end - begin) for begin, end in stalls], (i + 0.03, 0.94), zorder=3, **look)
            waits = True
    lanes.set(ylim=(0, count))
    lanes.set_yticks([i + 0.5 for i in range(count)], list(line.lanes))
    lanes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize="small")
    # The bytes in the second memory.
    if line.crossings:
        strip = strips[1]
        seconds, levels = zip(*line.levels, (line.seconds, line.levels[-1][1]), strict=True)
        strip.fill_between(seconds, levels, step="post", facecolor="#bcd9ea", edgecolor="black", linewidth=0.7)
        most = max(levels)
        strip.set(ylim=(0, 1.25 * most or 1), ylabel="bytes there")
        about = f"at most {format_bytes(most)}\nin the second memory"
        strip.text(1.02, 0.5, about, va="center", transform=strip.transAxes)
        units(strip, x="s", y="B")
    # The seconds are written below the lowest only.
    for above in (ax, *strips[:-1]):
        above.tick_params(labelbottom=False)
    strips[-1].set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")


def schedule(solution: Solution, *, ax: Axes | None = None) -> Axes:
    """Draw R and S as a triangle: a row for each stage, a column for each op.

    Filled squares are first executions (R on the diagonal), crosses are rematerializations (R below it), and what is
    shaded is at hand when the stage begins (S; an op's column is shaded where any of its values is). Dashed lines
    divide forward from backward.

    Raises:
        ValueError: if the solution has no plan.
        ImportError: without Matplotlib.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [4, 4, 4, 1], forward=2)
    >>> schedule(solve(problem, 100)).get_title()
    'checkpoint-all: 0 of 4 ops run again, 0 times in all'
    """
    # The cells: kept values as a shade, first runs and reruns as marks.
    _, plan = require_plan(solution, "draw")
    again, graph = plan.recomputed, solution.problem.graph
    T, forward = len(again), graph.forward_length
    at_hand = np.zeros_like(plan.R)  # [t, k]: some value of op k is in memory when stage t begins
    for v, value in enumerate(graph.values):
        if value.producer is not None:
            at_hand[:, value.producer] |= plan.S[:, v]
    ax = axes_of(ax, (7.5, 7.5))
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    shades = LinearSegmentedColormap.from_list("kept", ["white", "#9ecae1"])
    ax.imshow(_averaged(at_hand), cmap=shades, vmin=0, vmax=1, extent=(-0.5, T - 0.5, T - 0.5, -0.5), aspect="equal")
    cell = 400 / T  # points, about
    ax.scatter(range(T), range(T), s=max(1.0, (0.8 * cell) ** 2), marker="s", c="#222222", lw=0, label="first run")
    (t, k), size = np.nonzero(np.tril(plan.R, -1)), float(np.clip(cell**2, 14, 90))
    label = f"run again ({again.sum()} times)"
    ax.scatter(k, t, s=size, marker="X", c=RED, ec="black", lw=0.4, label=label, zorder=3)
    # Axes, title, and names if there is room.
    ax.set(xlabel="op, in the order of first execution", ylabel="stage, which ends with the first execution of its op")
    ax.set(xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    in_place = f", {solution.runs_over} runs write over an input" if solution.runs_over else ""
    title = f"{solution.method}: {(again > 0).sum()} of {T} ops run again, {again.sum()} times in all{in_place}"
    ax.set_title(title, pad=22)
    if T <= NAMED:
        names = [op.name for op in graph.ops]
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
    shade = Rectangle((0, 0), 1, 1, color=shades(1.0), label="at hand when the stage begins")
    legend = ax.legend(handles=[*ax.get_legend_handles_labels()[0], shade], loc="upper right", framealpha=1.0)
    for mark in legend.legend_handles[:2]:
        mark.set_sizes([LEGEND_SIZE])  # type: ignore[union-attr]  # one as large as a cell may cover the words
    return ax


def _averaged(cells: np.ndarray) -> np.ndarray:
    """(n, n) float: the cells, or if they are too many to see, averages of square blocks."""
    side = -(-len(cells) // MOST_CELLS)
    if side == 1:
        return cells.astype(np.float32)
    edges = np.arange(0, len(cells), side)
    sums = np.add.reduceat(np.add.reduceat(cells.astype(np.float32), edges, axis=0), edges, axis=1)
    widths = np.diff([*edges, len(cells)])
    return sums / np.outer(widths, widths)


class MethodLine(NamedTuple):
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

    It lies below a line of steps, given by its corners, each up to its peak: at the best bound of any row whose budget
    is no smaller, beyond all budgets at the seconds of each op once. Then come the lowest and highest seconds drawn.
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

    Marks are plans; the thin steps between them say that a plan fits larger budgets too. Methods that have no plan for
    any of the budgets stand in the title of the legend.

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
