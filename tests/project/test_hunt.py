"""The random programs of `benchmarks.hunt`: always the same, told right from wrong, and made small."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.hunt import count, reduce, run
from benchmarks.hunt.write import COMPILED, FAMILIES, HEAD, LATER, LATER_FAMILIES, lines_of, load, program
from tests.support.sampling import long

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = f"""HOW = {{'backward': 'loss', 'threads': 1, 'optimizer': 'SGD(P, lr=0.1)'}}
{HEAD}

def make():
    return [torch.ones(4, 6).requires_grad_()], [torch.ones(4, 6)], []


def fn(p, x, B):
    v0 = (p[0] * x[0]).sin()
    v1 = v0.exp().tanh()
    v2 = v1.cos()
    loss = part(v2)
    return loss, v0.detach()
"""


def test_a_number_is_a_program() -> None:
    assert all(len(lines_of(name)) > 20 for name in (*FAMILIES, *LATER_FAMILIES))
    for number in (*range(30), *range(LATER, LATER + 10)):
        text = program(number)
        assert text == program(number)
        assert {"HOW", "make", "fn"} <= load(text).keys()


def test_later_programs_have_compiled_kernels() -> None:
    def drawn(numbers: range) -> set[str | None]:
        return {load(program(number))["HOW"].get("kernels") for number in numbers}

    assert drawn(range(COMPILED - 10, COMPILED)) == {None}
    assert drawn(range(COMPILED, COMPILED + 20)) == {None, "same-bits", "fused"}


def _by(kernels: str) -> str:
    return TEXT.replace("HOW = {", f"HOW = {{'kernels': {kernels!r}, ")


@pytest.mark.parametrize("kernels", [long("same-bits"), long("fused")])
def test_a_program_runs_by_compiled_kernels(kernels: str) -> None:
    assert run.outcome(_by(kernels))["outcome"] == "same"


@pytest.mark.long
@pytest.mark.parametrize(("times", "outcome"), [(-1, "far"), (1.001, "wrong")])
def test_fused_kernels_are_near_plain_and_repeat_their_bits(
    times: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs of theirs are far from plain PyTorch, or near, and one has other bits."""
    train, compiled_runs = run.train, list[str]()

    def differently(text: str, wrap: Any, *rest: Any) -> Any:
        found, step = train(text, wrap, *rest)
        compiled_runs.extend([] if wrap is None else [text])
        if outcome == "far" or len(compiled_runs) == 2:
            found["result 0 of step 1"] = found["result 0 of step 1"] * (1 if wrap is None else times)
        return found, step

    monkeypatch.setattr(run, "train", differently)
    row = run.outcome(_by("fused"))
    assert row["outcome"] == outcome
    assert row["why"].startswith("1 differ: ")
    assert "result 0 of step 1" in row["why"]


@pytest.mark.slow
def test_one_capture_runs_by_several_plans() -> None:
    row = run.outcome(TEXT)
    assert (row["outcome"], row["swaps"]) == ("same", 2)


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["wrong", "wavering"])
def test_what_differs_is_told(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where plain PyTorch comes to the same other bits."""
    train, plain_runs = run.train, list[str]()

    def differently(text: str, wrap: Any, *rest: Any) -> Any:
        found, step = train(text, wrap, *rest)
        plain_runs.extend([text] if wrap is None else [])
        if wrap is not None or (outcome == "wavering" and len(plain_runs) > 5):
            found["result 0 of step 1"] = -found["result 0 of step 1"]
        return found, step

    monkeypatch.setattr(run, "train", differently)
    row = run.outcome(TEXT)
    assert row["outcome"] == outcome
    assert outcome == "wavering" or row["why"] == "1 differ: ['result 0 of step 1']"


def test_a_program_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(text: str) -> dict[str, str]:
        scope = load(text)
        run.train(text, None)
        return {"outcome": "wrong" if "exp()" in text and scope["HOW"]["backward"] == "retain" else "same"}

    monkeypatch.setattr(reduce, "outcome", outcome)
    small = reduce.reduced(TEXT.replace("'loss', 'threads': 1", "'retain', 'threads': 2"))
    assert "HOW = {'backward': 'retain', 'threads': 1, 'optimizer': 'SGD(P, lr=0.01)'}" in small
    assert "    v1 = v0.exp()" in small
    assert small.endswith("return loss\n")


@pytest.mark.long
def test_a_block_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ["hunt", "--count", "3", "--block", "2", "--out", str(rows)]
    for _ in range(2):  # the second run has nothing to do
        monkeypatch.setattr("sys.argv", arguments)
        count.main()
        assert len(rows.read_text().splitlines()) == 2
    assert "3 programs" in capsys.readouterr().out
