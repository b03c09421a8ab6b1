"""The picture of README: memory over one training step of GPT-2, plain and planned within half of the plain bytes.

    python -m benchmarks.solve.picture [--out PATH]

The step is that of `benchmarks/problems/gpt2-12.json.gz`, with costs estimated for an H100, and its plan is that of the
rows of `benchmarks.solve` at 50%. It is drawn by `checkmate.plot.memory`, with words for who sees one first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.rows import documented
from benchmarks.common.runner import RESULTS
from benchmarks.solve.comparison import load
from checkmate import plot
from checkmate.core.solution import Solution
from checkmate.solvers.solve import solve
from checkmate.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NETWORK, SHARE = "gpt2-12", 0.5
TITLE = "Memory over one training step of GPT-2 (12 layers, 8 texts of 512 tokens)"
PATH = RESULTS / "gpt2_step.png"
WORDS = {  # of the legend
    "gradients": "gradients on their way",
    "made again": "activations, computed again",
    "activations": "activations, kept",
    "results": "gradients of parameters",
    "inputs": "the batch",
    "plain PyTorch": "plain PyTorch",
    "budget": "the budget",
}


def draw(planned: Solution, plain: Solution) -> Axes:
    """Both steps in one picture, the planned one as areas and the plain one as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained", facecolor="white")
    ax = plot.memory(planned, compare=[plain], ax=figure.add_subplot())
    ax.set_title(TITLE)
    ax.set(xlabel="time", ylabel="memory", ylim=(0, 1.25 * (plain.peak or 1)))
    for text in [text for text in ax.texts if text.get_text().startswith(("peak", "budget"))]:
        text.remove()  # said below, in words that are larger
    for text in ax.texts:
        text.set_fontsize("large")
    ours = f"with checkmate: {format_bytes(planned.budget)},\nthe same numbers,\n{planned.overhead:.1%} more time"
    place: dict[str, Any] = {"xytext": (-8, 5), "textcoords": "offset points", "ha": "right", "va": "bottom"}
    ax.annotate(ours, (max(planned.cost, plain.cost), planned.budget), fontsize="large", **place)
    legend = ax.get_legend()
    assert legend is not None
    for label in legend.get_texts():
        said = label.get_text()
        label.set_text(next((word for begin, word in WORDS.items() if said.startswith(begin)), said))
    return ax


def main() -> None:
    """Solve, and write the picture."""
    parser = documented(__doc__)
    parser.add_argument("--out", type=Path, default=PATH, help="the picture")
    out = parser.parse_args().out
    problem = load(NETWORK)
    plain = solve(problem, problem.keep_all_peak, method="checkpoint-all")
    planned = solve(problem, int(SHARE * problem.keep_all_peak), progress=False)
    figure = draw(planned, plain).figure
    figure.savefig(out, dpi=100)  # type: ignore[union-attr]
    print(planned)


if __name__ == "__main__":
    main()
