"""Each check passes here and on a simulated device, says what is wrong where something is, and fails alone."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkmate.capture import random_draws
from checkmate.demo import selftest as checks
from checkmate.demo.selftest import CHECKS, Finding, Setting, run_all
from checkmate.errors import VerificationError
from checkmate.host.pinned import PinnedMover
from tests.support.processes import run_fresh_python
from tests.support.simulated_cuda.install import environment, is_installed, set_waver

Patch = pytest.MonkeyPatch
CPU = Setting("cpu", quick=True)


def _whole(device: str, folder: Path) -> dict[str, Any]:
    """Run the command on a device: findings by check."""
    file = folder / "found.json"
    command = ("-m", "checkmate", "selftest", "--device", device, "--quick", "--json", str(file))
    printed = run_fresh_python(*command, **environment())
    found: dict[str, Any] = json.loads(file.read_text())
    assert [check["name"] for check in found["checks"]] == [*CHECKS]
    assert all(check["found"] in printed.stdout for check in found["checks"])
    assert not found["failed"]
    return {check["name"]: check for check in found["checks"]}


@pytest.mark.long
def test_the_cpu_passes(tmp_path: Path) -> None:
    found = _whole("cpu", tmp_path)
    assert {check["name"] for check in found.values() if check["verdict"] == "skipped"} == {
        "capacity",
        "a model on the CPU",
    }
    assert all(row["measured"] == row["predicted"] for row in found["predicted bytes"]["facts"]["rows"])
    _loss_runs_in_parts(found)


@pytest.mark.cuda
@pytest.mark.long
def test_a_cuda_device_passes(tmp_path: Path) -> None:
    found = _whole("cuda", tmp_path)
    assert {check["verdict"] for check in found.values()} == {"passed"}
    assert found["capacity"]["facts"]["ours fits"]
    if is_installed():  # which parts keep the bits depends on the device; the simulated one is known
        _loss_runs_in_parts(found)


def _loss_runs_in_parts(found: dict[str, Any]) -> None:
    """Check the smallest budget of the transformer, of whose bytes logits are the most."""
    rows = found["a transformer in budgets"]["facts"]["rows"]
    assert len(rows) == len(checks.SHARES)
    assert "loss in" in rows[0]["parts"][0]


@pytest.mark.slow
def test_what_is_forked_for_each_check_has_not_touched_the_device() -> None:
    """CUDA cannot be used in a fork of a process that has asked for a device."""
    names = ("is_available", "device_count", "current_device", "_lazy_init", "get_device_properties")
    refused = "".join(f"torch.cuda.{name} = None\n" for name in names)
    run_fresh_python("-c", f"import torch\n{refused}import checkmate.demo.selftest")


@pytest.mark.cuda
@pytest.mark.skipif(not is_installed(), reason="wavers where the simulated device is told to")
def test_attention_that_is_known_to_waver_is_said_to() -> None:
    set_waver(True)
    try:
        finding = checks.attention(Setting("cuda", quick=True))
    finally:
        set_waver(False)
    repeats = finding.facts["repeats"]
    assert (finding.passed, repeats["efficient float32"], repeats["math float32"]) == (True, False, True)


@pytest.mark.cuda
def test_a_model_on_the_cpu_that_gets_other_bits_is_found(monkeypatch: Patch) -> None:
    """As where what an update has written is not sent back."""
    setting = Setting("cuda", quick=True)
    finding = checks.homes(setting)
    assert finding.passed, finding.found
    monkeypatch.setattr(PinnedMover, "out", lambda mover, storage, value: lambda: None)
    finding = checks.homes(setting)
    assert not finding.passed
    assert "OTHER bits, on the CPU" in finding.found


def _passes(setting: Setting) -> Finding:
    return Finding(True, str(setting.device))


def _raises(setting: Setting) -> Finding:
    raise ValueError("what is wrong\nand more of it")


def _hangs(setting: Setting) -> Finding:
    time.sleep(600)
    raise AssertionError


def _dies(setting: Setting) -> Finding:
    os.write(2, b"last words")
    os._exit(3)


@pytest.mark.slow
def test_what_fails_fails_alone_and_says_why() -> None:
    hung, *found = [
        *run_all({"_hangs": _hangs}, CPU, 2.0),
        *run_all({"_raises": _raises, "_passes": _passes, "_dies": _dies, "passes too": _passes}, CPU),
    ]
    assert [(finding.verdict, finding.found) for finding in (hung, *found)] == [
        ("failed", "it had not ended after 2 s"),
        ("failed", "ValueError: what is wrong"),
        ("passed", "cpu"),
        ("failed", "its process died (exit code 3)"),
        ("passed", "cpu"),
    ]
    raised, _, died, _ = found
    assert "and more of it" in raised.facts["traceback"]
    assert died.facts == {"printed": "last words"}
    assert "--time-limit 4" in hung.advice
    assert str(hung).startswith("FAILED   _hangs")


def _says_when(setting: Setting) -> Finding:
    begin = time.monotonic()
    time.sleep(1.0)
    return Finding(True, "", facts={"from": begin, "to": time.monotonic()})


@pytest.mark.slow
def test_checks_run_side_by_side_and_those_that_need_the_device_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(checks, "places", lambda: 2)
    monkeypatch.setattr(checks, "ALONE", ("1",))
    found = [*run_all({str(i): _says_when for i in range(4)}, CPU)]
    assert [result.name for result in found] == ["0", "2", "3", "1"]
    *others, last = [(result.facts["from"], result.facts["to"]) for result in found]
    assert max(end for _, end in others) <= last[0]
    assert any(a[0] < b[1] and b[0] < a[1] for a, b in itertools.combinations(others, 2))
    assert checks.places() <= 2


@torch.library.custom_op("checkmate_tests::badly", mutates_args=())
def _badly(x: Tensor) -> Tensor:
    return _kernel["of badly"](x)


_badly.register_fake(torch.empty_like)
_badly.register_autograd(lambda ctx, grad: grad)
_kernel: dict[str, Callable[[Tensor], Tensor]] = {}


def _asserts(x: Tensor) -> Tensor:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_an_op_that_does_badly_is_named(monkeypatch: Patch) -> None:
    ones, runs = torch.ones(3, requires_grad=True), itertools.count()
    monkeypatch.setattr(checks, "network", lambda name, setting: (None, lambda x: _badly(x).sum(), (ones,)))
    monkeypatch.setitem(_kernel, "of badly", lambda x: x + next(runs))
    finding = checks.ops_of("any", CPU)
    assert finding.passed is False
    assert "do not repeat their bits: checkmate_tests.badly.default" in finding.found
    assert "use_deterministic_algorithms" in finding.advice
    monkeypatch.setitem(_kernel, "of badly", _asserts)
    with pytest.raises(RuntimeError, match=r"checkmate_tests\.badly.* has stopped the device"):
        checks.ops_of("any", CPU)


def _wavers(*args: Any, **kwargs: Any) -> Tensor:
    return F.softmax(args[0] @ args[1].mT, -1) @ args[2] * torch.rand([])


def _differs(*args: Any, **kwargs: Any) -> Any:
    raise VerificationError("output 0 differs")


DIFFERS_IN_ALL = rf"(?s)(VerificationError: output 0 differs.*){{{len(checks.SHARES)}}}"


@pytest.mark.parametrize(
    ("where", "name", "broken", "check", "says"),
    [
        (checks.F, "scaled_dot_product_attention", _wavers, checks.attention, "math float32"),
        (random_draws, "draw_again", random_draws.draw_saved, checks.dropout, r"^0 of 12 masks"),
        (checks, "same_bits", lambda a, b: False, checks.copies, "OTHER bits"),
        (checks, "verify", _differs, functools.partial(checks.within_budgets, "chain"), DIFFERS_IN_ALL),
    ],
    ids=["attention", "draws", "copies", "numbers"],
)
def test_what_is_broken_fails(where: Any, name: str, broken: Any, check: Any, says: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(where, name, broken)
    finding = check(CPU)
    assert finding.passed is False
    assert re.search(says, " ".join((finding.found, *finding.facts.get("strays", ()))))


def test_bytes_beyond_what_is_predicted_fail(monkeypatch: Patch) -> None:
    really = checks.verify

    def more(*args: Any, **kwargs: Any) -> Any:
        report = really(*args, **kwargs)
        return replace(report, measured_peak=report.measured_peak + 4096)

    monkeypatch.setattr(checks, "verify", more)
    monkeypatch.setattr(checks, "SHARES", checks.SHARES[:1])
    finding = checks.within_budgets("chain", CPU, exact=True)
    assert finding.passed is False
    assert "reserve= to 4.10 kB" in finding.advice
    assert checks.within_budgets("chain", CPU).passed  # not what other networks are held to


def test_what_is_asked_wrongly_is_said_before_any_check_runs(tmp_path: Path, shell: Any) -> None:
    assert "there is no check 'nothing'; the checks are versions" in shell("selftest --only nothing", 2)[1]
    shell("selftest --device tpu", 2)
    if not torch.cuda.is_available():
        assert "There is no CUDA device here. --device cpu" in shell("selftest", 1)[1]
    file = tmp_path / "none" / "found.json"
    out, err = shell(f"selftest --device cpu --only versions --json {file}", 2)
    assert "passed" not in out
    assert str(file) in err


def test_what_was_found_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: Patch, shell: Any) -> None:
    file, ended = tmp_path / "found.json", Finding(True, "it", name="one")

    def interrupted(*args: Any) -> Iterator[Finding]:
        yield ended
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_all", interrupted)
    shell(f"selftest --device cpu --json {file}", 130)
    assert [check["name"] for check in json.loads(file.read_text())["checks"]] == ["one"]
