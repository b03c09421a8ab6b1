"""The addresses of a plan's values in one arena, and how much the arena exceeds the live peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from checkmate.core.answer import Column, Printed, Table, table
from checkmate.core.solution import Solution, format_gap, require_plan
from checkmate.look.timeline import Span, timeline
from checkmate.solvers.addresses import TIME_LIMIT, Block, place_blocks
from checkmate.units import format_bytes

ALIGNMENT = 64  # bytes; PyTorch's allocator on the CPU gives such addresses


@dataclass(frozen=True, repr=False)
class Addresses(Printed):
    """An address for each copy of a value that a plan makes, and for the workspace of each op.

    What an op writes over a value lies where that lay. What is resident, parameters and the batch, lies outside.
    """

    boxes: tuple[Span, ...]  # each at an offset of a multiple of 64
    height: int  # bytes of the arena
    bound: int  # bytes below which no placement is: the most that is alive at one moment

    def records(self) -> list[dict[str, Any]]:
        """The name, role, executions, bytes, offset and `Span.over` of each box."""
        names = ("name", "role", "first", "last", "bytes", "offset", "over")
        return [{name: getattr(box, name) for name in names} for box in self.boxes]

    @property
    def gap(self) -> float:
        """(height - bound) / height: the largest share of the arena that a better placement could save."""
        return (self.height - self.bound) / self.height if self.height else 0.0

    def _title(self) -> str:
        return f"{len(self.boxes)} boxes in an arena of {format_bytes(self.height)}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        if over := sum(box.over != "" for box in self.boxes):
            yield "in place", f"{over} of them are written over another, in its place"
        proof = "no placement is lower" if self.height == self.bound else f"gap {format_gap(self.gap)}"
        yield "bound", f"{format_bytes(self.bound)} ({proof})"

    def _tables(self) -> Iterator[Table]:
        yield table(_COLUMNS, sorted(self.boxes, key=lambda box: -box.bytes)[:10])


_COLUMNS = (
    Column("largest", "name"),
    Column("role", "role"),
    Column("bytes", "bytes", format_bytes),
    Column("from", "offset", format_bytes),
    Column("runs", lambda box: f"{box.first} - {box.last}"),
)


def addresses(solution: Solution, *, time_limit: float = TIME_LIMIT) -> Addresses:
    """Place a plan's values in one arena: as lives are known in advance, so are addresses.

    Args:
        time_limit: seconds to search for a lower arena than the first one found.

    Raises:
        ValueError: if there is no plan.

    >>> from checkmate import Problem, solve
    >>> problem = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[128, 256, 256, 64])
    >>> placed = addresses(solve(problem, "1 kB"))
    >>> [(box.name, box.offset) for box in placed.boxes], placed.height == placed.bound
    ([('v0', 512), ('v1', 0), ('v2', 256), ('v3', 0)], True)
    """
    storages = list(storages_of(solution))
    blocks = [block._replace(size=-(-block.size // ALIGNMENT) * ALIGNMENT) for block, _ in storages]
    placed = place_blocks(blocks, time_limit=time_limit)
    at = zip(placed.offsets, storages, strict=True)
    boxes = tuple(replace(span, offset=offset) for offset, (_, spans) in at for span in spans)
    return Addresses(boxes, placed.height, placed.bound)


def storages_of(solution: Solution) -> Iterator[tuple[Block, list[Span]]]:
    """The storages of a plan, for values and for workspaces: a block, and the spans that are in it in turn."""
    plan, _ = require_plan(solution, "place")
    for spans in timeline(plan, solution.problem).storages:
        yield Block(spans[0].born, spans[-1].died, spans[0].bytes), spans
