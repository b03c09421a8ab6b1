"""Bytes as people write them, and back: ``"1.5 GB"`` is 1,500,000,000 and ``"1 GiB"`` is 2**30."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from checkmate.errors import BudgetError

_PREFIXES = ("", "k", "m", "g", "t", "p")
_UNITS = {
    **{f"{prefix}{b}": 1000**power for power, prefix in enumerate(_PREFIXES) for b in ("", "b")},
    **{f"{prefix}i{b}": 1024**power for power, prefix in enumerate(_PREFIXES) for b in ("", "b") if prefix},
}
_MOST = 2**63  # bytes that a machine can address; what is computed with them stays far below the largest float
_FEW = 1000  # of fewer bytes a fraction is no rounding of a large number: GB were meant, or a share
_BEYOND = "A budget is between 1 and 2**63 bytes, more than any machine has. Write for example '8 GB'."
_NOT_WHOLE = "A budget is a whole number of bytes, not {0}. Write '{0} GB' for gigabytes."
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)
_BYTES = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_bytes(budget: int | float | str) -> int:
    """Read a number of bytes.

    Args:
        budget: a positive count of bytes, or text such as ``"8 GB"`` (10**9) or ``"512 MiB"`` (2**20). The B may be
            left out: ``"8G"`` is 8 GB, and ``"8Gi"`` 8 GiB, as Kubernetes writes them. The G of Slurm and Docker is a
            GiB, so that a number taken over from there stays below theirs.

    Raises:
        BudgetError: if it is not a positive, finite number of whole bytes, or its unit is unknown.

    >>> parse_bytes("1.5 GB"), parse_bytes("2 GiB"), parse_bytes("8G"), parse_bytes(4096)
    (1500000000, 2147483648, 8000000000, 4096)
    """
    if isinstance(budget, str):
        # Text: a number and a unit.
        match = _BYTES.fullmatch(budget)
        if match is None:
            raise BudgetError(
                f"Cannot read the budget {budget!r}. Write for example '8 GB', '512 MiB' or 1_500_000_000."
            )
        number, unit = match.groups()
        scale = _UNITS.get(unit.lower())
        if scale is None:
            raise BudgetError(
                f"Unknown unit {unit!r} in the budget {budget!r}. "
                "Use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB; B is optional."
            )
        if Decimal(number) > _MOST // scale:
            raise BudgetError(_BEYOND)
        value = Decimal(number) * scale
        if value < 1:
            raise BudgetError(f"A budget is at least one byte: {budget!r} is {value:f} bytes.")
        if scale == 1 and value < _FEW and value != int(value):
            raise BudgetError(_NOT_WHOLE.format(number))
        return int(value)
    # A number: finite, positive, whole, and not a share.
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise BudgetError(f"A budget is a number of bytes or text such as '8 GB', not {budget!r}.")
    if not -math.inf < budget < math.inf:
        raise BudgetError(f"A budget is a finite number of bytes, not {budget!r}.")
    if abs(budget) > _MOST:
        raise BudgetError(_BEYOND)
    if 0 < budget < 1:
        raise BudgetError(
            f"A budget is a number of bytes, not a ratio: {budget!r}. Write for example '8 GB', "
            f"int({budget!r} * problem.keep_all_peak), or, of what there is where a step runs, "
            f"'{100 * float(budget):g}%'."
        )
    if budget <= 0:
        raise BudgetError(f"A budget is a positive number of bytes, not {budget!r}.")
    if budget < _FEW and budget != int(budget):
        raise BudgetError(_NOT_WHOLE.format(budget))
    return int(budget)


def parse_budget(budget: int | float | str) -> int:
    """Read the bytes of a training step as `parse_bytes` does, but for a small number without a unit: GB were meant.

    Raises:
        BudgetError: if it is no number of bytes, or a bare number below a thousand.

    >>> parse_budget("8 GB"), parse_budget("8 B"), parse_budget(4096)
    (8000000000, 8, 4096)
    """
    count, number = parse_bytes(budget), str(budget).strip()
    if count < _FEW and number[-1] not in "bB":
        raise BudgetError(f"A budget of {number} is {count} bytes. Did you mean '{number} GB'? For bytes, '{count} B'.")
    return count


def parse_share(budget: object) -> float | None:
    """Parse a budget that is a share of the free memory: "fit", all of it, or "70%". None if it is in bytes.

    Raises:
        BudgetError: if it is text that is neither, and no bytes either.

    >>> parse_share("fit"), parse_share("70%"), parse_share("8 GB")
    (1.0, 0.7, None)
    """
    if not isinstance(budget, str) or ("%" not in budget and re.search(r"\d", budget)):
        return None
    if budget.strip().lower() == "fit":
        return 1.0
    if "%" not in budget:
        raise BudgetError(
            f"Cannot read the budget {budget!r}. Write for example '8 GB', or 'fit' for what there is where the step "
            "runs, or '70%' of that."
        )
    match = _SHARE.fullmatch(budget)
    share = Decimal(match[1]) / 100 if match else Decimal(0)
    if not 0 < share <= 1:
        raise BudgetError(f"Of what there is a budget is more than 0% and 100% at most, such as '70%', not {budget!r}.")
    return float(share)


def parse_rate(rate: float | str) -> float:
    """Read bytes per second: a positive number, or text such as ``"55 GB/s"``, with or without the ``/s``.

    Raises:
        ValueError: if it is none.

    >>> parse_rate("55 GB/s"), parse_rate("512MiB"), parse_rate(1e9)
    (55000000000.0, 536870912.0, 1000000000.0)
    """
    try:
        return float(parse_bytes(re.sub(r"\s*(/\s*s|ps)\s*$", "", rate) if isinstance(rate, str) else rate))
    except BudgetError:
        raise ValueError(f"A rate is a number of bytes per second, such as '55 GB/s', not {rate!r}.") from None


def check_positive(name: str, value: Any, unit: str = "", most: float = sys.float_info.max) -> None:
    """Raise a ValueError unless the value is a positive number of at most ``most``.

    >>> check_positive("time_limit", "60s", " of seconds")
    Traceback (most recent call last):
    ValueError: time_limit is a positive number of seconds, not '60s'.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        raise ValueError(f"{name} is a positive number{unit}, not {value!r}.")


