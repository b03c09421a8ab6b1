"""The common style of pictures: colours, hatches, units, and the import of Matplotlib at first use.

What colours tell apart, hatches, markers or line styles tell apart too, so that pictures read in black and white.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (  # told apart by colour-blind eyes (Okabe and Ito)
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
LIGHT_GREEN, LIGHT_RED = "#7fcfb9", "#e28e4d"  # mixed with white, so that a hatch can be seen on them, in grey too
ROLE_STYLES = {  # of the roles of `checkmate.inspection.timeline`: fill, hatch
    "parameters": ("#7f7f7f", ""),
    "buffers": ("#a6a6a6", ".."),
    "inputs": ("#c8c8c8", "--"),
    "optimizer state": ("#b5b5b5", "++"),
    "other resident": ("#e3e3e3", "xx"),
    "results": (PURPLE, "\\\\"),
    "activations": (SKY, ""),
    "made again": (LIGHT_RED, "xxx"),
    "fetched": (ORANGE, "||"),
    "gradients": (LIGHT_GREEN, "//"),
    "workspace": (YELLOW, "..."),
}
ROLE_WORDS = {  # about a role, in legends; what is in none is there all the time
    "inputs": "the batch",
    "optimizer state": "with sums of gradients",
    "other resident": "there all the time",
    "results": "loss, gradients of parameters",
    "activations": "made by the forward",
    "made again": "recomputed",
    "fetched": "from the second memory",
    "gradients": "on their way back",
    "workspace": "of the op that runs",
}
FILLS = (SKY, ORANGE, LIGHT_GREEN, YELLOW, PURPLE, LIGHT_RED, "#bcd9ea", "#f3d9a0", "#a8d5c5", "#e8c4d8")
HATCHES = ("", "//", "\\\\", "..", "xx", "--", "||", "++", "oo")
LINES: tuple[Any, ...] = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# A fill and a hatch for each link, in turn.
LANES = ((BLUE, "//"), (ORANGE, "||"), (PURPLE, "\\\\"), (GREEN, "--"), (SKY, "xx"), (YELLOW, ".."))
MARKERS = "osD^vP*X<>pdh"


def pyplot() -> Any:
    """Matplotlib's pyplot, imported when the first picture is drawn."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Pictures need Matplotlib: pip install 'checkmate-torch[plot]'") from error
    return plt


def axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The given axes, or those of a new figure of this size in inches.

    Raises:
        TypeError: if what is given is none, such as the array of ``plt.subplots(2, 2)``.
        ImportError: without Matplotlib.
    """
    plt = pyplot()
    if ax is not None and not hasattr(ax, "get_subplotspec"):
        raise TypeError(f"ax is one Axes to draw on, such as plt.subplots()[1], not {type(ax).__name__}.")
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def units(ax: Axes, *, x: str, y: str) -> None:
    """Numbers with their unit along both axes: 2 GB, 15 ms."""
    from matplotlib.ticker import EngFormatter

    ax.xaxis.set_major_formatter(EngFormatter(unit=x))
    ax.yaxis.set_major_formatter(EngFormatter(unit=y))
