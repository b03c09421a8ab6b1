"""Planning goes on in a process of its own, which finds better plans and ends with its parent, whatever happens."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import getsource
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest

from checkmate import Problem, Solution, solve
from checkmate.core.simulator import check_plan, cost
from checkmate.core.solution import Query
from checkmate.solvers import background_search, plan_cache
from checkmate.solvers.background_search import News, Search
from checkmate.solvers.common import processes
from checkmate.solvers.plan_cache import BETTER
from checkmate.solvers.search.min_budget import least_memory
from checkmate.solvers.solve import attempt
from tests.solvers.steps import layers
from tests.support.offers import begin_poorly, plan
from tests.support.processes import ROOT, run_fresh_python

PATIENCE = 100.0  # seconds that nothing here takes
UNET = ROOT / "benchmarks/problems/unet.json.gz"


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHECKMATE_CACHE_DIR", str(tmp_path))


def _open() -> Query:
    """A search that goes on for as long as a test takes."""
    problem = Problem.from_json(UNET)
    budget = int(0.3 * problem.keep_all_peak)
    plan = solve(problem, budget, method="next-use", time_limit=0.1)
    return Query(problem, budget, seconds=600.0, start=plan)


SEARCHING = f"""
import time
from checkmate import Problem, Solution, solve
from checkmate.solvers.background_search import Search
from checkmate.core.solution import Query
UNET = {str(UNET)!r}
{getsource(_open)}
search = Search(_open())
search.start()
while search.process is None:
    time.sleep(0.01)
print(search.process.pid, flush=True)
"""


@pytest.fixture
def search() -> Iterator[Search]:
    made = Search(_open())
    made.start()
    yield made
    made.end()


def _comes(event: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not event() and time.monotonic() < deadline:
        time.sleep(0.01)
    return event()


def _pid(search: Search) -> int:
    assert _comes(lambda: search.process is not None or not search.goes_on)
    assert search.process is not None
    return search.process.pid


def _state(pid: int) -> str:
    """Z for a process that is gone: one that nobody has asked for its code is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.slow
def test_a_process_finds_what_is_better_and_keeps_it() -> None:
    problem = layers(8, size=4)
    budget = least_memory(problem, time_limit=0.5)[0] + 8
    query = replace(begin_poorly(problem, budget).rest, cache=True)
    best = solve(problem, budget)
    assert best.cost < (1 - BETTER) * query.start.cost
    search = Search(query)
    search.start()
    assert (search.wait(PATIENCE), search.failure) == (True, "")
    assert not check_plan(search.better.plan, problem, budget)
    assert cost(search.better.plan, problem) == search.news.cost == best.cost
    assert search.news.bound == pytest.approx(best.bound)
    record = plan_cache.lookup(plan_cache.Question.of(problem, budget, "auto"))
    assert (record.cost, record.time_limit) == (best.cost, query.spent + query.seconds)


@pytest.mark.slow
def test_what_fails_in_the_process_is_told_in_its_words() -> None:
    search = Search(replace(begin_poorly(layers(8, size=4), 100).rest, method="magic"))
    search.start()
    assert search.wait(PATIENCE)
    assert search.failure.startswith("Its process ended with code 1: KeyError: 'magic'")


def test_only_what_is_notably_better_is_told_as_a_plan() -> None:
    """Functions of a problem are not sent."""
    problem = layers(8, size=4)
    budget = least_memory(problem, time_limit=0.5)[0] + 8
    best, told = solve(problem, budget), list[News]()
    found = background_search.search(replace(begin_poorly(problem, budget).rest, start=best), told.append)
    assert (found.cost, told[-1].over) == (best.cost, True)
    assert [news.plan for news in told] == [None] * len(told)
    query = Search(begin_poorly(replace(layers(8, size=4), codegen=lambda plan: None), 100).rest).query
    assert query.problem.codegen is query.start.problem.codegen is None


def test_a_plan_on_disk_that_no_other_is_notably_better_than_is_taken_at_once() -> None:
    problem = Problem.from_json(UNET)
    budget = int(0.8 * problem.keep_all_peak)
    found = solve(problem, budget, time_limit=1.0)
    close = replace(found, bound=(1 - BETTER / 2) * found.cost)
    plan_cache.store(plan_cache.Record.of(close, "auto", 1.0))
    again = plan(problem, budget, wait=1.0)
    assert (again.origin, again.cost, again.rest) == ("plan cache", found.cost, None)