def format_bytes(count: float, *, up: bool = False) -> str:
    """Write a number of bytes for a person, in powers of ten as ``parse_bytes`` reads them.

    ``up``: round up, for a budget: the text is read as a number of bytes that is no smaller.

    >>> format_bytes(1_500_000_000), format_bytes(812), format_bytes(14_254_080), format_bytes(14_254_080, up=True)
    ('1.50 GB', '812 B', '14.25 MB', '14.26 MB')
    """
    if abs(count) < 1000:
        return f"{count:.0f} B"
    for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1):
        hundredth = 10 ** (3 * power - 2)
        shown = -(-int(count) // hundredth) * hundredth if up else count
        if abs(shown) < 999.995 * 1000**power or unit == "TB":
            break
    return f"{shown / 1000**power:.2f} {unit}"


def exact_bytes(count: int, *, up: bool = False) -> str:
    """Write a number of bytes exactly too, as Python and ``parse_bytes`` read it: for errors. ``up`` as above.

    >>> exact_bytes(2_162_592), exact_bytes(2_162_592, up=True), exact_bytes(812)
    ('2.16 MB (2_162_592 bytes)', '2.17 MB (2_162_592 bytes)', '812 B')
    """
    return format_bytes(count) if abs(count) < 1000 else f"{format_bytes(count, up=up)} ({count:_} bytes)"


def format_seconds(seconds: float) -> str:
    """Write a duration for a person.

    >>> format_seconds(0.0123), format_seconds(75.0), format_seconds(2e-6)
    ('12.3 ms', '75.0 s', '2.0 µs')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 1e-6:.1f} µs"


def signed(amount: float, form: Callable[[float], str]) -> str:
    """Write a change with its sign; without one if it rounds to zero.

    >>> signed(2e6, format_bytes), signed(-0.5, format_seconds), signed(-1e-9, format_seconds)
    ('+2.00 MB', '-500.0 ms', '0.0 µs')
    """
    text = form(abs(amount))
    return text if text == form(0) else f"{'+' if amount > 0 else '-'}{text}"
