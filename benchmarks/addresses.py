"""How low blocks are placed in one arena: problems of MiniMalloc's form, and plans of `benchmarks/problems`.

    python -m benchmarks.addresses [GRAPH ...] [--folder DIR] [--time-limit SECONDS]

"minimalloc" is a folder of comma-separated values ``id,lower,upper,size``, as MiniMalloc takes them: blocks that live
from ``lower`` until before ``upper``. A number in the file's name, as in ``A.1048576.csv``, is the capacity to stay
within; ``capacity_seconds`` is how long addresses within it take to find, ``seconds`` how long the lowest arena takes,
or until the time is over. Of a graph it places what plans make: of keeping everything, and of a quick method within
three smaller budgets. One row a file or plan: its height over the capacity, for plans over the live peak.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkmate
from benchmarks.common.rows import Row
from benchmarks.common.runner import Benchmark
from benchmarks.solve.comparison import FILES, load
from checkmate.inspection.addresses import ALIGNMENT, lives_of
from checkmate.solvers.addresses import Block, Placement, live_peak, overlaps, place_blocks
from checkmate.solvers.search.packing import pack

MINIMALLOC = "minimalloc"
SHARES = (0.75, 0.5, 0.3)  # of the peak of keeping everything
PLANNING = 10.0  # seconds for a plan, whose method is quick
HEADER = ("name", "blocks", "live peak", "capacity", "height", "height / capacity", "seconds", "proof")


def read(path: Path) -> list[Block]:
    """The blocks of a file."""
    with path.open(newline="") as file:
        return [Block(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def capacity_of(path: Path) -> int | None:
    """The capacity that a file's name tells: the number before its suffix."""
    _, dot, last = path.stem.rpartition(".")
    return int(last) if dot and last.isdecimal() else None


def file_row(path: Path, time_limit: float) -> Row:
    """Place the blocks of a file, within its capacity first."""
    blocks, capacity = read(path), capacity_of(path)
    row: Row = {"name": path.stem.split(".")[0], "capacity": capacity}
    if capacity is not None:
        began = time.perf_counter()
        within = pack(blocks, capacity, time_limit=time_limit)
        row["capacity_seconds"] = time.perf_counter() - began
        row["within_capacity"] = within.offsets is not None and not list(overlaps(blocks, within.offsets))
    began = time.perf_counter()
    placement = place_blocks(blocks, time_limit=time_limit)
    return {**row, **figures(blocks, placement, time.perf_counter() - began)}


def plan_rows(graph: str, time_limit: float) -> Iterator[Row]:
    """Place what plans of one graph make."""
    problem = load(graph)
    for share in (1.0, *SHARES):
        method = "checkpoint-all" if share == 1 else "next-use"
        budget = int(share * problem.keep_all_peak)
        solution = checkmate.solve(problem, budget, method=method, time_limit=PLANNING)
        if solution.plan is None:
            continue
        began = time.perf_counter()
        addresses = checkmate.addresses(solution, time_limit=time_limit)
        seconds = time.perf_counter() - began
        lives = lives_of(solution)
        blocks = [Block(life.born, life.died, -(-life.bytes // ALIGNMENT) * ALIGNMENT) for life in lives]
        offsets = tuple(box.offset for box in addresses.boxes if not box.over)  # one for each life
        placement = Placement(offsets, addresses.height, addresses.bound)
        name = f"{graph} {share:g}"
        yield {"name": name, "method": method, "budget": budget, **figures(blocks, placement, seconds)}


def figures(blocks: Sequence[Block], placement: Placement, seconds: float) -> Row:
    """What a row says of a placement, which is checked."""
    wrong = next(overlaps(blocks, placement.offsets), None)
    assert wrong is None, f"blocks {wrong} overlap"
    return {
        "blocks": len(blocks),
        "live_peak": live_peak(blocks),
        "height": placement.height,
        "bound": placement.bound,
        "first_fit": place_blocks(blocks, time_limit=0).height,
        "seconds": seconds,
    }


def cells(row: Row) -> list[str]:
    """What is printed of a row."""
    of = row.get("capacity") or row["live_peak"]
    gap = (row["height"] - row["bound"]) / row["height"] if row["height"] else 0.0
    return [
        row["name"],
        *(f"{value:,}" for value in (row["blocks"], row["live_peak"], of, row["height"])),
        f"{row['height'] / of:.5f}" if of else "",
        f"{row['seconds']:.2f}",
        "lowest" if not gap else f"gap {gap:.3%}",
    ]


def rows(name: str, folder: str, time_limit: float) -> Iterator[Row]:
    """Those of the files, or of a graph."""
    if name == MINIMALLOC:
        yield from (file_row(path, time_limit) for path in sorted(Path(folder).glob("*.csv")))
    else:
        yield from plan_rows(name, time_limit)


BENCHMARK = Benchmark(
    __doc__,
    "addresses.jsonl",
    rows,
    HEADER,
    cells,
    names=(MINIMALLOC, *FILES),
    options={
        "folder": ("tests/solvers/search/minimalloc", "of files in MiniMalloc's form"),
        "time_limit": (5.0, "seconds to search, for each"),
    },
    packages=("numpy",),
)

if __name__ == "__main__":
    BENCHMARK.run()
