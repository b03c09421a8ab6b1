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
    """Strips under a picture of the memory, on its seconds: transfers as bars, what is waited for, bytes there."""
    lanes = ax.inset_axes((0.0, -0.24, 1.0, 0.18), sharex=ax)
    there = ax.inset_axes((0.0, -0.50, 1.0, 0.20), sharex=ax)
    _lanes(lanes, line)
    _there(there, line)
    units(there, x="s", y="B")
    for above in (ax, lanes):
        above.tick_params(labelbottom=False)
    there.set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")
    return lanes, there


def _lanes(ax: Axes, line: Timeline) -> None:
    for back, (name, fill, hatch) in LINKS.items():
        bars = [(c.begin, c.end - c.begin) for c in line.crossings if c.back == back]
        look: dict[str, Any] = {
            "facecolor": fill,
            "hatch": hatch,
            "edgecolor": "white",
            "linewidth": 0.4,
            "label": name,
        }
        ax.broken_barh(bars, (0.55 if back else 0.05, 0.4), **look)
    stalls = [(m.begin + m.seconds, m.waited) for m in line.moments if m.waited]
    if stalls:
        look = {"facecolor": "none", "hatch": "xxxx", "edgecolor": RED, "linewidth": 0.8, "label": "waited for"}
        ax.broken_barh(stalls, (0.0, 1.0), **look)
    ax.set(ylim=(0, 1))
    ax.set_yticks([0.25, 0.75], [name for name, _, _ in LINKS.values()])
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize="small")


def _there(ax: Axes, line: Timeline) -> None:
    seconds, levels = (
        np.array(column) for column in zip(*line.levels, (line.seconds, line.levels[-1][1]), strict=True)
    )
    ax.fill_between(seconds, levels, step="post", facecolor="#bcd9ea", edgecolor="black", linewidth=0.7)
    most = int(levels.max())
    ax.set(ylim=(0, 1.25 * most or 1), ylabel="bytes there")
    ax.text(1.02, 0.5, f"at most {format_bytes(most)}\nin the second memory", va="center", transform=ax.transAxes)
