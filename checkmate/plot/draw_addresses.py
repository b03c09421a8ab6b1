"""A picture of a plan's addresses in one arena over the time of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkmate.core.solution import format_gap
from checkmate.inspection.addresses import Addresses
from checkmate.inspection.timeline import ROLES
from checkmate.plot.style import ROLE_STYLES, axes_of
from checkmate.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def addresses(placed: Addresses, *, ax: Axes | None = None) -> Axes:
    """Draw addresses over the executions of a plan: each copy of a value is a box, coloured by role.

    Raises:
        ValueError: if nothing is placed.
        ImportError: without Matplotlib.

    >>> import checkmate
    >>> problem = checkmate.Problem.from_dag([[], [0], [1], [0, 2]], [1] * 4, [128, 256, 256, 64])
    >>> ax = addresses(checkmate.addresses(checkmate.solve(problem, "1 kB")))
    >>> ax.get_title(), ax.get_legend_handles_labels()[1]
    ('An arena of 640 B, as low as can be', ['results', 'activations', 'most alive at one moment'])
    """
    if not placed.boxes:
        raise ValueError("There is nothing to draw: the plan places nothing.")
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import EngFormatter

    # A box for each copy, role by role.
    ax = axes_of(ax, (10, 5))
    for role in ROLES:
        if boxes := [box for box in placed.boxes if box.role == role and box.bytes]:
            fill, hatch = ROLE_STYLES[role]
            look: Any = {"facecolor": fill, "hatch": hatch, "edgecolor": "#404040", "linewidth": 0.4}
            ends = ((box.first, box.last + 1, box.offset, box.offset + box.bytes) for box in boxes)
            corners = [[(left, low), (right, low), (right, high), (left, high)] for left, right, low, high in ends]
            ax.add_collection(PolyCollection(corners, label=role, **look))
    # The bound, axes and title.
    ax.axhline(placed.bound, color="black", ls=(0, (8, 3)), lw=1.2, label="most alive at one moment")
    ax.set(xlim=(0, 1 + max(box.last for box in placed.boxes)), ylim=(0, 1.05 * placed.height or 1))
    ax.yaxis.set_major_formatter(EngFormatter(unit="B"))
    proof = "as low as can be" if placed.gap == 0 else f"at most {format_gap(placed.gap, True)} could be saved"
    title = f"An arena of {format_bytes(placed.height)}, {proof}"
    ax.set(xlabel="executions of ops, in order", ylabel="address in the arena, in bytes", title=title)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax
