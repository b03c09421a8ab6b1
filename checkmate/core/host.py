"""A second memory beside the budgeted one: its size and the speed of its links.

The host's memory beside a GPU, or a file beside the RAM. Values wait there that are not needed for a while: a `Send`
copies one there, a `Fetch` back, while ops go on running. `checkmate.core.timing` says how long that takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from checkmate.errors import InvalidProblem
from checkmate.units import exact_bytes


@dataclass(frozen=True)
class Host:
    """A second memory and its links.

    Each link carries one transfer at a time, in the order in which they are asked for. There is one link for each
    direction, or one for both.

    Raises:
        InvalidProblem: if a number is none, or makes no sense.

    >>> Host(10**9, send=2e9, fetch=1e9).seconds_to_fetch(5 * 10**8)
    0.5
    """

    budget: int  # bytes that there is room for there
    send: float  # bytes per second, from here to there
    fetch: float  # bytes per second, from there to here
    one_link: bool = False  # both directions wait for each other
    latency: float = 0.0  # seconds that a transfer takes beyond its bytes, in which the link is busy too

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 0:
            raise InvalidProblem(f"A host budget is a whole number of bytes, at least 0, not {self.budget!r}.")
        if not isinstance(self.one_link, bool):
            raise InvalidProblem(f"one_link is True or False, not {self.one_link!r}.")
        for name, rate in (("send", self.send), ("fetch", self.fetch)):
            if not _is_number(rate) or not 0 < rate < math.inf:
                raise InvalidProblem(f"{name} is a positive, finite number of bytes per second, not {rate!r}.")
        if not _is_number(self.latency) or not 0 <= self.latency < math.inf:
            raise InvalidProblem(f"latency is a finite number of seconds, at least 0, not {self.latency!r}.")

    def seconds_to_send(self, size: int) -> float:
        """Seconds that the link is busy with a copy of this many bytes to the second memory."""
        return self.latency + size / self.send

    def seconds_to_fetch(self, size: int) -> float:
        """Seconds that the link is busy with a copy of this many bytes from the second memory."""
        return self.latency + size / self.fetch

    def __str__(self) -> str:
        links = "one link" if self.one_link else "a link each way"
        return f"{exact_bytes(self.budget)}, {self.send / 1e9:.3g} GB/s there, {self.fetch / 1e9:.3g} back, {links}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
