"""The best plan and bound of a solve: only what is verified counts, and it is shown only where somebody looks."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.networks import dags
from checkmate import Status, solve, statusline
from checkmate.core import simulator
from checkmate.core.plan import Free, Plan
from checkmate.errors import SolverError
from checkmate.solvers.catalogue import METHODS, Method
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task, certify
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import build
from tests.solvers.checks import all_runs, begun, runs
from tests.solvers.steps import FIVE
from tests.support.oracle import pinned
from tests.support.processes import ROOT
from tests.support.sampling import long

CHAIN = dags.unit_chain(2)  # five ops; keeping all takes 5 s and 4 bytes
ONCE, AGAIN = runs(CHAIN), runs(CHAIN, (3, 0))

AGAIN[3, 0] = True


def test_the_best_of_what_is_offered_and_proven() -> None:
    known = begun(CHAIN, 10)
    assert known.offer(AGAIN, "dear")
    known.prove(5.5)
    assert not known.offer(AGAIN, "no better")
    known.prove(5.2)
    assert (known.cost, known.bound, known.found) == (6.0, 5.5, {"dear": 6.0})
    assert [point[1:] for point in known.trajectory] == [(6.0, 5.0), (6.0, 5.5)]
    solution = known.solution("test", Remarks(details={"a": 1}))
    assert (solution.gap, solution.method, solution.details["a"]) == (pytest.approx(0.5 / 6), "test", 1)


def test_a_schedule_that_breaks_the_budget_is_not_taken_and_its_peak_is_noted() -> None:
    known = begun(CHAIN, CHAIN.keep_all_peak - 1)
    assert (known.least_peak, known.offer(ONCE, "too large"), known.fits(ONCE)) == (None, False, False)
    assert (known.R, known.trajectory, known.least_peak) == (None, [], CHAIN.keep_all_peak)
    solution = known.solution("test", Remarks("it is too large"))
    assert (solution.status, solution.message, solution.bound) == (Status.NOT_FOUND, "it is too large", 5.0)


def test_a_schedule_that_breaks_a_rule_is_an_error_of_whom_offers_it() -> None:
    """The array that was offered may change afterwards: the plan that is kept does not."""
    known, R = begun(CHAIN, 10), AGAIN.copy()
    for wrong in (np.zeros_like(ONCE), all_runs(CHAIN) & ~ONCE):
        with pytest.raises(SolverError, match="The schedule of rubbish is wrong: "):
            known.offer(wrong, "rubbish")
    assert known.R is None
    known.offer(R, "test")
    R[:] = False
    assert np.array_equal(known.R, AGAIN)


def test_a_bound_that_a_schedule_contradicts_is_none(caplog: pytest.LogCaptureFixture) -> None:
    known = begun(CHAIN, 10)
    known.prove(7.0)  # wrong, but who knows
    known.offer(AGAIN, "cheaper than the bound")
    assert known.bound == 5.0
    for bound in (6.5, math.inf, math.nan):
        known.prove(bound)
        assert known.bound == 5.0
    assert [said.split(" s ")[0] for said in caplog.messages] == ["a bound of 7", "a bound of 6.5", "a bound of inf"]


def test_a_bound_of_schedules_says_nothing_of_a_plan_in_another_order(caplog: pytest.LogCaptureFixture) -> None:
    incumbent, before = begun(FIVE, 9), begun(FIVE, 9)
    assert not incumbent.offer([[0], [1], [2], [3], [0, 2, 4]], "in order")
    assert incumbent.least_peak == 10
    before.prove(math.inf)
    for known in (incumbent, before):
        assert known.offer([[0], [1], [2], [3], [2, 0, 4]], "in any order")
    incumbent.prove(math.inf)
    for known in (incumbent, before):
        assert (known.cost, known.bound, caplog.messages) == (7.0, 5.0, [])


def test_a_plan_is_taken_without_what_lies_idle_in_it() -> None:
    """An op that is made again keeps its old value until then: the peak is that of the plan without it."""
    known = begun(CHAIN, 10)
    assert known.offer(AGAIN, "a schedule")
    plan = known.solution("test", Remarks()).plan
    assert plan is not None
    freed = next(i for i, step in enumerate(plan.steps) if step == Free(0))
    steps = (*plan.steps[:freed], *plan.steps[freed + 1 :])
    idle = Plan(steps, plan.boundary - (freed < plan.boundary))
    assert simulator.without_idle_values(idle, CHAIN) == plan
    other = begun(CHAIN, 10)
    assert other.offer(idle, "a plan with an idle value")
    assert other.solution("test", Remarks()).plan == plan


def test_an_infinite_bound_proves_that_nothing_fits() -> None:
    known = begun(CHAIN, 10)
    assert not known.is_infeasible
    known.prove(math.inf)
    assert (known.is_infeasible, known.solution("test", Remarks()).status) == (True, Status.INFEASIBLE)


def test_offers_from_the_thread_of_a_solver_arrive() -> None:
    known, threads = begun(dags.unit_chain(8), 5), set()
    model, x = build(known.task.problem, 5)

    def on_incumbent(values: np.ndarray) -> None:
        threads.add(threading.current_thread())
        known.offer(model.value(values, x.R) > 0.5, "milp")

    highs.run(model, on_incumbent=on_incumbent)
    assert known.cost == 22.0
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("method", ["auto", "milp", "next-use", "lp-rounding", "checkpoint-all"])
def test_the_trajectory_falls_to_the_answer(method: str) -> None:
    chain = dags.unit_chain(8)
    solution = solve(chain, chain.keep_all_peak if method == "checkpoint-all" else 5, method=method, time_limit=20)
    path = solution.details["trajectory"]
    seconds, costs, bounds = zip(*path, strict=True)
    assert (sorted(seconds), sorted(costs, reverse=True), sorted(bounds)) == ([*seconds], [*costs], [*bounds])
    assert path[-1][1:] == (solution.cost, solution.bound)


def _slow(monkeypatch: pytest.MonkeyPatch, *, screen: io.StringIO | None = None, **options: Any) -> None:
    """A solve that lasts until the screen shows something, or half a second."""

    def method(task: Task, incumbent: Incumbent) -> Remarks:
        incumbent.offer(AGAIN, "test")
        if screen is None:
            time.sleep(0.5)
        while screen is not None and not screen.getvalue().strip():
            time.sleep(0.01)
        return Remarks()

    monkeypatch.setitem(METHODS, "slow", Method("slow", "of tests", "here", method))
    solve(CHAIN, 10, method="slow", time_limit=10.0, **options)


@pytest.mark.wall_clock
@pytest.mark.parametrize(
    ("asked", "terminal", "quiet", "shows"),
    [(None, True, 0.1, True), (True, False, 0.0, True), (False, True, 0.0, False), (None, True, 600.0, False)],
    ids=["a slow solve on a terminal", "asked for", "refused", "a quick solve"],
)
def test_a_line_shows_what_is_known(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, terminal: bool, quiet: float, shows: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(statusline, "QUIET_SECONDS", quiet)
    _slow(monkeypatch, screen=screen if shows else None, progress=asked)
    line = r"(?s).*\| step \+20.00%, gap 16.67%, \d of 10 s.*"
    assert re.fullmatch(line if shows else "", screen.getvalue())


def test_elsewhere_progress_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="checkmate.solve"):
        _slow(monkeypatch)
    assert any("test: step +20.00%" in record.getMessage() for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_answers_with_the_best_plan_or_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs, "run", Mock(side_effect=KeyboardInterrupt))
    solution = solve(dags.unit_chain(30), 8)
    assert (solution.status, solution.interrupted, solution.peak <= 8) == (Status.FEASIBLE, True, True)
    assert solution.message.startswith("interrupted after")
    with pytest.raises(KeyboardInterrupt):
        solve(dags.unit_chain(8), 6, method="milp")


CHILD = """
import logging, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with Ctrl-C ignored
from checkmate.solvers.linear import highs
from checkmate.solvers.linear.equations import build
from checkmate.solvers.solve import solve
from benchmarks.networks import dags
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
"""
SOLVE = """
problem = dags.mobilenet()  # 312 ops, hard where memory is scarce
solution = solve(problem, int(0.2 * problem.keep_all_peak), time_limit=3600, gap=0.0)
print(solution.status.name, solution.message, solution.peak <= solution.budget, flush=True)
"""
RUN = """
problem = dags.resnet((3, 4, 6, 3))  # 250 ops: hundreds of thousands of columns, a relaxation of many seconds
model, _ = build(problem, int(0.7 * problem.keep_all_peak))
print("running", file=sys.stderr, flush=True)
try:
    highs.run(model, relax=True, time_limit=3600)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def _computed(pid: int) -> float:
    """Seconds that another process has computed: what a busy machine leaves of those on the wall."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's name of its clock


def _interrupt(code: str, after: str, wait: float) -> tuple[str, float]:
    """Interrupt a child some seconds after it logged a word; what it says then, and how long it computed until then."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CHILD + code], cwd=ROOT, **pipes) as child:
        while after not in (line := child.stderr.readline()):
            assert line, "the child ended before it came so far"
        threading.Thread(target=child.stderr.read, daemon=True).start()
        began = _computed(child.pid)
        while _computed(child.pid) < began + wait:
            time.sleep(0.01)
        began = _computed(child.pid)
        os.kill(child.pid, signal.SIGINT)
        said = child.stdout.readline().strip()
        taken = _computed(child.pid) - began
        child.kill()  # it has said what it had to
        return said, taken


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the clock of another process is read as Linux has it")
@pytest.mark.parametrize(
    ("code", "after", "wait", "says"),
    [
        (SOLVE, "next-use", 0.0, "FEASIBLE interrupted after.*True"),
        long(SOLVE, "next-use", 1.0, "FEASIBLE interrupted after.*True"),
        (RUN, "running", 2.0, "stopped"),
    ],
    ids=["after the first plan", "a second later", "while HiGHS computes"],
)
def test_ctrl_c_is_heard_within_a_second_or_so(code: str, after: str, wait: float, says: str) -> None:
    said, seconds = _interrupt(code, after, wait)
    assert re.fullmatch(says, said)
    assert seconds < 3.0


