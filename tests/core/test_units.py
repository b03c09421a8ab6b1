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
from checkmate.units import exact_bytes, format_bytes, format_seconds, parse_budget, parse_bytes, parse_share
from tests.support.sampling import in_turn

ROOT = Path(__file__).parents[2]


TEXTS = {
    "1": 1, "1 B": 1, "8 GB": 8 * 10**9, "8gb": 8 * 10**9, "8G": 8 * 10**9, "8 g": 8 * 10**9, "8Gi": 8 * 2**30,
    "  1.5 GiB ": 3 * 2**29, ".5 KiB": 512, "1_500 kB": 1_500_000, "64K": 64_000, "2 MB": 2_000_000, "2 MiB": 2 * 2**20,
    "512M": 512 * 10**6, "0.1 GB": 100_000_000, "1 TiB": 2**40, "2T": 2 * 10**12, "2_162_592 B": 2_162_592,
    "4096.9": 4096, "9007199254740993": 2**53 + 1, "9223372036854775808": 2**63,  # as floats they would be others
}  # fmt: skip


@in_turn(text=TEXTS)
def test_text(text: str) -> None:
    assert parse_bytes(text) == TEXTS[text]


@in_turn(budget=[8, 8.0, "8", " 999 ", np.int64(24)])
def test_a_small_number_without_a_unit_is_asked_about(budget: float | str) -> None:
    assert parse_bytes(budget) < 1000
    with pytest.raises(BudgetError, match=r"A budget of [\d.]+ is \d+ bytes. Did you mean '[\d.]+ GB'\? For bytes, "):
        parse_budget(budget)


@in_turn(budget=[1000, "1000", "8 B", "8b", "1 kB", "8G"])
def test_other_numbers_are_taken_as_they_are(budget: float | str) -> None:
    assert parse_budget(budget) == parse_bytes(budget)


SHARES = {"fit": 1.0, " Fit ": 1.0, "100%": 1.0, "70%": 0.7, " 12.5 % ": 0.125, ".5%": 0.005}
SHARES |= dict.fromkeys(("8 GB", "1e9", 0.7, 4096, None))


@in_turn(budget=SHARES)
def test_shares_of_what_there_is(budget: object) -> None:
    assert parse_share(budget) == SHARES[budget]


@in_turn(text=["fits", "", "lots", "-5%", "120%", "%", "0%", "7e1%", "fit%", "70%%", "٣%"])
def test_what_is_no_share_of_what_there_is(text: str) -> None:
    says = r"'fit'.* or '70%' of that|more than 0% and 100% at most, such as '70%'"
    with pytest.raises(BudgetError, match=says) as error:
        parse_share(text)
    assert repr(text) in str(error.value)


@in_turn(budget=[4096, 4096.0, np.int64(4096), np.float32(4096), 4096.9])
def test_numbers(budget: float) -> None:
    parsed = parse_bytes(budget)
    assert (parsed, type(parsed)) == (4096, int)


REFUSED: dict[str, list[object]] = {
    "Cannot read the budget": ["", "lots", "-1 GB", "1e9", "1e999 GB", "1.2.3 GB", "٣ GB"],
    "Unknown unit 'GBB'": ["8 GBB"],
    "Unknown unit 'X'": ["8 X"],
    "whole number of bytes, not 1.5. Write '1.5 GB' for gigabytes": ["1.5", 1.5, np.float64(1.5)],
    "whole number of bytes, not 24.5": ["24.5 B"],
    "whole number of bytes, not 999.5": [999.5],
    "at least one byte: '0 GB' is 0 bytes": ["0 GB"],
    "at least one byte: '0.5' is 0.5 bytes": ["0.5"],
    "at least one byte": ["0.0001 kB"],
    "positive number of bytes, not 0": [0],
    "positive number of bytes, not -1": [-1],
    "not a ratio: 0.5": [0.5],
    "not a ratio: 0.07.*'7%'": [0.07],
    "not a ratio: .*'33.3333%'": [Fraction(1, 3)],
    "finite number of bytes, not nan": [float("nan")],
    "finite number of bytes, not inf": [float("inf")],
    "not True": [True],
    "not None": [None],
    r"not \[1\]": [[1]],
    "not 1j": [1j],
    "between 1 and 2": [10**400, -(10**400), Fraction(10**400), "9" * 400, "9" * 400 + " GB", "9223372.1 TB"],
}


@in_turn(case=[(budget, says) for says, budgets in REFUSED.items() for budget in budgets])
def test_refused(case: tuple[object, str]) -> None:
    budget, says = case
    with pytest.raises(BudgetError, match=says) as error:
        parse_bytes(budget)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, CheckmateError)
    assert not says.startswith("Cannot read") or repr(budget) in str(error.value)


@given(st.integers(min_value=1, max_value=10**15))
def test_whole_numbers_survive_and_what_is_written_reads_back_to_its_digits(count: int) -> None:
    assert parse_bytes(str(count)) == parse_bytes(f"{count} B") == parse_bytes(count) == count
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.005 * 1000 ** ((len(str(count)) - 1) // 3) + 0.5
    if count >= 1000:
        (digits,) = re.findall(r"\((.*) bytes\)", exact_bytes(count))  # which can be pasted as a budget
        assert parse_bytes(digits) == count
        assert exact_bytes(count).startswith(f"{format_bytes(count)} (")
    budget, _, _ = exact_bytes(count, up=True).partition(" (")
    assert 0 <= parse_bytes(budget) - count < 10 ** max(0, len(str(count)) - 3)


BYTES = {
    0: "0 B", 999: "999 B", 1000: "1.00 kB", 999_994: "999.99 kB", 999_996: "1.00 MB", 15 * 10**8: "1.50 GB",
    -2_000_000: "-2.00 MB", 5 * 10**15: "5000.00 TB",
}  # fmt: skip
SECONDS = {0.0: "0.0 µs", 1e-7: "0.1 µs", 0.0123: "12.3 ms", 1.0: "1.0 s", 90.0: "90.0 s"}


def test_bytes_and_seconds_as_text() -> None:
    assert {number: format_bytes(number) for number in BYTES} == BYTES
    assert {number: format_seconds(number) for number in SECONDS} == SECONDS


def test_all_write_bytes_in_this_one_form() -> None:
    """A number of bytes in full comes from `exact_bytes`; only `files`, of the same layer, cannot import that."""
    written = {"units.py", "files.py"}
    folders = [ROOT / name for name in ("checkmate", "solvers", "profiling", "benchmarks")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 100
    for source in sources:
        found = re.findall(r"\{[^{}\n]*:[_,]\}\)? bytes", source.read_text())
        assert source.name in written or not found, f"{source}: {found}"
