"""What a word of a command line stands for, for options that are neither text nor a plain number."""

from __future__ import annotations

import argparse


def size(text: str) -> int:
    """A size of a batch, or another count: a whole number of at least 1.

    >>> size("12")
    12
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def overhead(text: str) -> float | str | None:
    """A cap on recomputation, as `checkmate.max_batch_size` takes it.

    >>> overhead("none"), overhead("one-forward"), overhead("0.3")
    (None, 'one-forward', 0.3)
    """
    if text in ("none", "one-forward"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither one-forward, none nor a share such as 0.3") from None
