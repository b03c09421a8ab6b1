"""The comparison with other ways to save memory: what it finds, and how it judges."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers import comparison as peers
from benchmarks.peers import report as peers_report
from benchmarks.peers import resident
from benchmarks.peers import settings as peer_settings
from benchmarks.peers.subjects import NETWORKS, Network, SmallVGG16, Subject
from tests.support.bits import assert_same_bits

ROUNDS = 8


class Tiny(nn.Module):
    """Batch norm, whose statistics a checkpoint changes twice, and dropout, whose mask may be drawn twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self.stage(3 if i == 0 else 8) for i in range(4)))
        self.head = nn.Linear(8, 10)

    @staticmethod
    def stage(channels: int) -> nn.Sequential:
        convolution = nn.Conv2d(channels, 8, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean(dim=(2, 3)))


TINY = Network(
    "tiny",
    lambda: (Tiny(), (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))),
    blocks=lambda module: list(module.stages),
    chain=lambda module: [module.stages],
)
ALL = {"tiny": TINY}


@pytest.mark.long
def test_what_is_wrong_is_found_and_ours_never_is(
    monkeypatch: pytest.MonkeyPatch, one_thread: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_settings, "TENTHS", (0.0, 1.0))
    monkeypatch.setattr(peer_settings, "SEGMENTS", (2,))
    monkeypatch.setattr(peer_settings, "SOLVERS", ("dp",))
    monkeypatch.setattr(peers, "HEURISTICS", ("chen-greedy", "dtr"))
    options = peers.Options(time_limit=5.0, shares=[0.0, 0.3, 1.0], minutes=0.0, rounds=(2, 2))
    rows = peers.compare(TINY, replace(options, only=["peers", "ours", "heuristics"]), lambda text: None)
    by_name = {f"{row['family']} {row['knob']}".strip(): row for row in rows}
    assert peers_report.same_bits(by_name["eager"])
    twice = by_name["checkpoint each block"]
    assert (twice["same_gradients"], twice["same_buffers"]) == (True, False)
    redrawn = by_name["compile budget dp 0"]
    assert (redrawn["same_loss"], redrawn["same_gradients"]) == (True, False)
    assert peers_report.same_bits(by_name["compile + checkpoint each block"])
    ours = [row for row in rows if row["family"] in (peer_settings.OURS, "heuristics")]
    assert {row["family"] for row in ours} == {peer_settings.OURS, "heuristics"}
    for row in ours:
        assert peers_report.same_bits(row)
        assert row["same_random_state"]
        assert row["peak"] == row["predicted_peak"] <= row["budget"]
    assert all(len(row["ratios"]) == 2 for row in rows if "error" not in row)
    out = tmp_path / "peers.jsonl"
    about = {"date": "d", "commit": "c", "cpu": "x", "torch": "t"}
    out.write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
    peers_report.render(out)
    assert "| tiny |" in capsys.readouterr().out
    text = (tmp_path / "peers.md").read_text()
    assert "buffers differ" in text
    assert "gradients differ" in text
    assert (tmp_path / "peers" / "tiny.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_peer_that_fails_is_a_row_and_leaves_nothing_behind(one_thread: None) -> None:
    comparison = peers.Comparison(TINY, peers.Options(time_limit=5.0), lambda text: None)

    def build(subject: Subject) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            subject.plain(x, y).backward()  # gradients are there, statistics moved
            raise RuntimeError("too much\nin two lines")

        return step

    comparison.add([peer_settings.Setting("checkpoint", "of a kind that fails", build)])
    assert comparison.failed[0]["error"] == "RuntimeError: too much"
    assert all(parameter.grad is None for parameter in comparison.subject.module.parameters())
    assert_same_bits(comparison.subject.module.state_dict(), comparison.subject.state)


def _row(family: str, peak: int, ratios: list[float], **facts: Any) -> dict[str, Any]:
    same = {f"same_{kind}": True for kind in ("loss", "gradients", "buffers", "random_state")}
    about = {"model": "m", "family": family, "knob": "", "peak": peak, "ratios": ratios, "ratio": sorted(ratios)[4]}
    return {**about, **same, **facts}


def _around(middle: float) -> list[float]:
    return [middle + 0.001 * (-1) ** i * (i + 1) for i in range(ROUNDS)]


@pytest.mark.parametrize(
    ("time", "verdict"), [(_around(1.1), "faster"), (_around(0.9), "slower"), (_around(1.0)[::-1], "even")]
)
def test_a_peer_is_held_against_ours_at_its_peak_or_below(time: list[float], verdict: str) -> None:
    ours = [_row(peer_settings.OURS, 90, _around(1.3)), _row(peer_settings.OURS, 100, _around(1.0))]
    above = _row(peer_settings.OURS, 101, _around(0.5))
    peer = _row("checkpoint", 100, time)
    best, ratio, judged = peers_report.compared(peer, [*ours, above, peer])
    assert (best["peak"], judged) == (100, verdict)
    assert ratio == pytest.approx(1.0 / sorted(time)[4], abs=0.02)


def test_only_exact_peers_are_counted_and_one_below_all_of_ours_is_out_of_reach() -> None:
    plain, ours = _row("eager", 120, _around(1.0)), _row(peer_settings.OURS, 90, _around(1.3))
    peer, wrong = _row("checkpoint", 80, _around(1.1)), _row("checkpoint", 80, _around(0.5), same_buffers=False)
    assert peers_report.compared(peer, [plain, ours, peer]) is None
    for rows, expected in (
        ([plain, ours, peer], {"out of reach": 1, "exact": 1, "ours": 90, "peer": peer}),
        ([plain, ours, wrong], {"wrong": 1, "exact": 0, "peer": None}),
        ([plain, peer], {"ours": None, "out of reach": 1}),
    ):
        found = peers_report.summary(rows)
        assert {key: found[key] for key in expected} == expected


def test_what_a_process_takes_belongs_to_the_rows_that_allocate_the_same() -> None:
    facts = {"resident": 10_000_000, "off": 0.0, "within_tolerance": True}

    def row(family: str, megabytes: int, ratio: float, fingerprint: str) -> dict[str, Any]:
        return _row(family, megabytes * 1_000_000, _around(ratio), fingerprint=fingerprint, **facts)

    ours = [row(peer_settings.OURS, 70, 1.4, "c"), row(peer_settings.OURS, 80, 1.1, "d")]
    peer_rows = [row("checkpoint", 80, 1.2, "a"), row("checkpoint", 75, 1.2, "b"), row("selective", 60, 1.3, "f")]
    every = [row("eager", 100, 1.0, "e"), *peer_rows, *ours]
    grown = {"e": 140, "a": 90, "b": 110, "c": 60, "d": 75}
    measured = [
        {key: row[key] for key in peers_report.KEY} | {"growth": grown[row["fingerprint"]] * 1_000_000}
        for row in every
        if row["fingerprint"] in grown
    ]
    del measured[-1]["growth"]
    measured[-1]["process"] = 85_000_000  # from before the model was made: what is resident is in it
    rows = peers_report.joined(every, [*measured, {"model": "m", "error": "it died"}])
    assert [row.get("process", 0) // 1_000_000 for row in rows] == [150, 100, 120, 0, 70, 85]
    found = peers_report.summary(rows)
    assert (found["least resident, ours"], found["least resident, peers"]) == (70_000_000, 100_000_000)
    table = [line.split(" | ")[:3] for line in peers_report.short(rows).splitlines()[2:]]
    assert table == [
        ["| plain PyTorch", "150.0 MB", "100.0 MB"],
        ["| checkpoint, ", "100.0 MB", "80.0 MB"],
        ["| **checkmate, **", "85.0 MB", "80.0 MB"],
        ["| **checkmate, **", "70.0 MB", "70.0 MB"],
    ]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process holds")
def test_each_way_is_measured_in_a_process_of_its_own() -> None:
    about = {"model": "tiny", "resident": 0, "time_limit": 2.0, "threads": 1, "same_buffers": True, "budget": None}
    eager, same, wrong, higher, gone = (
        {**_row(family, peak, _around(1.0), **facts), **about, "fingerprint": fingerprint, "off": 0.5}
        for family, peak, fingerprint, facts in (
            ("eager", 9, "a", {}),
            ("eager", 9, "a", {}),
            ("compile budget", 5, "b", {"same_gradients": False, "knob": "dp 0"}),
            ("compile budget", 6, "c", {"same_gradients": False, "knob": "dp 1"}),
            ("selective", 5, "d", {"knob": "keeps nothing"}),
        )
    )
    ours = {**eager, "family": peer_settings.OURS, "budget": 10**9, "fingerprint": "z"}
    every = [eager, same, {**wrong, "same_gradients": False}, {**higher, "same_gradients": False}, gone, ours]
    found = [*resident.measure(every, lambda text: None, where="tests.project.test_peers:ALL")]
    assert [row["fingerprint"] for row in found] == ["a", "b", "d", "z"]
    assert found[0]["process"] > 1_000_000
    assert found[1]["process"] > 0
    assert "StopIteration" in found[2]["error"]
    assert found[3]["fallbacks"] == 0
    assert found[3]["process"] > found[3]["planned_bytes"]


def test_what_differs_is_told() -> None:
    row = _row("checkpoint", 1, _around(1.0), same_buffers=False, off=0.97, within_tolerance=False)
    assert peers_report.numbers(row) == "buffers differ by 97%"
    rounding = {**row, "same_loss": False, "off": 2e-6, "within_tolerance": True}
    assert peers_report.numbers(rounding) == "loss, buffers differ by rounding, 2e-06"


def test_the_networks_have_the_blocks_that_they_name() -> None:
    with torch.device("meta"):
        for network in NETWORKS.values():
            module, _ = network.make()
            parts = set(module.modules())
            assert set(network.blocks(module)) <= parts
            assert len(network.blocks(module)) >= 4
            assert all(chain in parts for chain in network.chain(module))
        module = SmallVGG16(10)
        assert sum(isinstance(part, nn.Conv2d) for part in module.modules()) == 13
        assert module(torch.empty(1, 3, 96, 96)).shape == (1, 10)


def test_the_committed_document_is_of_the_committed_rows() -> None:
    path = peers.BENCHMARK.path
    runs = peers_report.runs_of(path)
    assert path.with_suffix(".md").read_text() == peers_report.page(runs, path.stem)
    assert all((path.with_suffix("") / f"{model}.png").exists() for model in runs)
