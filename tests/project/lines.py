"""Lines of the product's Python, folder by folder: ``python -m tests.project.lines``.

Who needs more than `MOST` raises it in a commit of its own that says what for.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOPS = ("checkmate", "solvers", "profiling")
MOST = 46_460


def files() -> list[Path]:
    """All files of the product; links to folders are not followed."""
    return sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))


def by_folder() -> Counter[str]:
    """Lines of each folder's own files."""
    count: Counter[str] = Counter()
    for path in files():
        count[str(path.parent.relative_to(ROOT))] += len(path.read_text(encoding="utf-8").splitlines())
    return count


if __name__ == "__main__":
    counts = by_folder()
    rows = [f"{lines:7,}  {folder}" for folder, lines in sorted(counts.items())]
    sys.stdout.write("\n".join([*rows, f"{counts.total():7,}  of {MOST:,} at most\n"]))
