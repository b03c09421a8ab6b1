"""What all pictures need: Matplotlib when it is there, colours, numbers with units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (  # told apart by colour-blind eyes (Okabe and Ito)
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip


def pyplot() -> Any:
    """Matplotlib's pyplot, imported when the first picture is drawn."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Pictures need Matplotlib: pip install checkmate[plot]") from error
    return plt


def axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """The Axes given, or those of a new figure of this size in inches."""
    plt = pyplot()
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def halo() -> list[Any]:
    """What sets a line apart from the areas that it crosses."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=3, foreground="white"), Normal()]


def units(ax: Axes, *, x: str, y: str) -> None:
    """Numbers with their unit along both axes: 2 GB, 15 ms."""
    from matplotlib.ticker import EngFormatter

    ax.xaxis.set_major_formatter(EngFormatter(unit=x))
    ax.yaxis.set_major_formatter(EngFormatter(unit=y))
