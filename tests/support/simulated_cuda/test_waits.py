"""Each wait of the product on a device, taken out in turn: the simulated device reports it, or the books do.

`ROWS` lists them. `test_no_wait_is_missing_from_the_list` finds those in the product's text that are not in it, among
them any `record_stream`: there is none, since what is copied is kept until the step's stream waits for the copy's end.
A pool of `checkmate.memory.cuda_pool` waits for nothing: what a stream freed in it goes to this stream again, and the
allocator waits where it gives a segment back. `checkmate.updates.all_reduce` waits on other ranks, for which there is
no simulated device.
"""

from __future__ import annotations

import ast
import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkmate.backends.compilation import Backend
from checkmate.backends.planner import Options
from checkmate.backends.static_memory import Replays
from checkmate.codegen.second_memory import OpenCall, SecondMemories
from checkmate.compiler import CompiledStep
from checkmate.core.plan import Plan, Wait
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.core.simulator import check_plan, lower
from checkmate.core.solution import Solution
from checkmate.demo import training
from checkmate.errors import HostError
from checkmate.host import Store, open_store, opening, pinned
from checkmate.host import store as store_module
from checkmate.memory import measure_peak
from checkmate.profiling import measure
from checkmate.profiling.data_sheets import DEVICES
from checkmate.solvers.common.incumbent import certify
from checkmate.training import TrainingStep, training_step
from tests.support.bits import assert_same_bits
from tests.support.simulated_cuda import install
from tests.support.simulated_cuda.plugin import needed
from tests.support.transfers import as_run, with_transfers

pytestmark = [pytest.mark.cuda, needed()]

ROOT = Path(__file__).parents[3]
DEVICE = torch.device("cuda", 0)
SIZE = 100_000
Take = Callable[[pytest.MonkeyPatch], None]  # one wait out of the product


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    install.set_option("clocks", True)
    install.unpinned_early()  # a mutant's


# ---------------------------------------------------------------- what is run


def opened() -> closing[Store]:
    """A store in pinned memory."""
    return closing(open_store("pinned", 4 << 20, DEVICE))


def value(number: float = 1.0) -> Tensor:
    return torch.full((SIZE,), number, device=DEVICE)


def goes(store: Store, of: Tensor) -> None:
    store.send(0, of.untyped_storage())
    store.wait(0)


def comes_back(store: Store) -> Tensor:
    landing = torch.empty(SIZE, device=DEVICE)
    store.fetch(0, landing.untyped_storage())
    store.wait(0)
    return landing.clone()


