"""Memory over a step as a picture: stacked areas of what is at hand, the budget as a line, the peak named.

Below it, for a plan that sends values to a second memory, two strips: what is on its links, and the bytes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from checkmate.core.solution import Solution, check_plan
from checkmate.inspection.timeline import OUTSIDE, Timeline, timeline
from checkmate.plot.style import BLUE, FILLS, HATCHES, LINES, ORANGE, RED, ROLE_STYLES, axes_of, units
from checkmate.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LINKS = {False: ("sent", BLUE, "//"), True: ("fetched", ORANGE, "||")}  # the lower lane and the upper one


def memory(
    solution: Solution,
    *,
    compare: Sequence[Solution] = (),
    by: Literal["role", "module"] = "role",
    ax: Axes | None = None,
) -> Axes:
    r"""Bytes at hand over the seconds of the step, as stacked areas: what they are, or whose.

    The budget is a line, the peak bears its bytes and its op. Other solutions, for example with other budgets, are
    lines, their steps as long as they take. Where the plan sends values to a second memory, two strips below show the
    transfers with the moments at which one is waited for, and the bytes there.

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
    ax = axes_of(ax, (10, 7 if line.crossings else 5))
    from matplotlib.patheffects import Normal, Stroke

    _stack(ax, line, rows, ROLE_STYLES if by == "role" else _styles(rows))
    for other, its, style in zip(compare, others, cycle(LINES)):
        label = f"{other.method}, budget {format_bytes(other.budget)}"
        (drawn,) = ax.step(its.begins, _held(its.bytes), where="post", color="#003050", ls=style, lw=1.3, label=label)
        drawn.set_path_effects([Stroke(linewidth=3, foreground="white"), Normal()])
    ax.axhline(solution.budget, color="black", ls=(0, (8, 3)), lw=1.2, label=f"budget {format_bytes(solution.budget)}")
    highest = max(1, *(its.peak for its in (line, *others)))
    ceiling = max(highest, solution.budget if solution.budget <= 1.5 * highest else 0)  # one far above is in the legend
    longest = max(its.seconds for its in (line, *others))
    ax.set(xlim=(0, longest or 1.0), ylim=(0, 1.4 * ceiling))
    _name_halves(ax, line)
    _name_peak(ax, line, 1.18 * ceiling)
    units(ax, x="s", y="B")
    step = f"{format_seconds(solution.cost)} ({solution.overhead:+.2%} {solution.spent_on})"
    title = f"{solution.method}: peak {format_bytes(solution.peak or 0)}, step {step}"
    ax.set(xlabel="time in the step", ylabel="bytes at hand", title=title)
    handles, labels = ax.get_legend_handles_labels()
    order = [*reversed(range(len(rows))), *range(len(rows), len(labels))]  # as the areas lie upon each other
    ax.legend([handles[i] for i in order], [labels[i] for i in order], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if line.crossings:
        _links(ax, line)
    return ax


def _timeline(solution: Solution) -> Timeline:
    return timeline(check_plan(solution, "draw")[0], solution.problem)


def _stack(ax: Axes, line: Timeline, rows: dict[str, np.ndarray], styles: Mapping[str, tuple[str, str]]) -> None:
    """An area for each row, the first one lowest, and a line around all of them."""
    at = line.begins
    if rows:
        areas = ax.stackplot(at, [_held(row) for row in rows.values()], step="post", labels=list(rows))
        for area, name in zip(areas, rows, strict=True):
            fill, hatch = styles[name]
            area.set(facecolor=fill, hatch=hatch, edgecolor="#404040", linewidth=0)
    ax.step(at, _held(line.bytes), where="post", color="black", lw=0.7)


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
    known = {"resident": ROLE_STYLES["parameters"], OUTSIDE: ROLE_STYLES["inputs"]}
    rest = zip(cycle(FILLS), cycle(HATCHES))
    return {name: known.get(name) or next(rest) for name in rows}


def _links(ax: Axes, line: Timeline) -> None:
    """Strips under a picture of the memory, on its seconds: transfers, where one is waited for, and the bytes there."""
    lanes, there = _strips(ax)
    _lanes(lanes, line)
    _there(there, line)
    units(there, x="s", y="B")
    for above in (ax, lanes):
        above.tick_params(labelbottom=False)
    there.set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")


def _strips(ax: Axes) -> tuple[Axes, Axes]:
    """Two places below the Axes, which become as much lower; those that are in no grid are left as high as they are."""
    place = ax.get_subplotspec()
    if place is None:
        return ax.inset_axes((0.0, -0.24, 1.0, 0.18), sharex=ax), ax.inset_axes((0.0, -0.50, 1.0, 0.20), sharex=ax)
    rows = place.subgridspec(3, 1, height_ratios=(6, 1, 1.2))
    ax.set_subplotspec(rows[0])
    figure: Any = ax.figure
    lanes, there = (figure.add_subplot(row, sharex=ax) for row in (rows[1], rows[2]))
    return lanes, there


def _lanes(ax: Axes, line: Timeline) -> None:
    for back, (name, fill, hatch) in LINKS.items():
        bars = [(c.begin, c.end - c.begin) for c in line.crossings if c.back == back]
        look: dict[str, Any] = {"facecolor": fill, "hatch": hatch, "edgecolor": "white", "lw": 0.4, "label": name}
        ax.broken_barh(bars, (0.55 if back else 0.05, 0.4), **look)
    stalls = [(m.begin + m.seconds, m.waited) for m in line.moments if m.waited]
    if stalls:
        look = {"facecolor": "none", "edgecolor": RED, "linewidth": 1.5, "label": "waited for"}
        ax.broken_barh(stalls, (0.02, 0.96), **look)
    ax.set(ylim=(0, 1))
    ax.set_yticks([0.25, 0.75], [name for name, _, _ in LINKS.values()])
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize="small")


def _there(ax: Axes, line: Timeline) -> None:
    changes = [*line.levels, (line.seconds, line.levels[-1][1])]
    seconds, levels = (np.array(column) for column in zip(*changes, strict=True))
    ax.fill_between(seconds, levels, step="post", facecolor="#bcd9ea", edgecolor="black", linewidth=0.7)
    most = int(levels.max())
    ax.set(ylim=(0, 1.25 * most or 1), ylabel="bytes there")
    ax.text(1.02, 0.5, f"at most {format_bytes(most)}\nin the second memory", va="center", transform=ax.transAxes)