def test_a_right_schedule_gets_the_simulators_figures_and_each_op_once_is_optimal_by_itself() -> None:
    solution = certify(CHAIN, 10, ONCE, method="test", message="as is")
    assert solution.cost == simulator.cost(solution.plan, CHAIN) == 5.0
    assert solution.peak == simulator.simulate(solution.plan, CHAIN).peak == CHAIN.keep_all_peak
    said = (solution.method, solution.message, solution.budget, solution.status)
    assert said == ("test", "as is", 10, Status.OPTIMAL)


@pytest.mark.parametrize(
    ("bound", "expected"), [(0.0, 5.0), (5.5, 5.5), (6.0001, 6.0), (6.1, 5.0), (math.inf, 5.0), (math.nan, 5.0)]
)
def test_a_bound_lies_between_each_op_once_and_the_cost_or_proves_nothing(bound: float, expected: float) -> None:
    solution = certify(CHAIN, 10, AGAIN, method="test", bound=bound)
    assert (solution.cost, solution.bound, solution.gap) == (6.0, expected, pytest.approx(1 - expected / 6))
    assert solution.status is (Status.OPTIMAL if expected == 6.0 else Status.FEASIBLE)


WRONG = {
    "over the budget": (CHAIN, CHAIN.keep_all_peak - 1, ONCE, r"test is wrong: the peak of .* exceeds the budget"),
    "an op is left out": (CHAIN, 10, np.diag([True, True, False, True, True]), "more"),
    "a pinned op runs twice": (pinned(CHAIN, 0), 10, AGAIN, "draws random numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_schedule_is_refused(case: str) -> None:
    problem, budget, R, says = WRONG[case]
    with pytest.raises(SolverError, match=says):
        certify(problem, budget, R, method="test")
