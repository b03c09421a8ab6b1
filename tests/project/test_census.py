"""The census: what it makes of a model, and that its document says what its rows say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import checkmate
from benchmarks.census import count as census
from benchmarks.census import report as census_report
from benchmarks.census import study as census_study
from benchmarks.census import text as census_text
from checkmate.errors import Unsupported

BERT = "BertForMaskedLM"
ROWS = census_report.by_model(census.RESULTS)


class Small(nn.Module):
    """Batch norm, so that there are buffers, and an activation to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def _make(name: str) -> census_study.Built:
    torch.manual_seed(0)
    model = Small()
    return model, lambda x: model(x), {"x": torch.randn(64, 8)}


def _study(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """The row of a small model, whose compiled step gives what ``change`` makes of its loss."""
    monkeypatch.setattr(census_study, "make", _make)
    monkeypatch.setattr(census_study, "PLANNING", 0.3)
    if change is not None:
        compile_it = checkmate.compile

        def compiled(step: Any, **options: Any) -> Any:
            found: Any = compile_it(step, **options)

            class Other:
                plans = property(lambda self: found.plans)

                def __call__(self, **batch: Tensor) -> Tensor:
                    return change(found(**batch))

            return Other()

        monkeypatch.setattr(checkmate, "compile", compiled)
    *_, row = census_study.study("small")
    return row


@pytest.mark.slow
def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    row = _study(monkeypatch, lambda loss: loss * (1 + 2**-23))
    assert row["status"] == "wrong"
    assert row["differs"]["loss of step 1"] == pytest.approx(2**-23, rel=1)
    assert any(name.startswith("gradient of layers.0.0.weight") for name in row["differs"])


@pytest.mark.long
def test_a_peak_off_the_plan_is_found(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    held: list[Tensor] = []

    def change(loss: Tensor) -> Tensor:
        held.append(torch.empty(1 << 20))
        return loss

    row = _study(monkeypatch, change)
    assert row["status"] == "peak"
    assert row["measured_peak"] == row["predicted_peak"] + 4 * (1 << 20)


def test_bits_are_compared_and_nothing_may_be_missing() -> None:
    zero, minus, nan = torch.zeros(2), -torch.zeros(2), torch.full((2,), float("nan"))
    expected = {"a": zero, "b": nan, "c": torch.ones(2)}
    for found, differs in (
        ({**expected, "c": torch.ones(2)}, {}),
        ({**expected, "c": torch.tensor([1.0, 1.5])}, {"c": 0.5}),
        ({"a": zero, "b": nan}, {"c": None}),
    ):
        assert census_study.differing(*(census_study.Outcome(of, 0, 0) for of in (found, expected))) == differs
    found = {**expected, "a": minus, "d": zero}
    assert [*census_study.differing(*(census_study.Outcome(of, 0, 0) for of in (found, expected)))] == ["a", "d"]


def test_what_a_step_replaces_was_there_before_it(one_thread: None) -> None:
    """A state that a module keeps from step to step: while the meter runs, as many bytes go as come."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.ones(64)), torch.zeros(64)

        def forward(self, x: Tensor) -> Tensor:
            self.state = (self.weight * x).detach()
            return self.state.sum() + self.weight.sum()

    model, x = Recurrent(), torch.ones(64)
    found = census_study.train(model, lambda x: model(x), {"x": x})
    assert found.resident == model.weight.nbytes + x.nbytes + model.state.nbytes


def test_errors_are_told_apart() -> None:
    package = str(Path(torch.__file__).parent)
    for error, at, status in (
        (Unsupported("no\nreally"), "capture", "refused"),
        (RuntimeError(f"\n  at {package}/_ops.py, <f at 0x7f00>"), "compiled steps", "error"),
        (Unsupported("no"), "plain", "untrained"),
    ):
        row = census_study.failure(error, at)
        assert (row["status"], row["class"]) == (status, type(error).__name__)
        assert "/_ops.py" not in row["error"] or row["error"] == "at torch/_ops.py, <f>"
        assert "\n" not in row["error"]


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "census.jsonl"
    first, second, *_ = names = list(census.listed())
    assert census.chosen([], [], census_report.by_model(out)) == names
    rows = [{"model": first, "status": "refused"}, {"model": second, "status": "wrong"}]
    out.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "status": "right"}]))
    rows_now = census_report.by_model(out)
    assert census.chosen([], [], rows_now) == names[2:]
    assert census.chosen([], ["refused", "wrong"], rows_now) == [second]
    assert census.chosen([], ["all"], rows_now) == [first, second]
    assert census.chosen([first], [], rows_now) == [first]


def test_every_language_model_is_listed_once() -> None:
    expected = {name for mapping in census_text.TASKS.values() for name in getattr(modeling_auto, mapping).values()}
    assert set(census_text.models()) == expected
    assert census_text.models()[BERT] == ("masked",)
    assert census_text.models()["XLMWithLMHeadModel"] == ("causal", "masked")


def test_configurations_are_small_and_have_layers_of_each_kind() -> None:
    import transformers

    for name in (BERT, "GPTNeoForCausalLM", "Qwen3NextForCausalLM", "T5ForConditionalGeneration"):
        model, step, batch = census_text.make(name)
        assert sum(p.numel() for p in model.parameters()) < 300_000
        step(**batch).backward()
    config = census_text.configuration(transformers.Qwen3NextForCausalLM)
    assert sorted(config.layer_types) == ["full_attention", "linear_attention"]
    config = census_text.configuration(transformers.Llama4ForCausalLM)  # lists the places of its layers, too
    assert (config.num_hidden_layers, config.moe_layers, config.no_rope_layers) == (2, [0, 1], [1, 0])
    config = census_text.configuration(transformers.Lfm2ForCausalLM)  # by nothing but their places
    assert (config.num_hidden_layers, config.layer_types) == (2, ["full_attention", "full_attention"])


@pytest.mark.long
def test_models_run_in_processes_of_their_own_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (row,) = census.run([BERT], jobs=1, seconds=90)
    assert (row["model"], row["library"], row["kind"], row["status"]) == (BERT, "transformers", ["masked"], "right")
    (row,) = census.run([BERT], jobs=1, seconds=2)
    assert row["status"] in ("timeout", "untrained")
    assert row["error"] == "no end after 2 seconds"


# the document


def _row(model: str, status: str, **facts: Any) -> dict[str, Any]:
    about = {"library": "transformers", "version": "5", "torch": "2", "commit": "c", "seconds": 60.0}
    return {**about, "model": model, "status": status, **facts}


def test_the_document_counts_and_names() -> None:
    rows = (
        _row("A", "right", overhead=0.1),
        _row("B", "right", overhead=0.0),
        _row("C", "refused", **{"class": "Unsupported", "error": "a | b"}),
        _row("D", "wrong", wrong=2, differs={"loss of step 1": 0.1}),
        _row("E", "peak", measured_peak=1_032, predicted_peak=1_000),
        _row("F", "error", **{"class": "RuntimeError", "error": "x" * 999}),
        _row("G", "untrained", **{"class": "ValueError", "error": "no"}),
    )
    text = census_report.markdown({row["model"]: row for row in rows})
    for said in (
        "| language models of transformers | 7 | 6 | 2 | 1 | 1 | 1 | 1 | 0 |",
        "| `C` | refused | a \\| b |",
        "| `D` | other bits | 2 tensors differ, first the loss of step 1 |",
        "| `E` | peak off its plan | measured +32 bytes off the 1,000 of its plan |",
        "| `F` | raw exception | RuntimeError: xxx",
        *("1 of these ran ops again", "- `G`: ValueError: no", "Networks of timm were left out"),
    ):
        assert said in text
    assert max(map(len, text.splitlines())) < 300


def test_the_document_says_what_the_rows_say() -> None:
    assert census.RESULTS.with_suffix(".md").read_text() == census_report.markdown(ROWS)


def test_what_plain_pytorch_trains_has_its_bits_or_is_refused_in_words() -> None:
    counted = census_report.counted(ROWS)
    assert {row["library"] for row in counted} == {"transformers", "timm"}
    else_than = {"right", "refused", "peak"}
    assert {row["model"]: census_report.reason(row) for row in counted if row["status"] not in else_than} == {}
    assert all(row["measured_peak"] < row["predicted_peak"] for row in counted if row["status"] == "peak")
    assert len([row for row in counted if row["status"] == "right"]) > 0.96 * len(counted)
