"""Pictures of plans: a schedule, memory over the step, cost against peak.

Each draws on the Axes given as ``ax=``, or on a new figure's, and returns the Axes, which are in bytes and seconds. No
picture needs more than one. Only `memory` of a plan that uses links adds strips below, on the same seconds: they take
their room from the Axes given where these stand in a grid, as those of ``plt.subplots`` do, and else hang below them.
"""

from typing import TYPE_CHECKING, NoReturn

from checkmate.look.drawings import frontier, memory, schedule

__all__ = ["frontier", "memory", "schedule"]

if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> NoReturn:
        advice = "; the page of checkmate.report(solution) shows it" if name in ("addresses", "graph") else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
