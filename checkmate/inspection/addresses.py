"""The addresses of a plan's values in one arena, and how much the arena exceeds the live peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from checkmate.core.answer import Column, Printed, Table, table
from checkmate.core.solution import Solution, check_plan, format_gap
from checkmate.inspection.timeline import Span, timeline
from checkmate.solvers.addresses import TIME_LIMIT, Block, place_blocks
from checkmate.units import format_bytes

ALIGNMENT = 64  # bytes; PyTorch's allocator on the CPU gives such addresses


@dataclass(frozen=True)
class Box:
    """A copy of a value, or a workspace, with its place; one written over another shares that one's place."""

    name: str
    role: str
    first: int
    last: int
    bytes: int
    offset: int  # bytes from the begin of the arena, a multiple of 64
    over: str = ""  # the value that it is written over


@dataclass(frozen=True, repr=False)
class Addresses(Printed):
    """An address for each copy of a value that a plan makes, and for the workspace of each op.

    What an op writes over a value lies where that lay. What is resident, parameters and the batch, lies outside.
    """

    boxes: tuple[Box, ...]
    height: int  # bytes of the arena
    bound: int  # bytes below which no placement is: the most that is alive at one moment

    listed: ClassVar = "boxes"  # for `records`

    @property
    def gap(self) -> float:
        """(height - bound) / height: the largest share of the arena that a better placement could save."""
        return (self.height - self.bound) / self.height if self.height else 0.0

    def _title(self) -> str:
        return f"{len(self.boxes)} boxes in an arena of {format_bytes(self.height)}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        over = sum(box.over != "" for box in self.boxes)
        if over:
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
    check_plan(solution, "place")
    storages = list(storages_of(solution))
    blocks = [block._replace(size=-(-block.size // ALIGNMENT) * ALIGNMENT) for block, _ in storages]
    placed = place_blocks(blocks, time_limit=time_limit)
    at = zip(placed.offsets, storages, strict=True)
    boxes = tuple(replace(box, offset=offset) for offset, (_, contents) in at for box in contents)
    return Addresses(boxes, placed.height, placed.bound)


def storages_of(solution: Solution) -> Iterator[tuple[Block, tuple[Box, ...]]]:
    """The storages of a plan, for values and for workspaces: a block, and at address 0 what is in it in turn."""
    assert solution.plan is not None
    line = timeline(solution.plan, solution.problem)
    chains: list[list[Span]] = []  # the copies in each storage
    chain_of: list[list[Span]] = []  # by span
    for span in line.spans:
        if span.continues is None:
            chains.append([])
        chain_of.append(chains[-1] if span.continues is None else chain_of[span.continues])
        chain_of[-1].append(span)
    for chain in chains:
        boxes = tuple(Box(s.name, s.role, s.first, s.last, s.bytes, 0, s.over) for s in chain)
        yield Block(chain[0].born, chain[-1].died, chain[0].bytes), boxes
    for m in line.moments:
        if m.workspace:
            box = Box(m.name, "workspace", m.index, m.index, m.workspace, 0)
            yield Block(m.tick, m.tick + 1, m.workspace), (box,)
