"""The rows of `benchmarks.peers` as one document with a table for each network, and a picture for each.

A peer counts where loss, gradients and buffers are those of the plain step, bit for bit. It is held against the
fastest of ours whose measured peak is at most its own. The same rounds timed both, so their ratios are compared
round by round: one is called slower where Wilcoxon's signed-rank test says so at 5 %, and else neither is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import wilcoxon

from benchmarks.common.rows import Column, Row, cell, read
from benchmarks.common.runner import document, table_of, where_from
from benchmarks.peers.settings import EAGER, OURS
from checkmate.core.answer import Table

SIGNIFICANT = 0.05
KEY = ("model", "family", "fingerprint")  # of rows that allocate the same, one by one
PEERS = ("checkpoint", "checkpoint_sequential", "selective", "compile + checkpoint", "compile budget")
STYLES = {  # marker and colour, from a palette that colour-blind eyes tell apart
    OURS: ("o-", "#0072b2"),
    "heuristics": ("P", "#56b4e9"),
    "eager": ("*", "black"),
    "checkpoint": ("s", "#d55e00"),
    "checkpoint_sequential": ("D", "#e69f00"),
    "selective": ("^", "#cc79a7"),
    "compile + checkpoint": ("v", "#009e73"),
    "compile budget": ("h", "#999999"),
    "inductor": ("<", "#f0e442"),
}


def latest(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """For each network the rows of each way from the last run that had it, in the order of the runs."""
    date = {(row["model"], row["family"]): row["date"] for row in rows}
    found: dict[str, list[Row]] = {row["model"]: [] for row in rows}
    for row in rows:
        if row["date"] == date[row["model"], row["family"]]:
            found[row["model"]].append(row)
    return found


def joined(rows: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """The rows of the comparison; ``process``, bytes with parameters and batch, where it is known."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEY)

    def with_process(row: Row) -> Row:
        found = known.get(key(row))
        if found is None or "error" in row:
            return row
        # older rows have the growth since some steps, which is beyond what is resident
        return row | {"process": found["process"] if "process" in found else row["resident"] + found["growth"]}

    known = {key(one): one for one in measured if "error" not in one}
    return [with_process(row) for row in rows]


def same_bits(row: Row) -> bool:
    """Whether loss, gradients and buffers are those of the plain step, or as near as plain steps are to each other."""
    same = bool(row.get("same_loss") and row.get("same_gradients") and row.get("same_buffers"))
    return same or 0.0 < row.get("plain_off", 0.0) >= row["off"]


def compared(peer: Row, rows: Sequence[Row], by: str = "peak") -> tuple[Row, float, str] | None:
    """The fastest of ours at the peer's peak or below, its time to the peer's, which is faster; None where none is.

    ``rows`` are of the peer's network; ``by``: what is to be as low, the peak that PyTorch counts or the ``"process"``.
    """

    def is_less(some: list[float], others: list[float]) -> bool:
        return some != others and bool(wilcoxon(some, others, alternative="less").pvalue < SIGNIFICANT)

    run = [row for row in rows if row["family"] == OURS and "error" not in row and row.get("date") == peer.get("date")]
    able = [row for row in run if by in row and row[by] <= peer[by]]
    if not able:
        return None
    best = min(able, key=lambda row: row["ratio"])
    ours, theirs = best["ratios"], peer["ratios"]
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return best, ratio, "faster" if is_less(ours, theirs) else "slower" if is_less(theirs, ours) else "even"


def summary(rows: Sequence[Row]) -> Row:
    """Sums of one network's rows."""
    worked = [row for row in rows if "error" not in row]
    eager = next(row for row in worked if row["family"] == EAGER.family)
    exact = [row for row in worked if row["family"] in PEERS and same_bits(row)]
    mine = [row for row in worked if row["family"] == OURS]
    verdicts = [compared(peer, worked) for peer in exact]
    found = [verdict for verdict in verdicts if verdict is not None]
    least = min(exact, key=lambda row: row["peak"], default=None)
    held = {family: [row for row in rows if "process" in row] for family, rows in (("ours", mine), ("peers", exact))}
    return {
        "model": eager["model"],
        "eager": eager["peak"],
        "ours": min((row["peak"] for row in mine), default=None),
        **{f"least resident, {who}": min((row["process"] for row in some), default=None) for who, some in held.items()},
        "peer": least,
        "wrong": sum(row["family"] in PEERS and not same_bits(row) for row in worked),
        "exact": len(exact),
        **{word: sum(v == word for _, _, v in found) for word in ("faster", "even", "slower")},
        "out of reach": len(verdicts) - len(found),
        "worst": max((ratio for _, ratio, _ in found), default=None),
        "at least": None if least is None else compared(least, worked),
    }


