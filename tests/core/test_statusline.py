"""The line that shows what goes on."""

from __future__ import annotations

import importlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import checkmate
from checkmate import statusline
from checkmate.backends import capture_cache, compilation
from checkmate.capture.patches import traced_ops
from checkmate.statusline import hidden, showing

pytestmark = pytest.mark.wall_clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What was to be read, drawing by drawing."""
        return [line.rstrip() for line in re.split(r"[\r\n]", self.getvalue()) if line.strip()]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line appears at once and moves fast."""
    importlib.import_module("tqdm.auto")  # which the first line takes time for
    monkeypatch.setattr(statusline, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(statusline, "REFRESH_SECONDS", 0.01)


def drawn(screen: io.StringIO) -> None:
    """Wait for the line to be drawn again: the second drawing began after the call."""
    end = time.monotonic() + 60
    for _ in range(2):
        before = len(screen.getvalue())
        while not screen.getvalue()[before:].strip():
            assert time.monotonic() < end, "there is no line"
            time.sleep(0.005)


@contextmanager
def stderr_is(file: Terminal | io.StringIO) -> Iterator[Any]:
    """Standard error is this file, within a test: between its phases pytest puts its own there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield file


def test_it_shows_the_innermost_work_and_whom_it_is_about() -> None:
    with stderr_is(Terminal()) as screen, showing("looking", share=lambda: 0.5):
        drawn(screen)
        with showing("tracing", name="size 8"), showing("capturing"):
            drawn(screen)
        drawn(screen)
    shown = [re.sub(r"\|.*\|", "||", line) for line in screen.lines()]
    assert list(dict.fromkeys(shown)) == ["checkmate || looking", "size 8 || capturing"]
    assert shown[-1] == "checkmate || looking"
    assert re.search(r"\r +\r$", screen.getvalue())  # nothing is left of it
    assert statusline._line is None
    with stderr_is(Terminal()) as screen, showing(lambda: "far too {many} words " * 10, share=lambda: 7.0):
        drawn(screen)
    line = screen.lines()[0]
    assert len(line) <= 60
    assert re.fullmatch(r"checkmate \|.{8}\| far too \{many\} words .*", line)


def test_it_goes_where_the_work_fails() -> None:
    def fail(screen: io.StringIO) -> None:
        with showing("failing"):
            drawn(screen)
            raise KeyboardInterrupt

    with stderr_is(Terminal()) as screen, pytest.raises(KeyboardInterrupt):
        fail(screen)
    assert statusline._line is None
    assert "failing" in screen.getvalue()


def test_it_can_be_hidden_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with stderr_is(Terminal()) as screen:
        with hidden(), showing("hidden"):
            time.sleep(0.1)
        with showing("refused", shown=False):
            time.sleep(0.1)
    assert screen.getvalue() == ""
    with stderr_is(io.StringIO()) as file, showing("in a file"):
        time.sleep(0.1)
    assert file.getvalue() == ""
    with stderr_is(io.StringIO()) as file, hidden(), showing("asked for", shown=True):
        drawn(file)
    assert "asked for" in file.getvalue()
    monkeypatch.setattr(statusline, "QUIET_SECONDS", 1e9)  # it does not wait for its time
    with stderr_is(Terminal()) as screen, showing("quick"):
        pass
    assert screen.getvalue() == ""


def test_the_first_call_shows_each_of_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(30 + i, 31 + i) for i in range(8)))
    step = checkmate.compile(lambda x: net(x).square().sum(), budget="1 GB", cache=False)
    with stderr_is(Terminal()) as screen:
        step(torch.ones(7, 30)).backward()
        shown = screen.getvalue()
        step(torch.ones(7, 30)).backward()
        assert screen.getvalue() == shown
    assert "| capturing" in shown
    assert "| tracing" in shown
    ops = sum(op.target != "autograd" for op in step.plans[0].problem.graph.ops)
    (todo,) = {int(todo) for todo in re.findall(r"\| measuring \d+ of (\d+) ops", shown)}
    assert len(net) < todo <= ops  # equal ones are measured once
    assert all(len(line) <= 60 for line in screen.lines())
    assert caplog.records == []


def test_a_long_capture_says_what_it_is_at_and_how_many_ops_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop of 40 products, with a clock that is half a minute on once a part of the work has begun."""
    now, texts = 0.0, dict[str, str]()
    weight = torch.ones(3, 3, requires_grad=True)

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x @ weight
        return x.sum()

    @contextmanager
    def looking(text: Callable[[], str], **options: Any) -> Iterator[None]:
        nonlocal now
        first = text()
        now += traced_ops.AFTER_SECONDS
        try:
            yield
        finally:
            texts[first] = text()

    monkeypatch.setattr(traced_ops.time, "perf_counter", lambda: now)
    for module in (capture_cache, compilation):
        monkeypatch.setattr(module, "showing", looking)
    problem = checkmate.trace(loop, torch.ones(3, 3), profile="roofline:h100")
    counts = {name: int(text.removeprefix(f"{name}: ").removesuffix(" ops so far")) for name, text in texts.items()}
    forward, ops = problem.graph.forward_length, len(problem.graph.ops)
    assert [*counts] == ["tracing", "capturing"]
    assert ops <= counts["tracing"] < 1.5 * ops
    assert forward - 1 <= counts["capturing"] - counts["tracing"] < 1.5 * forward  # less the loss's gradient


def test_a_search_for_the_largest_batch_is_one_line() -> None:
    with torch.device("meta"):
        net = torch.nn.Linear(64, 64)

    def batch(size: int) -> torch.Tensor:
        drawn(screen)  # what is shown between two captures
        return torch.ones(size, 64, device="meta")

    with stderr_is(Terminal()) as screen:
        checkmate.max_batch_size(net, batch, budget="100 kB", profile="roofline:h100", largest=2)
    assert "\n" not in screen.getvalue()
    assert re.search(r"size \d+ \|.{8}\| capturing", screen.getvalue())
    assert re.search(r"checkmate \|.{8}\| size \d+ fits, \d+ of 120 s", screen.getvalue())
