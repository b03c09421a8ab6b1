"""Bytes as text and back."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import BudgetError, CheckmateError
from checkmate.units import exact_bytes, format_bytes, format_seconds, parse_bytes, parse_share

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("1 B", 1),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("  1.5 GiB ", 3 * 2**29),
        (".5 KiB", 512),
        ("1_500 kB", 1_500_000),
        ("2 MB", 2_000_000),
        ("2 MiB", 2 * 2**20),
        ("1 TiB", 2**40),
        ("0.1 GB", 100_000_000),
        ("8G", 8 * 10**9),
        ("8 g", 8 * 10**9),
        ("512M", 512 * 10**6),
        ("64K", 64_000),
        ("2T", 2 * 10**12),
        ("8Gi", 8 * 2**30),
        ("2_162_592 B", 2_162_592),
        ("4096.9", 4096),
        ("9007199254740993", 2**53 + 1),  # as a float it would be 2**53
        ("9223372036854775808", 2**63),
    ],
)
def test_text(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        *(("fit", 1.0), (" Fit ", 1.0), ("100%", 1.0), ("70%", 0.7), (" 12.5 % ", 0.125), (".5%", 0.005)),
        *(("8 GB", None), ("1e9", None), (0.7, None), (4096, None), (None, None)),
    ],
)
def test_shares_of_what_there_is(budget: object, share: float | None) -> None:
    assert parse_share(budget) == share


@pytest.mark.parametrize("text", ["fits", "", "lots", "-5%", "120%", "%", "0%", "7e1%", "fit%", "70%%", "٣%"])
def test_what_is_no_share_of_what_there_is(text: str) -> None:
    with pytest.raises(
        BudgetError, match=r"'fit'.* or '70%' of that|more than 0% and 100% at most, such as '70%'"
    ) as error:
        parse_share(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("budget", [4096, 4096.0, np.int64(4096), np.float32(4096), 4096.9])
def test_numbers(budget: float) -> None:
    parsed = parse_bytes(budget)
    assert parsed == 4096
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("", "Cannot read the budget ''"),
        ("lots", "Cannot read the budget 'lots'"),
        ("-1 GB", "Cannot read the budget '-1 GB'"),
        ("1e9", "Cannot read the budget '1e9'"),
        ("8 GBB", "Unknown unit 'GBB'"),
        ("8 X", "Unknown unit 'X'"),
        ("1.5", "whole number of bytes, not 1.5. Write '1.5 GB' for gigabytes"),
        ("24.5 B", "whole number of bytes, not 24.5"),
        (1.5, "whole number of bytes, not 1.5. Write '1.5 GB' for gigabytes"),
        (999.5, "whole number of bytes, not 999.5"),
        (np.float64(1.5), "whole number of bytes, not 1.5"),
        ("1.2.3 GB", "Cannot read"),
        ("0 GB", "at least one byte: '0 GB' is 0 bytes"),
        ("0.5", "at least one byte: '0.5' is 0.5 bytes"),
        ("0.0001 kB", "at least one byte"),
        ("٣ GB", "Cannot read"),
        (0, "positive number of bytes, not 0"),
        (-1, "positive number of bytes, not -1"),
        (0.5, "not a ratio: 0.5"),
        (0.07, "not a ratio: 0.07.*'7%'"),
        (float("nan"), "finite number of bytes, not nan"),
        (float("inf"), "finite number of bytes, not inf"),
        (True, "not True"),
        (None, "not None"),
        ([1], r"not \[1\]"),
        (1j, "not 1j"),
        ("9" * 400, "between 1 and 2"),
        ("9" * 400 + " GB", "between 1 and 2"),
        ("9223372.1 TB", "between 1 and 2"),
        ("1e999 GB", "Cannot read the budget '1e999 GB'"),
        pytest.param(10**400, "between 1 and 2", id="10**400"),
        pytest.param(-(10**400), "between 1 and 2", id="-(10**400)"),
        (Fraction(10**400), "between 1 and 2"),
        (Fraction(1, 3), "not a ratio: .*'33.3333%'"),
    ],
)
def test_refused(budget: object, says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        parse_bytes(budget)


def test_a_budget_error_is_a_value_error_and_ours() -> None:
    assert issubclass(BudgetError, ValueError)
    assert issubclass(BudgetError, CheckmateError)


@given(st.integers(min_value=1, max_value=10**15))
def test_whole_numbers_survive(count: int) -> None:
    assert parse_bytes(str(count)) == parse_bytes(f"{count} B") == parse_bytes(count) == count


@given(st.integers(min_value=1, max_value=10**15))
def test_what_is_written_reads_back_to_its_digits(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * 1000 ** ((len(str(count)) - 1) // 3) + 0.5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (1_500_000_000, "1.50 GB"),
        (-2_000_000, "-2.00 MB"),
        (5 * 10**15, "5000.00 TB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 µs"), (1e-7, "0.1 µs"), (0.0123, "12.3 ms"), (1.0, "1.0 s"), (90.0, "90.0 s")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(min_value=1000, max_value=10**15))
def test_exact_bytes_can_be_pasted_as_a_budget(count: int) -> None:
    (digits,) = re.findall(r"\((.*) bytes\)", exact_bytes(count))
    assert parse_bytes(digits) == count
    assert exact_bytes(count).startswith(f"{format_bytes(count)} (")


def test_all_write_bytes_in_this_one_form() -> None:
    """A number of bytes in full comes from `exact_bytes`; only `files`, of the same layer, cannot import that."""
    written = {"units.py", "files.py"}
    sources = [
        p for folder in ("checkmate", "solvers", "profiling", "benchmarks") for p in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 100
    for source in sources:
        found = re.findall(r"\{[^{}\n]*:[_,]\}\)? bytes", source.read_text())
        assert source.name in written or not found, f"{source}: {found}"