def short(rows: Sequence[Row]) -> str:
    """A small table: of each way the least peak, and ours at the least that has the same bits, and at its own least.

    What the machine gives decides, where that is known of a network.
    """

    def called(row: Row) -> str:
        name = "plain PyTorch" if row["family"] == EAGER.family else f"{row['family']}, {row['knob']}"
        return f"**{name}**" if row["family"] == OURS else name

    worked = [row for row in rows if "error" not in row]
    by = "process" if any("process" in row for row in worked) else "peak"
    worked = [row for row in worked if by in row]
    chosen = [row for row in worked if row["family"] == EAGER.family]
    of = {family: [row for row in worked if row["family"] == family] for family in PEERS}
    chosen += [min(some, key=lambda row: (row[by], row["ratio"])) for some in of.values() if some]
    exact = [row for some in of.values() for row in some if same_bits(row)]
    there = compared(min(exact, key=lambda row: row[by]), worked, by) if exact else None
    least = min((row for row in worked if row["family"] == OURS), key=lambda row: row[by])
    chosen += [least] if there is None or there[0] is least else [there[0], least]
    columns: dict[str, Column] = {
        chosen[0]["model"]: called,
        "process": "{process:MB}",
        "counted": "{peak:MB}",
        "step / plain": "{ratio:.2f}",
        "numbers": numbers,
    }
    return table_of(columns, chosen, {"numbers"}).markdown()


def render(rows_file: Path) -> None:
    """Write the document and the pictures next to a file of rows, and print the summary."""
    runs = runs_of(rows_file)
    folder = rows_file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for model, rows in runs.items():
        draw(rows, folder / f"{model}.png")
    rows_file.with_suffix(".md").write_text(page(runs, folder.name))
    print(_overall(runs))


def runs_of(rows_file: Path) -> dict[str, list[Row]]:
    """For each network the last rows of a file, with what the file beside it knows of the process."""
    measured = read(rows_file.with_name(f"{rows_file.stem}_resident.jsonl"))
    return {model: joined(rows, measured) for model, rows in latest(read(rows_file)).items()}


def page(runs: dict[str, list[Row]], folder: str) -> str:
    """The summary and the table of each network in Markdown; the pictures are in a folder."""
    every = [row for rows in runs.values() for row in rows]
    versions = ", ".join(sorted({row["torch"] for row in every}))
    intro = (
        f"Made by `python -m benchmarks.peers` at {where_from(every)}, PyTorch {versions}, "
        f"{every[0]['threads']} thread. Peaks are measured, parameters, buffers and batch included. *Process* is what "
        "the machine gives for the same: how far the peak resident set of a process in which nothing else has run is "
        "above that before the model was made, in rows with a `growth` parameters, buffers, batch, and growth since "
        "some steps have run; ours in an arena (`peers_resident.jsonl`; of ways with other numbers the lowest of each "
        "family was measured). *Beyond* is the peak less those and all gradients, relative to plain PyTorch. *Step* is "
        "the median time of a step relative to plain steps next to it, *spread* its quartiles. *First step* is "
        "everything until one step is done. *Numbers* says what differs from plain PyTorch after one step from the "
        "same state. *Ours*, for each peer with the same bits: the time of our fastest step at its peak or below, "
        "relative to its own; *faster* or *slower* where a signed-rank test over the rounds says so at 5 %."
    )
    sections = [part for model, rows in runs.items() for part in _section(model, rows, folder)]
    return document("Beside what people use today", intro, _overall(runs), *sections)


def _overall(runs: dict[str, list[Row]]) -> str:
    columns: dict[str, Column] = {
        "network": "{model}",
        "plain": "{eager:MB}",
        "least peak, ours": "{ours:MB}|–",
        "least peak, peers": "{peer[peak]:MB}|–",
        "by": "{peer[family]} {peer[knob]}|–",
        "least resident, ours": "{least resident, ours:MB}|–",
        "least resident, peers": "{least resident, peers:MB}|–",
        "ours there": "{at least[1]:.2f} of its time|–",
        "peers with other numbers": "{wrong}",
        "same bits": "{exact}",
        "ours faster": "{faster}",
        "even": "{even}",
        "slower": "{slower}",
        "out of reach": "{out of reach}",
        "worst": "{worst:.2f}|–",
    }
    return table_of(columns, map(summary, runs.values()), {"by"}).markdown()


