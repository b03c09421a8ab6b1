"""Two strips below the memory of a plan that sends values: what is on its links, and the bytes in the second memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from checkmate.inspection.timeline import Timeline
from checkmate.plot.style import BLUE, ORANGE, RED, units
from checkmate.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINKS = {False: ("sent", BLUE, "//"), True: ("fetched", ORANGE, "||")}  # the lower lane and the upper one


def links(ax: Axes, line: Timeline) -> tuple[Axes, Axes]:
    """Strips under a picture of the memory, on its seconds: transfers, where one is waited for, and the bytes there."""
    lanes, there = _strips(ax)
    _lanes(lanes, line)
    _there(there, line)
    units(there, x="s", y="B")
    for above in (ax, lanes):
        above.tick_params(labelbottom=False)
    there.set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")
    return lanes, there


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
