"""Results of two runs are equal bit for bit: how every test says it that compares with plain PyTorch."""

from __future__ import annotations

from typing import Any

from checkmate.backends.tensor_state import differing

SHOWN = 8


def assert_same_bits(found: Any, expected: Any) -> None:
    """Two tensors, or trees or iterators of tensors and other things, have the same shapes, types and bits.

    Raises:
        AssertionError: that names where in the tree they have not.
    """
    where = differing(found, expected)
    more = f" and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    assert not where, f"not the same bits: {', '.join(path or 'all of it' for path in where[:SHOWN])}{more}"
