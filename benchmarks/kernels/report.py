"""The rows of `benchmarks.kernels` as tables, and as a picture: a step's time against its peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.common.rows import Row, cell, read
from benchmarks.common.runner import document, where_from
from checkmate.capture.fusion.kernels import Kernels
from checkmate.core.answer import Table
from checkmate.look.drawings import BLUE, GREEN, ORANGE, PURPLE, RED

PLAIN, COMPILED, KEEP, HALF, SMALLEST = "plain", "torch.compile", "keep all", "half", "smallest"
BUDGETS = (0.1, 0.3, 0.5)  # of activations, for torch.compile
TIGHT, CHECKPOINTS = f"{COMPILED}, budget {BUDGETS[0]}", f"{COMPILED}, checkpoints"
OURS: tuple[Kernels, ...] = get_args(Kernels)
DRAWN = "llama-bf16"  # in the picture
LOOKS = {"eager": (BLUE, "o"), "same-bits": (GREEN, "s"), "fused": (ORANGE, "D")}


def numbers(row: Row) -> str:
    """Differences from plain PyTorch, in words."""
    if "same_bits" not in row:
        return str(row.get("refused") or row.get("error"))
    return "same bits" if row["same_bits"] else f"differ by {row['difference']:.1e}"


def latest(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each network's last run, by their ways."""
    runs: dict[str, dict[str, Row]] = {}
    dates: dict[str, str] = {}
    for row in rows:
        if dates.setdefault(row["model"], row["date"]) != row["date"]:
            dates[row["model"]], runs[row["model"]] = row["date"], {}
        runs.setdefault(row["model"], {})[row["way"]] = row
    return runs


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Tables in Markdown, by their first heads: seconds at equal peaks, bytes, and seconds of first steps."""
    runs = latest(rows)

    def table(title: str, columns: dict[str, tuple[str, str]]) -> Table:
        heads = [title, *columns]
        lines = [
            [name, *(cell(run.get(way, {}), f"{form}|–") for way, form in columns.values())]
            for name, run in runs.items()
        ]
        return Table(heads, [line for line in lines if {*line[1:]} != {"–"}], heads[1:])

    at_peaks, ratio = dict[str, tuple[str, str]](), "{ratio:.2f}"
    for theirs, there in ((COMPILED, "there"), (TIGHT, "within it")):
        at_peaks[theirs] = (theirs, f"{ratio} at {{peak:MB}}")
        at_peaks |= {f"{kernels} {there}": (f"{kernels}, {theirs}", ratio) for kernels in OURS}
    kept = {way: (way, "{peak:MB}") for way in (PLAIN, COMPILED)}
    kept |= {str(kernels): (f"{kernels}, {KEEP}", "{peak:MB}") for kernels in OURS}
    smallest = "{budget:MB}, {of_eager:.2f}"
    kept |= {f"smallest, {kernels}": (f"{kernels}, {SMALLEST}", smallest) for kernels in OURS}
    starts = {COMPILED: COMPILED, **{str(kernels): f"{kernels}, {KEEP}" for kernels in OURS}}
    first = {f"{by}, {start}": (way, f"{{{start}:.1f}} s") for by, way in starts.items() for start in ("cold", "warm")}
    found = {"time of a step": at_peaks, "bytes": kept, "first step": first}
    return {title: table(title, columns).markdown() for title, columns in found.items()}


def markdown(rows: Sequence[Row]) -> str:
    """All tables, with a line that says where the rows are from."""
    return document(
        "Fused kernels, within the bytes",
        f"Made by `python -m benchmarks.kernels` at {where_from(rows)}, one thread. Each way trains in its own "
        "process, and steps take turns; seconds are beside those of plain PyTorch. Beside torch.compile without a "
        "budget, and with an activation memory budget of 0.1, ours with each `kernels=` keep within its measured peak. "
        "Bytes: of steps that keep everything, parameters and batch included, and smallest budgets, with their ratio "
        "to that of eager. First steps: with nothing on disk, and a second time; ours keep everything.",
        *tables(rows).values(),
        "![A Llama in bfloat16: time of a step against its peak](kernels.png)",
    )


def draw(rows_file: Path) -> None:
    """Draw a network's time of a step against its peak, beside the file of rows."""
    from matplotlib.figure import Figure

    def points(ways: Iterable[str]) -> tuple[list[float], list[float]]:
        some = sorted((run[way]["peak"] / 1e6, run[way]["ratio"]) for way in ways if "ratio" in run.get(way, {}))
        return [x for x, _ in some], [y for _, y in some]

    run = latest(read(rows_file))[DRAWN]
    figure = Figure(figsize=(10, 5.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot(xlabel="measured peak, MB", ylabel="seconds of a step, of plain PyTorch's")
    for kernels, (color, marker) in LOOKS.items():
        ways = [way for way in run if way.partition(",")[0] == kernels and not way.endswith(SMALLEST)]  # far above
        line: Any = {"color": color, "marker": marker, "ms": 7, "mfc": "white", "mew": 1.6, "lw": 1.2}
        axes.plot(*points(ways), **line, label=f'checkmate, kernels="{kernels}"')
    theirs = [f"{COMPILED}, budget {share}" for share in BUDGETS]
    for color, marker, label, ways in (
        (RED, "v", COMPILED, [COMPILED]),
        (RED, "^", f"{COMPILED}, activation memory budgets", theirs),
        (PURPLE, "P", f"{COMPILED}, checkpointed blocks", [CHECKPOINTS]),
        ("black", "*", "plain PyTorch", [PLAIN]),
    ):
        if points(ways)[0]:
            axes.plot(*points(ways), color=color, marker=marker, ms=9, ls="", label=label)
    axes.axhline(1.0, color="black", lw=0.6, alpha=0.5, zorder=0)
    axes.grid(alpha=0.3)
    axes.set_title("A Llama of 4 layers in bfloat16, on one thread of a CPU: time of a training step against its peak")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(rows_file.with_suffix(".png"), dpi=100, metadata={"Software": None})