def let_go_too_early(to: Tensor) -> torch.cuda.Stream:
    """The stream that still copies a value there, which nobody else holds."""
    source, side = value(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        to.copy_(source, non_blocking=True)
    source.record_stream(side)
    return side


def a_value_goes_and_comes_back() -> None:
    """The memory that it leaves is another's meanwhile, and what it lands in was another's before."""
    with opened() as store:
        goes(store, value())
        value(2.0)
        assert_same_bits(comes_back(store), value())


def a_value_comes_back_for_another_stream() -> None:
    with opened() as store:
        with torch.cuda.stream(torch.cuda.Stream()):
            goes(store, value())
        with torch.cuda.stream(torch.cuda.Stream()):
            assert_same_bits(comes_back(store), value())


def a_value_goes_where_another_stream_s_was() -> None:
    with opened() as store:
        with torch.cuda.stream(torch.cuda.Stream()):
            goes(store, value())
            first = comes_back(store)
            store.drop(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            goes(store, value(2.0))
            second = comes_back(store)
        torch.cuda.synchronize()  # to compare has the host wait
        assert_same_bits([first, second], [value(), value(2.0)])


def a_step_ends_while_a_value_goes() -> None:
    with opened() as store:
        source = value()
        store.send(0, source.untyped_storage())
        store.reset()
        source.zero_()


def a_step_ends_while_a_value_comes_back() -> None:
    with opened() as store:
        goes(store, value())
        landing = torch.empty(SIZE, device=DEVICE)
        store.fetch(0, landing.untyped_storage())
        store.reset()
        landing.zero_()


def a_store_ends_while_a_value_goes() -> None:
    with opened() as store:
        store.send(0, value().untyped_storage())
    assert not install.unpinned_early(), "pinned memory was let go of too early"


def nobody_else_has_what_goes() -> None:
    with opened() as store:
        store.send(0, value().untyped_storage())
        value(2.0)
        store.wait(0)


def nobody_else_has_what_it_lands_in() -> None:
    with opened() as store:
        goes(store, value())
        store.fetch(0, torch.empty(SIZE, device=DEVICE).untyped_storage())
        value(2.0)
        store.wait(0)


def sending(problem: Problem) -> Solution:
    """Values go at random places, as many as may."""
    alone = problem.with_host(None)
    plan = lower(alone, Schedule.from_runs(alone.graph, np.eye(len(alone.graph.ops), dtype=bool)))
    sent = as_run(problem, with_transfers(problem, plan, np.random.default_rng(0), share=1.0))
    return certify(problem, 10**12, sent, method="by hand")


@functools.cache
def sending_step() -> tuple[CompiledStep, nn.Module, Tensor]:
    """A step whose values wait in pinned memory, the network that it trains, and a batch."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU()))).cuda()
    second_memories = SecondMemories("pinned", 10**9, cache=False)
    backend = Backend(sending, profile=DEVICES["h100"], second_memories=second_memories)
    compiled, x = CompiledStep(lambda x: net(x).square().mean(), Options("1 TB"), backend), torch.randn(512, 64).cuda()
    compiled(x).backward()
    return compiled, net, x


def a_step_has_values_elsewhere() -> None:
    compiled, net, x = sending_step()
    found = torch.autograd.grad(compiled(x), [*net.parameters()])
    assert_same_bits(found, torch.autograd.grad(net(x).square().mean(), [*net.parameters()]))


def a_step_is_left_after_its_forward() -> None:
    compiled, _, x = sending_step()
    compiled(x)
    a_step_has_values_elsewhere()


@functools.cache
def step_at_home() -> tuple[TrainingStep, list[nn.Module], Tensor]:
    """A step of a model at home on the CPU, the model with a plain one on the device, and a batch.

    It has no small tensors: to copy these back has the host wait for the step's stream, and this for what was sent.
    """
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3))).cuda(), torch.randn(64, 512).cuda()
    model = copy.deepcopy(plain).cpu()
    where: Any = {"device": "cuda", "host_budget": "100 MB", "profile": "roofline:h100", "cache": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = training_step(lambda x: model(x).square().mean(), optimizer, "1 GB", time_limit=0.5, wait="best", **where)
    step(x)
    return step, [model, plain], x


def a_model_at_home_is_used_after_its_step() -> None:
    """By the host, which reads it, and writes to it before the next call begins."""
    step, (model, plain), x = step_at_home()
    plain.load_state_dict(model.state_dict())
    step(x)
    assert all(map(install.host_has_waited, model.parameters())), "the host does not wait for what goes home"
    plain.zero_grad()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_bits([*model.parameters()], [p.cpu() for p in plain.parameters()])
    model.load_state_dict(state := {name: t.neg() for name, t in model.state_dict().items()})
    torch.cuda.synchronize()
    assert_same_bits(model.state_dict(), state)


def a_model_at_home_trains_on() -> None:
    step, _, x = step_at_home()
    for _ in range(2):
        step(x)


class IdleClock:
    """A clock that is read only while the device has nothing to do."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        all_ = [torch.Stream(stream_id=i, device_index=0, device_type=1).query() for i in range(33)]
        assert all(all_), "the device is at work when the clock is read"
        self.seconds += 1
        return self.seconds


def links_are_timed() -> None:
    with torch.cuda.stream(torch.cuda.Stream()), opened() as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "time", IdleClock())
        opening.measure(store, DEVICE, [SIZE])


def steps_are_timed() -> None:
    to = torch.zeros(SIZE).pin_memory()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "time", IdleClock())
        source = value()
        to.copy_(source, non_blocking=True)
        training.paired_seconds(DEVICE, lambda: to.copy_(source, non_blocking=True), lambda: to, (), pairs=5)


