"""A program made small: statements and settings left out, as long as the same comes of it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hunt.run import outcome
from benchmarks.hunt.write import load

DEFAULTS = {"backward": "loss", "threads": 1, "optimizer": "SGD(P, lr=0.01)"}


def reduced(text: str) -> str:
    """The smallest program found of which the same comes: as wrong, or as raw for the same reason."""
    wanted = _like(text)
    smaller = True
    while smaller:
        smaller = False
        for other in _smaller(text):
            if _like(other) == wanted:
                text, smaller = other, True
                break
    return text


def _like(text: str) -> tuple[str, str]:
    try:
        row = outcome(text)
    except Exception:  # noqa: BLE001  # it is no program any more
        return "", ""
    return row["outcome"], "" if row["outcome"] == "wrong" else row.get("why", "")[:60]


def _smaller(text: str) -> Iterator[str]:
    head, fn, body = text.partition("def fn(p, x, B):\n")
    head, lines = head + fn, body.splitlines()
    for size in (len(lines) // 2, len(lines) // 4, 1):
        for start in range(0, len(lines), max(1, size)) if size else ():
            yield head + "\n".join([*lines[:start], *lines[start + size :]]) + "\n"
    for i, line in enumerate(lines):
        parts = line.strip().split("; ")
        for k in range(len(parts)) if len(parts) > 1 else ():
            fewer = "; ".join([*parts[:k], *parts[k + 1 :]])
            yield head + "\n".join([*lines[:i], f"    {fewer}", *lines[i + 1 :]]) + "\n"
        if line.startswith("    return loss,"):
            yield head + "\n".join([*lines[:i], "    return loss"]) + "\n"
    how = load(text, "reduced")["HOW"]
    for key in how:
        other = {**how, key: DEFAULTS[key]} if key in DEFAULTS else {k: v for k, v in how.items() if k != key}
        if other != how:
            yield text.replace(f"HOW = {how!r}\n", f"HOW = {other!r}\n")
