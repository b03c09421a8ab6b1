"""The picture of README: memory over one training step of GPT-2, plain and planned within half of the plain bytes.

    python -m benchmarks.solve.picture [--out PATH]

The step has the ops that an H100 runs, with estimated costs, as in the rows of `benchmarks.gpu_graphs` in float32. It
is drawn by `checkmate.plot.memory`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.rows import documented
from benchmarks.common.runner import RESULTS
from benchmarks.gpu_graphs import traced
from checkmate import plot
from checkmate.core.solution import Solution
from checkmate.solvers.solve import solve
from checkmate.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NETWORK, SHARE = "gpt2-12", 0.5
TITLE = "Memory over one training step of GPT-2 (12 layers, 8 texts of 512 tokens)"
PATH = RESULTS / "gpt2_step.png"


def draw(planned: Solution, plain: Solution) -> Axes:
    """Both steps in one picture, the planned one as areas and the plain one as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained", facecolor="white")
    ax = plot.memory(planned, compare=[plain], ax=figure.add_subplot())
    budget = format_bytes(planned.budget)
    ax.set_title(f"{TITLE}\nwithin {budget}: the same numbers, {planned.overhead:.1%} more time")
    return ax


def main() -> None:
    """Solve, and write the picture."""
    parser = documented(__doc__)
    parser.add_argument("--out", type=Path, default=PATH, help="the picture")
    out = parser.parse_args().out
    problem = traced(NETWORK)
    plain = solve(problem, problem.keep_all_peak, method="checkpoint-all")
    planned = solve(problem, int(SHARE * problem.keep_all_peak), progress=False)
    figure = draw(planned, plain).figure
    figure.savefig(out, dpi=100)  # type: ignore[union-attr]
    print(planned)


if __name__ == "__main__":
    main()