def _section(model: str, rows: Sequence[Row], folder: str) -> list[str | Table]:
    worked = [row for row in rows if "error" not in row]
    eager = next(row for row in worked if row["family"] == EAGER.family)

    def verdict(peer: Row) -> str:
        if peer["family"] not in PEERS or not same_bits(peer):
            return ""
        against = compared(peer, worked)
        return "out of reach" if against is None else f"{against[1]:.2f} {against[2]}"

    columns: dict[str, Column] = {
        "way": "{family}",
        "knob": "{knob}",
        "peak": "{peak:MB}",
        "process": "{process:MB}",
        "beyond": lambda row: f"{row['beyond'] / eager['beyond']:.3f}",
        "step": "{ratio:.3f}",
        "spread": "{ratio_low:.3f} – {ratio_high:.3f}",
        "first step": "{first_step_seconds:.1f} s",
        "planned": "{plan_seconds:.1f} s",
        "recomputed": "{overhead:.1%}",
        "gap": "{gap:.1%}",
        "numbers": numbers,
        "ours": verdict,
    }
    ordered = sorted(worked, key=lambda row: (row["peak"], row["ratio"]))
    parts: list[str | Table] = [
        f"## {model}",
        cell(
            eager,
            "{ops} ops; parameters, buffers and batch {resident:MB}, gradients {gradients:MB}; "
            f"{len(eager['ratios'])} rounds; a plain step takes {{seconds:.2f}} s.",
        ),
        f"![{model}: time of a step against its peak]({folder}/{model}.png)",
        table_of(columns, ordered, {"knob", "numbers"}),
    ]
    failed = [f"- Failed: {row['family']} {row['knob']}: {row['error']}" for row in rows if "error" in row]
    return [*parts, *(["\n".join(failed)] if failed else [])]


def numbers(row: Row) -> str:
    """Differences from the plain step, in words."""
    if same_bits(row):
        return "same bits" if row["same_random_state"] else "same bits, other random state"
    wrong = [kind for kind in ("loss", "gradients", "buffers") if not row[f"same_{kind}"]]
    if row["within_tolerance"]:
        return f"{', '.join(wrong)} differ by rounding, {row['off']:.0e}"
    return f"{', '.join(wrong)} differ by {row['off']:.0%}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time of a step against peak; hollow and crossed where the numbers are not those of plain PyTorch."""
    from matplotlib.figure import Figure

    def points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        return [row["peak"] / 1e6 for row in rows], [row["ratio"] for row in rows]

    worked = [row for row in rows if "error" not in row]
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.add_subplot(xlabel="measured peak, MB, parameters and batch included", ylabel="step / plain step")
    for family, (style, color) in STYLES.items():
        some = sorted((row for row in worked if row["family"] == family), key=lambda row: row["peak"])
        right = [row for row in some if same_bits(row) or (not row["exact"] and row["within_tolerance"])]
        wrong = [row for row in some if row not in right]
        if right:
            axes.plot(*points(right), style, color=color, label=family, markersize=7)
        if wrong:
            label = None if right else family
            axes.plot(*points(wrong), style.rstrip("-"), color=color, label=label, markersize=7, fillstyle="none")
            axes.plot(*points(wrong), "x", color="#b00020", markersize=5, alpha=0.8)
    ours = [row for row in worked if row["family"] == OURS]
    for row in (min(ours, key=lambda row: row["peak"]),) if ours else ():
        note = f"{row['peak'] / 1e6:.0f} MB, {row['ratio']:.2f}"
        axes.annotate(note, (row["peak"] / 1e6, row["ratio"]), xytext=(6, 6), textcoords="offset points", fontsize=9)
    highest = [row["ratio"] for row in worked if row["family"] in PEERS]
    if highest and ours:  # ours may go on far above, where no peer is
        axes.set_ylim(top=min(1.15 * max(row["ratio"] for row in worked), max(2.0, 1.4 * max(highest))))
    axes.plot([], [], "x", color="#b00020", label="numbers are not those of plain PyTorch")
    floor = (worked[0]["resident"] + worked[0]["gradients"]) / 1e6
    axes.axvline(floor, color="black", linewidth=0.8, linestyle=":", label="parameters, batch and gradients alone")
    axes.set_xlim(left=0.96 * min(floor, *(row["peak"] / 1e6 for row in worked)))
    axes.axhline(1.0, color="black", linewidth=0.6, alpha=0.5)
    axes.set_title(f"{worked[0]['model']}: step time against peak")
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=110)