def an_op_is_timed() -> None:
    source, to = value(), torch.zeros(SIZE).pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert measure.time_on_accelerator(lambda: to.copy_(source, non_blocking=True), DEVICE) > 0


def an_op_is_counted_while_other_streams_end() -> None:
    """Memory that another stream still uses when it is let go of is counted until that stream has come so far."""
    counted, runs = (2, 3), iter(range(10**6))
    pinned = [torch.zeros(SIZE).pin_memory() for _ in counted]
    sides = dict(zip(counted, map(let_go_too_early, pinned), strict=True))

    def run() -> Tensor:
        if (side := sides.get(next(runs))) is not None:
            side.synchronize()
        return torch.ones(1024, device=DEVICE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "device_of_op", lambda node: DEVICE)
        patch.setattr(measure, "call_of", lambda node: run)
        patch.setattr(measure, "ways_of", lambda node, run, count: {})
        assert measure._measure_on_accelerator(None, None).allocated_bytes == 4096


def a_call_is_measured() -> None:
    """A call has ended on the device when its peak is told."""
    source, to = value(), torch.zeros(SIZE).pin_memory()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        measure_peak(lambda: to.copy_(source, non_blocking=True), DEVICE)
    assert {*to.tolist()} == {1.0}, "the call has not ended"


# ---------------------------------------------------------------- how a wait is taken out


class Listed(torch.Stream):
    """A stream with a role: each wait is noted, and one is taken out."""

    role: str
    known: Waits

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = super().record_event(event)
        self.known.events.append((event, self.role))
        return event

    def wait_event(self, event: torch.Event) -> None:
        whom = next(role for known, role in self.known.events if known is event)
        if self.known.goes(f"{sys._getframe(1).f_code.co_name}: {self.role} for {whom}"):
            super().wait_event(event)

    def synchronize(self) -> None:
        if self.known.goes(f"{sys._getframe(1).f_code.co_name}: host for {self.role}"):
            super().synchronize()