def test_a_later_start_begins_with_the_first_plan_of_the_one_before_and_goes_on() -> None:
    problem = Problem.from_json(UNET)
    budget = int(0.3 * problem.keep_all_peak)
    solves = Mock(side_effect=lambda query: attempt(replace(query, seconds=0.1)))
    first = plan(problem, budget, wait=0.1, seconds=20.0, solver=solves)
    again = plan(problem, budget, wait=0.1, seconds=20.0, solver=solves)
    assert solves.call_count == 1
    assert (again.origin, again.plan, again.rest.start.plan) == ("plan cache", first.plan, first.plan)
    assert again.rest.seconds + again.rest.spent == 20.0
    plan(problem, budget, wait=5.0, seconds=20.0, solver=solves)  # waits for longer than the first has
    assert solves.call_count == 2


def test_planning_that_begins_early_says_what_is_open() -> None:
    def quick(query: Query) -> Solution:
        return replace(attempt(replace(query, seconds=0.1)), interrupted=interrupted)

    interrupted = False
    problem = Problem.from_json(UNET)
    budget = int(0.3 * problem.keep_all_peak)
    first = plan(problem, budget, wait=0.1, seconds=20.0, solver=quick)
    assert (first.rest.start.plan, first.rest.wait) == (first.plan, inf)
    assert first.rest.seconds + first.rest.spent == 20.0
    assert plan(problem, budget, wait=0.1, seconds=1.0, solver=quick).rest is None  # not worth a process
    assert plan(problem, budget, wait=0.1, seconds=3.0, method="next-use", solver=quick).rest is None
    assert plan(layers(8, size=4), 100, wait=0.1, solver=quick).rest is None  # closed at once
    interrupted = True  # Ctrl-C before the first step ends planning
    first = plan(problem, budget + 1, wait=0.1, solver=quick)
    assert first.gap > BETTER
    assert first.rest is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestProcess:
    def test_it_has_no_torch_and_a_low_priority(self, search: Search) -> None:
        assert _comes(lambda: search.news.seconds > 0.0)  # it has told something
        pid = _pid(search)
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "highspy" in maps
        assert "torch" not in maps
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + processes.NICENESS)
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
        search.end()
        assert _comes(lambda: _state(pid) == "Z")
        assert not search.goes_on

    def test_a_crash_leaves_the_plan_that_there_is(self, search: Search, caplog: pytest.LogCaptureFixture) -> None:
        pid = _pid(search)
        with caplog.at_level(logging.WARNING, "checkmate.solve"):
            os.kill(pid, signal.SIGKILL)
            assert search.wait(PATIENCE)
        assert f"code -{signal.SIGKILL:d}" in search.failure
        assert "the step keeps its plan" in caplog.text

    def test_one_runs_at_a_time(self, search: Search) -> None:
        first = _pid(search)
        second = Search(search.query)
        second.start()
        assert (second.process, second.goes_on) == (None, True)
        search.end()
        assert _pid(second) != first
        second.end()
        assert second.wait(PATIENCE)

    def test_a_forked_process_neither_waits_nor_ends_it(self, search: Search) -> None:
        pid = _pid(search)
        child = os.fork()
        if child == 0:
            search.end()
            another = Search(search.query)
            another.start()
            waits = search.goes_on or not search.wait(0) or _pid(another) == pid
            another.end()
            os._exit(int(waits))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert search.goes_on
        assert _state(pid) != "Z"

    @pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os; os._exit(0)"])
    def test_it_ends_when_a_script_does(self, end: str) -> None:
        pid = int(run_fresh_python("-c", SEARCHING + end).stdout)
        assert _comes(lambda: _state(pid) == "Z")

    def test_it_ends_when_its_parent_is_killed_that_has_forked(self) -> None:
        """The forked process holds the other end of its input open."""
        script = SEARCHING + "import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(600)"
        with _running(script) as parent:
            pid, forked = int(parent.stdout.readline()), int(parent.stdout.readline())
            parent.kill()
            assert _comes(lambda: _state(pid) == "Z")
            os.kill(forked, signal.SIGKILL)

    def test_ctrl_c_is_for_who_trains(self) -> None:
        # A job in the background of a shell is started with Ctrl-C ignored.
        script = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{SEARCHING}" + (
            "try:\n    while search.news.seconds == 0: time.sleep(0.01)\n    print('told', flush=True)\n"
            "    search.wait()\nexcept KeyboardInterrupt:\n    told = search.news.seconds\n"
            "    while search.goes_on and search.news.seconds == told: time.sleep(0.01)\n    print(search.goes_on)"
        )
        with _running(script, start_new_session=True) as parent:
            parent.stdout.readline()
            assert parent.stdout.readline() == "told\n"
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
            assert parent.stdout.readline() == "True\n"


def _running(script: str, **options: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)
