"""The rows of `benchmarks.census` as counts, and as a page that names what is not right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common.rows import Row, latest, read
from checkmate.core.answer import Table

Rows = Mapping[str, Row]
NOT_COUNTED = ("untrained", "wavering")  # by plain PyTorch itself
KINDS = {  # what may come of a model that counts, and what the tables call it
    "right": "right",
    "refused": "refused",
    "wrong": "other bits",
    "peak": "peak off its plan",
    "error": "raw exception",
    "timeout": "no end",
}
LIBRARIES = {"transformers": "language models of transformers", "timm": "families of timm"}
LONGEST = 180  # characters of a reason


def by_model(path: Path) -> dict[str, Row]:
    """The last row of each model, in the order of their names."""
    return {row["model"]: row for row in sorted(latest(read(path), "model"), key=lambda row: row["model"].lower())}


def counted(rows: Rows) -> list[Row]:
    """Rows of models that plain PyTorch trains, and repeats bit for bit."""
    return [row for row in rows.values() if row["status"] not in NOT_COUNTED]


def short(row: Row) -> str:
    """The outcome of one model, in a line."""
    return f"{KINDS.get(row['status'], row['status'])} {reason(row)}".rstrip() + f" ({row['wall_seconds']:.0f} s)"


def reason(row: Row) -> str:
    """Why a model is not right, or not counted; empty where it is right."""
    if row["status"] == "peak":
        off = row["measured_peak"] - row["predicted_peak"]
        return f"measured {off:+,} bytes off the {row['predicted_peak']:,} of its plan"
    if row["status"] == "wrong":
        return f"{row['wrong']} tensors differ, first the {next(iter(row['differs']))}"
    said = re.sub(r"^Cannot capture \S+: ", "", row.get("error", ""))
    said = said if len(said) <= LONGEST else f"{said[: LONGEST - 1].rstrip()}…"
    return f"{row['class']}: {said}" if "class" in row and row["status"] != "refused" else said


def counts(rows: Rows) -> str:
    """The counts as a table in Markdown, a row for each library."""
    heads = ["", "run", "counted", *KINDS.values()]
    lines = []
    for library, called in LIBRARIES.items():
        if own := {name: row for name, row in rows.items() if row["library"] == library}:
            some = counted(own)
            kinds = [sum(row["status"] == kind for row in some) for kind in KINDS]
            lines.append([called, *map(str, (len(own), len(some), *kinds))])
    return Table(heads, lines, heads[1:]).markdown()


def markdown(rows: Rows) -> str:
    """The counts, and a list of what is not right or not counted."""
    some = counted(rows)
    wrong = [row for row in some if row["status"] != "right"]
    again = sum(row.get("overhead", 0.0) > 0 for row in some if row["status"] == "right")
    made = ", ".join(sorted({f"{row['library']} {row['version']}" for row in rows.values()}))
    torch = ", ".join(sorted({row["torch"] for row in rows.values()}))
    left_out = "" if any(row["library"] == "timm" for row in rows.values()) else " Networks of timm were left out."
    minutes = sum(row["seconds"] for row in rows.values()) / 60
    lines = [
        "# Every architecture of two libraries",
        "",
        "The language models that transformers lists (causal, masked, sequence to sequence) and one network of",
        "each family of timm, as far as they have a row: tiny and with random weights, trained for two steps plainly,",
        "and compiled at 30 % of the way from the smallest budget to keeping everything. *Counted* are those that",
        "plain PyTorch trains and repeats bit for bit. *Right*: losses, gradients, parameters, buffers and random",
        "state have the same bits, and the measured peak is that of the plan;",
        f"{again} of these ran ops again.{left_out}",
        "",
        counts(rows),
        "",
        f"Made by `python -m benchmarks.census` with {made} and PyTorch {torch}, in {minutes:.0f} minutes of one core.",
        "These are not right:" if wrong else "All are right.",
    ]
    if wrong:
        cells = [(f"`{row['model']}`", KINDS[row["status"]], reason(row)) for row in wrong]
        lines += ["", Table(("model", "result", "why"), cells).markdown()]
    aside = {row["model"]: reason(row) for row in rows.values() if row["status"] in NOT_COUNTED}
    if aside:
        lines += ["", "Not counted, for what plain PyTorch says, or because they could not be made small:", ""]
    for model, why in aside.items():
        text = (why or "other bits the second time").replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"- `{model}`: {text}")
    return "\n".join([*lines, ""])