class Waits:
    """The waits of what copies to pinned memory: who waits for whom, in which function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: str = "") -> None:
        self.without, self.met = without, set[str]()
        self.events: list[tuple[torch.Event, str]] = []
        self._patch, now = monkeypatch, torch.accelerator.current_stream
        for method in ("out", "back", "finish"):
            monkeypatch.setattr(pinned.PinnedMover, method, self._listing(method))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: self._as(now(device), "step"))

    def _listing(self, method: str) -> Callable[..., Any]:
        really = getattr(pinned.PinnedMover, method)

        def call(mover: Any, *args: Any) -> Any:
            for role in ("out", "back"):
                stream = getattr(mover, f"_{role}")
                if not isinstance(stream, Listed):
                    self._patch.setattr(mover, f"_{role}", self._as(stream, role))
            return really(mover, *args)

        return call

    def _as(self, stream: torch.Stream, role: str) -> Listed:
        listed = Listed(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
        listed.role, listed.known = role, self
        return listed

    def goes(self, wait: str) -> bool:
        """Note a wait; whether it is there."""
        self.met.add(wait)
        return wait != self.without


def of_mover(wait: str) -> Take:
    return lambda monkeypatch: Waits(monkeypatch, wait) and None


def not_kept(*, landing: bool) -> Take:
    """A store that lets go of sources, or of landings, as soon as their copies begin."""

    class Forgetful(store_module.StoredValue):
        def __setattr__(self, name: str, new: Any) -> None:
            forgets = name == "kept" and getattr(self, "arrived", False) == landing
            super().__setattr__(name, None if forgets else new)

    return lambda monkeypatch: monkeypatch.setattr(store_module, "StoredValue", Forgetful)


def called_by(caller: str, where: Any, name: str, turn: int | None = None) -> Take:
    """A function does nothing where it is called by another; ``turn``: only every second time, 0 the first."""
    really, turns = getattr(where, name), iter(range(10**6))

    def call(*args: Any) -> None:
        skipped = sys._getframe(1).f_code.co_name == caller and (turn is None or next(turns) % 2 == turn)
        if not skipped:
            really(*args)

    return lambda monkeypatch: monkeypatch.setattr(where, name, call)


class Row(NamedTuple):
    """A wait: where it stands in the product, how it is taken out, what then runs, and what is reported."""

    place: str
    wait: str
    take: Take
    run: Callable[[], None]
    reported: str
    error: type[BaseException] = RuntimeError


MOVER, STORE, TRANSFERS = "checkmate/host/pinned.py", "checkmate/host/store.py", "checkmate/codegen/transfers.py"
READS, WRITES = r"does not wait for what stream \d+ reads from", r"does not wait for what stream \d+ writes to"
OF_MOVER = [  # the function, and who waits for whom
    ("_copy: out for step", a_value_goes_and_comes_back, WRITES),  # a copy out for the value
    ("_copy: back for step", a_value_goes_and_comes_back, WRITES),  # one back for who had the memory before
    ("wait: step for out", a_value_goes_and_comes_back, READS),  # who has the memory next for a copy out
    ("wait: step for back", a_value_goes_and_comes_back, WRITES),  # who reads what came back
    ("wait: step for out", a_step_has_values_elsewhere, WRITES),  # what is to come back has not gone
    ("wait: step for back", a_step_has_values_elsewhere, WRITES),
    ("_copy: step for out", a_value_comes_back_for_another_stream, WRITES),  # where the user's stream is another one
    ("_copy: step for back", a_value_goes_where_another_stream_s_was, READS),
    ("finish: host for out", a_step_ends_while_a_value_goes, READS),
    ("finish: host for back", a_step_ends_while_a_value_comes_back, WRITES),
]
CALLS = {"finish": "synchronize"}
ROWS = [
    *(
        Row(f"{MOVER} {wait.partition(':')[0]} {CALLS.get(wait.partition(':')[0], 'wait_event')}", wait,
            of_mover(wait), run, reported)
        for wait, run, reported in OF_MOVER
    ),
    Row(MOVER, "finish, before the memory is let go of", of_mover("finish: host for out"),
        a_store_ends_while_a_value_goes, "let go of too early", AssertionError),
    Row(STORE, "what goes is kept", not_kept(landing=False), nobody_else_has_what_goes, READS),
    Row(STORE, "what it lands in is kept", not_kept(landing=True), nobody_else_has_what_it_lands_in, WRITES),
    Row(STORE, "reset, of what is under way", called_by("_end", pinned.PinnedMover, "finish"),
        a_step_ends_while_a_value_goes, READS),
    Row(STORE, "the end, of what is under way", called_by("_end", pinned.PinnedMover, "finish"),
        a_store_ends_while_a_value_goes, "let go of too early", AssertionError),
    Row(TRANSFERS, "arrive", called_by("arrive", OpenCall, "wait"),
        a_step_has_values_elsewhere, "wait for it", HostError),
    Row(TRANSFERS, "land", called_by("land", OpenCall, "wait"), a_step_has_values_elsewhere,
        f"{WRITES}|wait for it", Exception),
    Row(MOVER, "finish, before the user has what went home, and the next call begins", of_mover("finish: host for out"),
        a_model_at_home_is_used_after_its_step, "does not wait for what goes home", AssertionError),
    Row("checkmate/codegen/second_memory.py", "finish, of what went home",
        called_by("finish", Store, "reset"), a_model_at_home_trains_on, "already", HostError),
    Row("checkmate/codegen/second_memory.py", "finish", called_by("finish", Store, "reset"),
        a_step_is_left_after_its_forward, "already", HostError),
    *(
        Row(f"checkmate/{file}.py seconds _synchronize", when, called_by("seconds", where, "_synchronize", turn), run,
            "at work", AssertionError)
        for file, where, run in (
            ("host/opening", opening, links_are_timed), ("demo/training", training, steps_are_timed)
        )
        for turn, when in enumerate(("before the clock is read", "before it is read again"))
    ),
    Row("profiling/measure.py time_on_accelerator synchronize", "before events are asked",
        called_by("time_on_accelerator", torch.accelerator, "synchronize"), an_op_is_timed, "must be completed"),
    Row("profiling/measure.py _measure_on_accelerator synchronize", "before the first run",
        called_by("_measure_on_accelerator", torch.accelerator, "synchronize"),
        an_op_is_counted_while_other_streams_end, "4096", AssertionError),
    Row("checkmate/memory/meter.py _measure_by_allocator synchronize", "at the end",
        called_by("_measure_by_allocator", torch.accelerator, "synchronize"), a_call_is_measured,
        "has not ended", AssertionError),
]  # fmt: skip
THEMSELVES = {
    "checkmate/host/opening.py _synchronize synchronize",
    "checkmate/demo/training.py _synchronize synchronize",
    "profiling/mesh.py finish synchronize",
}
WAITS = {"wait_event", "wait_stream", "synchronize", "_synchronize", "record_stream"}


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("run", [*{row.run: None for row in ROWS}], ids=lambda run: run.__name__)
def test_with_all_waits_nothing_is_reported(run: Callable[[], None]) -> None:
    run()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.place}, {row.wait}, {row.run.__name__}")
def test_without_a_wait_it_is_reported(row: Row) -> None:
    with pytest.MonkeyPatch.context() as patch:
        row.take(patch)
        with pytest.raises(row.error, match=row.reported):
            row.run()
    torch.cuda.synchronize()
    install.unpinned_early()
    row.run()  # the mutant is gone


@pytest.mark.parametrize("clocks", [True, False])
def test_copies_run_as_late_as_they_may_and_orders_are_checked(clocks: bool) -> None:
    install.set_option("clocks", clocks)
    late, checked = install.lib().simulated_late_tasks(), install.lib().simulated_orders_checked()
    a_value_goes_and_comes_back()
    assert install.lib().simulated_late_tasks() == late + 2
    assert install.lib().simulated_orders_checked() > checked
    assert install.unpinned_early() == 0


def test_without_clocks_the_bits_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    install.set_option("clocks", False)
    of_mover("wait: step for back")(monkeypatch)
    with pytest.raises(AssertionError, match="not the same bits"):
        a_value_goes_and_comes_back()


def test_no_wait_is_missing_from_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of the product's text nor, of what copies, one that is made."""
    found = set()
    for path in (path for room in ("checkmate", "profiling", "solvers") for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if any(name in text for name in WAITS) else ():
            if isinstance(function, ast.FunctionDef):
                found |= {f"{path.relative_to(ROOT)} {function.name} {name}" for name in waits_in(function)}
    assert found == {row.place for row in ROWS if " " in row.place} | THEMSELVES
    waits = Waits(monkeypatch)
    for run in {row.run: None for row in ROWS if row.place.startswith("checkmate/host/")}:
        run()
    assert waits.met == {wait for wait, _, _ in OF_MOVER}


def waits_in(function: ast.FunctionDef) -> set[str]:
    """The names of waits that a function calls itself, and not within another one."""
    found, todo = set(), list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Call):
            found.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
        todo += ast.iter_child_nodes(node)
    return found & WAITS


def test_a_plan_without_one_of_its_waits_is_no_plan() -> None:
    (solution,) = sending_step()[0].plans
    plan, problem = solution.plan, solution.problem
    assert check_plan(plan, problem) == []
    waits = [i for i, step in enumerate(plan.steps) if isinstance(step, Wait)]
    assert len(waits) > 20
    for i in waits:
        rest = (*plan.steps[:i], *plan.steps[i + 1 :])
        assert check_plan(Plan(rest, plan.boundary - (i < plan.boundary)), problem), plan.steps[i]


def test_the_allocator_waits_for_other_streams_where_its_cache_is_emptied() -> None:
    """So neither the meter nor a replay waits itself before it reads what is in use."""
    pinned = [torch.zeros(SIZE).pin_memory() for _ in range(2)]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    let_go_too_early(pinned[0])
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] > before
    use = measure_peak(lambda: None, DEVICE)
    assert (use.before, use.peak) == (before, 0)
    let_go_too_early(pinned[1])
    replays = Replays.now(DEVICE, 0)
    assert replays is not None
    assert sum(replays.state.asked) == before
    assert [{*to.tolist()} for to in pinned] == [{1.0}, {1.0}]
