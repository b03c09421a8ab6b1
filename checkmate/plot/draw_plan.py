"""A plan as pictures: its schedule, and memory over the step.

The schedule shows which ops run in each stage (R), and which values stay from stage to stage (S). Memory is stacked
areas, the budget as a line, the peak named; below it, for a plan that uses links, strips: what is on each, and where
values wait in a second memory the bytes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from checkmate.core.solution import Solution, check_plan
from checkmate.inspection.timeline import OUTSIDE, Timeline, timeline
from checkmate.plot.style import FILLS, HATCHES, LANES, LINES, RED, ROLE_STYLES, ROLE_WORDS, axes_of, pyplot, units
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OTHER = "#003050"  # of the lines of other plans
MOST_CELLS = 1000  # of a schedule's side: beyond it cells are averaged
NAMED = 30  # ops up to which axes bear their names
LEGEND_SIZE = 45  # square points of the marks in the legend
BEYOND = 1.5  # a budget that is so many times as high as all that is drawn would flatten it


def memory(
    solution: Solution,
    *,
    compare: Sequence[Solution] = (),
    by: Literal["role", "module"] = "role",
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the bytes in memory over the seconds of the step, as stacked areas by role or by module.

    The budget is a line that bears its bytes, the peak bears its bytes and its op. Other solutions, for example plain
    PyTorch (the method "checkpoint-all") or plans within other budgets, are lines, which the legend names. Their steps
    are as long as they take; where one takes longer, the end of the step that is drawn is named.
    Where links carry something, strips below show when, and where the step waits for it; where values wait in a second
    memory, one more the bytes there.

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
    line, *others = (timeline(check_plan(plan, "draw")[0], plan.problem) for plan in (solution, *compare))
    rows = line.by(by)
    ax = axes_of(ax, (10, 5 + 0.35 * len(line.lanes) + (1.3 if line.crossings else 0)))
    from matplotlib.patheffects import Normal, Stroke

    # An area for each row, the first one lowest, and a line around all of them.
    styles = ROLE_STYLES if by == "role" else _styles(rows)
    if rows:
        areas = ax.stackplot(line.begins, [_held(row) for row in rows.values()], step="post", labels=list(rows))
        for area, name in zip(areas, rows, strict=True):
            fill, hatch = styles[name]
            area.set(facecolor=fill, hatch=hatch, edgecolor="#404040", linewidth=0)
    ax.step(line.begins, _held(line.bytes), where="post", color="black", lw=0.7)
    # A line for each other plan.
    for other, its, style in zip(compare, others, cycle(LINES)):
        label = f"{_called(other)}: peak {format_bytes(its.peak)}"
        (drawn,) = ax.step(its.begins, _held(its.bytes), where="post", color=OTHER, ls=style, lw=1.3, label=label)
        drawn.set_path_effects([Stroke(linewidth=3, foreground="white"), Normal()])
    highest = max(1, *(its.peak for its in (line, *others)))
    beyond = solution.budget > BEYOND * highest
    budget = f"budget {format_bytes(solution.budget)}"
    level = budget + (", above this picture" if beyond else "")
    ax.axhline(solution.budget, color="black", ls=(0, (8, 3)), lw=1.2, label=level)
    ceiling = max(highest, 0 if beyond else solution.budget)
    longest = max(its.seconds for its in (line, *others)) or 1.0
    ax.set(xlim=(0, longest), ylim=(0, 1.4 * ceiling))
    _label(ax, line, "" if beyond else budget, solution.budget, longest, 1.18 * ceiling)
    units(ax, x="s", y="B")
    called = _called(solution)
    more = "" if called == "plain PyTorch" else f" ({solution.overhead:+.2%} {solution.spent_on})"
    title = f"{called}: peak {format_bytes(solution.peak or 0)}\nstep {format_seconds(solution.cost)}{more}"
    ax.set(xlabel="time since the step began", ylabel="memory in use", title=title)
    handles, labels = ax.get_legend_handles_labels()
    order = [*reversed(range(len(rows))), *range(len(rows), len(labels))]  # as the areas lie upon each other
    meanings = ROLE_WORDS if by == "role" else {}
    words = [f"{labels[i]}: {meanings[labels[i]]}" if labels[i] in meanings else labels[i] for i in order]
    ax.legend([handles[i] for i in order], words, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    if line.lanes:
        _links(ax, line)
    return ax


def _called(solution: Solution) -> str:
    """The name of a plan: plain PyTorch if it runs each op once and keeps all, else planned within a budget."""
    plan = check_plan(solution, "draw")[0]
    keeps_all = solution.peak == solution.problem.keep_all_peak and len(plan.runs) == len(solution.problem.graph.ops)
    if keeps_all and not (plan.moves or plan.started):
        return "plain PyTorch"
    return f"planned within {format_bytes(solution.budget)} ({solution.method})"


def _held(row: np.ndarray) -> np.ndarray:
    return np.append(row, row[-1])


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
    where = f"\n{moment.where}" if moment.where else ""
    over = f" over {moment.over}" if moment.over else ""
    left = middle < line.seconds / 2
    ax.annotate(
        f"peak {format_bytes(line.peak)}\n{moment.name}{over}{where}",
        (middle, line.peak),
        (middle + (0.03 if left else -0.03) * line.seconds, height),
        ha="left" if left else "right",
        va="center",
        fontsize="small",
        bbox={"boxstyle": "round", "fc": "white", "ec": "black", "lw": 0.5},
        arrowprops={"arrowstyle": "-|>", "color": "black"},
    )


def _styles(rows: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    fixed = {"resident": ROLE_STYLES["parameters"], OUTSIDE: ROLE_STYLES["inputs"]}
    looks = zip(cycle(FILLS), cycle(HATCHES))
    return {name: fixed.get(name) or next(looks) for name in rows}


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
        figure: Any = ax.figure
        strips = [figure.add_subplot(rows[1 + i], sharex=ax) for i in range(len(heights))]
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
        changes = [*line.levels, (line.seconds, line.levels[-1][1])]
        seconds, levels = (np.array(column) for column in zip(*changes, strict=True))
        strip.fill_between(seconds, levels, step="post", facecolor="#bcd9ea", edgecolor="black", linewidth=0.7)
        most = int(levels.max())
        strip.set(ylim=(0, 1.25 * most or 1), ylabel="bytes there")
        words = f"at most {format_bytes(most)}\nin the second memory"
        strip.text(1.02, 0.5, words, va="center", transform=strip.transAxes)
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
    T, at_hand = len(again), np.zeros_like(plan.R)  # [t, k]: some value of op k is in memory when stage t begins
    for v, value in enumerate(solution.problem.graph.values):
        if value.producer is not None:
            at_hand[:, value.producer] |= plan.S[:, v]
    ax = axes_of(ax, (7.5, 7.5))
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("kept", ["white", "#9ecae1"])
    ax.imshow(_averaged(at_hand), cmap=shades, vmin=0, vmax=1, extent=(-0.5, T - 0.5, T - 0.5, -0.5), aspect="equal")
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
