"""The largest batch of PyTorch steps: against trying every size, and against the meter."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from benchmarks.networks.dags import unit_chain
from checkmate import Host, Problem, max_batch_size, trace
from checkmate.capture.number_inputs import NotFree
from checkmate.core import simulator
from checkmate.errors import BudgetError, HostError, InfeasibleBudget, Unsupported
from checkmate.sizes.largest_batch import LargestBatch
from checkmate.sizes.max_batch_size import BASELINES
from checkmate.sizes.search import ONE_FORWARD, SizeSearch, is_within, most_seconds, plan_within
from checkmate.sizes.sized_steps import SizedSteps
from tests.sizes.test_sized_steps import grown
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn

ROOFLINE = "roofline:h100"
HIDDEN, BUDGET = 32, 100_000
MEASURED = {"profile": "measure", "measure": True}


def _make_step(device: str = "meta") -> Callable[[Tensor], Tensor]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, 4)).to(device)
    return lambda x: model(x).square().sum()


def _make_batch(n: int, device: str = "meta") -> Tensor:
    return torch.ones(n, HIDDEN, device=device)


def _search(budget: int | str = BUDGET, **options: Any) -> LargestBatch:
    settings: dict[str, Any] = {"make_step": _make_step, "make_batch": _make_batch, "time_limit": 10, **options}
    return max_batch_size(
        **{"profile": ROOFLINE, "budget": f"{budget} B" if isinstance(budget, int) else budget, **settings}
    )


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without tracing, of n samples: 10 bytes and 4 n if all is kept, or 3 n if one of 5 ops runs again."""
    monkeypatch.setattr("checkmate.sizes.sized_steps.traced", lambda _, batch, *__: grown(unit_chain(2), len(batch[0])))
    monkeypatch.setattr("checkmate.sizes.sized_steps.OpenTrace", Mock(side_effect=NotFree))


@pytest.mark.slow
def test_the_answer_fits_and_the_next_size_does_not() -> None:
    """The curve ends at it and names the fastest; what keeps all is found exactly; no baseline is larger."""
    found, step = _search(baselines=True, time_limit=60), _make_step()
    for size, fits in ((found.size, True), (found.size + 1, False)):
        problem = trace(step, _make_batch(size), profile=ROOFLINE)
        cap = most_seconds(problem, ONE_FORWARD)
        solution = plan_within(problem, BUDGET, cap, time_limit=5)
        assert is_within(solution, cap) is fits
        assert fits or solution.bound > cap
    assert found.proven
    assert found.solution.peak <= BUDGET
    assert found.solution.cost <= most_seconds(found.solution.problem, ONE_FORWARD)
    assert found.solution.modules.forward is not None
    kept = found.keep_all, found.keep_all + 1
    peaks = [trace(step, _make_batch(n), profile=ROOFLINE).keep_all_peak for n in kept]
    assert [peak <= BUDGET for peak in peaks] == [True, False]
    assert found.size > found.keep_all == found.baselines["checkpoint-all"].size
    sizes = [point.size for point in found]
    assert sizes == sorted(sizes)
    assert sizes[-1] == found.size
    assert found.keep_all in sizes
    for point in found:
        assert point.throughput == pytest.approx(point.size / point.seconds)
        assert point.peak <= BUDGET
        assert point.throughput <= found.fastest.throughput
    assert list(found.baselines) == list(BASELINES)
    baselines = [point for point in found.baselines.values() if point is not None]
    assert all(point.size <= found.size for point in baselines)


def test_a_tighter_cap_gives_a_smaller_size(on_paper: None) -> None:
    sizes = {cap: _search(90, max_overhead=cap).size for cap in (0.0, 0.19, 0.2, ONE_FORWARD, None)}
    assert sizes == {0.0: 20, 0.19: 20, 0.2: 26, ONE_FORWARD: 26, None: 26}


@pytest.mark.slow
def test_a_step_that_changes_with_the_size_is_made_for_each() -> None:
    made: list[int] = []

    def make_step(n: int) -> nn.Module:
        made.append(n)
        return nn.Linear(n, n).to("meta")

    found = _search(100_000, make_step=make_step, make_batch=lambda n: torch.ones(1, n, device="meta"))
    assert {found.size, found.size + 1} <= set(made)
    weights = 4 * found.size**2
    assert 2 * weights <= 100_000 < 2 * 4 * (found.size + 12) ** 2


@in_turn(kind=[lambda named: tuple(named.values()), dict, lambda named: [*named.values()]])
def test_steps_and_batches_of_all_kinds(kind: Callable[[dict[str, Tensor]], Any]) -> None:
    model = nn.Linear(8, 3).to("meta")

    def step(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(x), target)

    def make_batch(n: int) -> Any:
        return kind({"x": torch.ones(n, 8, device="meta"), "target": torch.zeros(n, dtype=torch.long, device="meta")})

    assert _search(50_000, make_step=lambda: step, make_batch=make_batch, largest=2).size == 2
    assert _search(make_step=nn.Linear(HIDDEN, 4).to("meta"), largest=2).size == 2  # a module is a step


@pytest.mark.long
def test_a_second_memory_makes_room_for_more() -> None:
    host = checkmate.Host(10**6, send=50e9, fetch=50e9)
    alone, found = _search(time_limit=60), _search(host=host, time_limit=60)
    assert found.size > alone.size
    assert found.solution.plan.sent
    problem = trace(_make_step(), _make_batch(found.size), profile=ROOFLINE).with_host(host)
    assert found.solution.cost <= most_seconds(problem, ONE_FORWARD)
    assert not simulator.check_plan(found.solution.plan, problem, BUDGET)


@pytest.mark.slow
def test_measured_costs_and_a_measured_peak() -> None:
    """On real tensors: the planned peak is the measured one, to the byte."""
    step = _make_step("cpu")
    options = {"max_overhead": None, "smallest": 100, "largest": 101, "time_limit": 60, **MEASURED}
    found = _search(make_step=lambda: step, make_batch=partial(_make_batch, device="cpu"), **options)
    assert found.measured_peak == found.solution.peak <= BUDGET
    assert found.solution.overhead > 0


@pytest.mark.slow
def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    step: Any = {"make_step": lambda: lambda x: model(x).sum(), "make_batch": lambda n: torch.ones(n, 16)}
    found = _search(100_000, smallest=2, largest=8, **step, **MEASURED)
    assert found.measured_peak <= 100_000
    assert_same_bits(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_bits(state, torch.get_rng_state())


def test_where_more_is_measured_than_predicted_there_is_room_made(
    monkeypatch: pytest.MonkeyPatch, on_paper: None
) -> None:
    monkeypatch.setattr(SizedSteps, "measured_peak", lambda self, size, solution: solution.peak + 10)
    options = {"make_step": lambda: _make_step("cpu"), "make_batch": partial(_make_batch, device="cpu")}
    plain, found = _search(90, **options), _search(90, measure=True, **options)
    assert (plain.size, plain.measured_peak, plain.next_size) == (26, None, "proven")
    assert (found.size, found.measured_peak, found.next_size) == (23, 89, "not found")


def test_a_size_that_does_not_fit_is_refused_with_the_smallest_budget(on_paper: None) -> None:
    for overhead, least in ((None, 34), (ONE_FORWARD, 34), (0.1, 42)):
        with pytest.raises(InfeasibleBudget, match=f"Not even size 8 fits 30 B: .*{least} B") as refused:
            _search(30, smallest=8, max_overhead=overhead)
        assert (refused.value.budget, refused.value.min_budget) == (30, least)
        assert refused.value.op
        assert _search(least, smallest=8, max_overhead=overhead).size == 8
    with pytest.raises(InfeasibleBudget, match=r"runs \d+\.\d% of the step again, above the cap.*42 B") as refused:
        _search(34, smallest=8, max_overhead=0.1)
    assert refused.value.min_budget == 42


def test_a_batch_that_cannot_be_made_and_a_step_that_fails_name_the_size() -> None:
    def make_batch(n: int) -> Tensor:
        if n > 2:
            raise IndexError("no more than 2")
        return _make_batch(n)

    with pytest.raises(Unsupported, match=r"make_batch, for size \d+, failed: IndexError: no more than 2.*largest="):
        _search(make_batch=make_batch)
    found = _search(make_batch=make_batch, largest=2)
    assert (found.size, found.next_size) == (2, "asked for no more")
    with pytest.raises(Unsupported, match=r"The step of size 16 cannot be traced"):
        _search(make_batch=lambda n: torch.ones(n, HIDDEN + 1, device="meta"))


NO_FOLDER = {"host": "file:/no/such/folder", "host_budget": "1 GB", "profile": "roofline:laptop"}


def test_arguments_that_make_no_sense() -> None:
    for options, error, says in (
        ({"make_step": lambda x, y: x}, TypeError, "lambda: step"),
        ({"make_step": lambda x: x.sum()}, Unsupported, "make_step, for size 16, failed.*lambda: step"),
        ({"make_step": lambda: torch.ones(1)}, TypeError, "gave no step"),
        ({"make_step": 3}, TypeError, "not int"),
        ({"budget": "many"}, BudgetError, "many"),
        ({"max_overhead": "two"}, ValueError, "one-forward"),
        ({"baselines": ["chen"]}, ValueError, "no method 'chen'"),
        ({"smallest": 0}, ValueError, "smallest"),
        ({"smallest": 3, "largest": 2}, ValueError, "no size from 3 to 2"),
        ({"time_limit": 0}, ValueError, "time_limit"),
        ({"measure": True}, Unsupported, "meta"),
        ({"measure": True, "host_budget": "1 GB"}, ValueError, "without a second memory"),
        ({"host": checkmate.Host(1, 1.0, 1.0), "host_budget": "1 GB"}, ValueError, "leave host_budget out"),
        ({"host": "disk", "host_budget": "1 GB"}, ValueError, "^Unknown second memory 'disk'"),
        (NO_FOLDER, HostError, "^No file can"),
        ({"host_budget": "1 GB"}, HostError, "there is none here"),
    ):
        with pytest.raises(error, match=says):
            _search(**options)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch, on_paper: None) -> Callable[..., None]:
    """Sets which share of the time is over when each part of a search ends: keep-all, largest, plan, baselines."""
    parts, table = ("keep all", "largest", "plan", "baselines"), "checkmate.sizes.max_batch_size.SHARES"
    return lambda *ends: monkeypatch.setattr(table, dict(zip(parts, ends, strict=True)))


def test_little_time_gives_an_answer_that_says_so(shares: Callable[..., None]) -> None:
    shares(0.0, 0.0, 0.0, 0.0)
    found = _search(90)
    assert (found.size, found.keep_all, found.next_size, found.ended) == (16, 16, "not looked at", "time limit")
    assert found.cut_short == ("checkpoint-all",)


def test_a_baseline_that_finds_more_is_the_answer(shares: Callable[..., None]) -> None:
    shares(0.4, 0.0, 0.0, 0.9)
    found = _search(90, baselines=["next-use"])
    assert (found.keep_all, found.size, found.next_size) == (20, 26, "not looked at")
    assert found.solution.method == "next-use"
    assert found.points[-1].size == 26


def test_ctrl_c_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch, on_paper: None) -> None:
    attempt = SizeSearch.attempt

    def interrupted(self: SizeSearch, size: int) -> Any:
        if self.method == "auto":
            raise KeyboardInterrupt
        return attempt(self, size)

    monkeypatch.setattr(SizeSearch, "attempt", interrupted)
    found = _search(90)
    assert (found.size, found.keep_all, found.ended) == (20, 20, "interrupted")
    assert found.fastest.throughput > 0
    with pytest.raises(KeyboardInterrupt):
        _search(12)


def _at_home(n: int) -> Problem:
    """A step of n samples whose two parameters, with a state each, are at home elsewhere, by links of 40 B/s."""
    parameters = [(40, [0], 4), (40, [1, 2], 5), (80, [], 4), (80, [], 5)]
    step = Problem.from_dag(
        [[], [0], [1, 0], [1], [2], [3]],
        seconds=[0.1 * n] * 6,
        sizes=[n, n, n, n, 0, 0],
        outputs=[1],
        forward=2,
        parameters=parameters,
    )
    return step.with_host(Host(1000, send=40.0, fetch=40.0)).with_homes([6, 7, 8, 9])


def test_larger_batches_are_faster_where_the_model_is_at_home_elsewhere(
    monkeypatch: pytest.MonkeyPatch, on_paper: None
) -> None:
    """Sizes with all of it here are those of other methods; waits are no recomputation, and count under no cap."""
    monkeypatch.setattr("checkmate.sizes.sized_steps.traced", lambda _, batch, *__: _at_home(len(batch[0])))
    tokens = lambda n: torch.zeros(n, 8, dtype=torch.long)  # noqa: E731
    for budget, baselines in ((150, False), (300, ["next-use"])):
        found = _search(budget, make_batch=tokens, baselines=baselines, largest=200)
        assert _at_home(found.size + 1).unavoidable_bytes.max() > budget >= found.solution.peak
        assert all(point.solution.problem.homes and point.overhead <= 1 for point in found)
        speeds = [point.throughput for point in found]
        assert found.fastest.throughput == max(speeds) > 2 * speeds[0]
        assert found[0].waited > found[0].seconds / 2
        assert found.keep_all == max((n for n in range(200) if _kept(n) <= budget), default=None)
        # A sample has eight tokens.
        assert (found.tokens, found.summary()["tokens"]) == (8, 8)
        assert f"{found.fastest.size}: {max(speeds):.4g} samples/s, {8 * max(speeds):.4g} tokens/s" in repr(found)
        assert re.search(r"size +samples/s +tokens/s +step +waits +recomputed", repr(found))


def _kept(n: int) -> int:
    return _at_home(n).with_homes(()).keep_all_peak


@pytest.mark.slow
def test_sizes_are_found_at_which_only_a_loss_in_parts_fits() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 2000))

    def make_step() -> Callable[[Tensor], Tensor]:
        return lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten())

    def make_batch(n: int) -> Tensor:
        return torch.zeros(n, 16, dtype=torch.long, device="meta")

    found = max_batch_size(make_step, make_batch, budget="3 MB", profile=ROOFLINE, max_overhead=None, time_limit=10)
    assert found.solution.problem.splits
    assert found.size > 2 * found.keep_all


@pytest.mark.slow
def test_what_is_measured_is_the_plan_of_the_answer() -> None:
    torch.manual_seed(0)
    norm, drop = nn.BatchNorm1d(2 * HIDDEN), nn.Dropout(0.1)
    model = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), norm, nn.GELU(), drop, nn.Linear(2 * HIDDEN, HIDDEN))
    found = _search(
        200_000,
        make_step=lambda: lambda x: model(x).square().sum(),
        make_batch=partial(_make_batch, device="cpu"),
        **MEASURED,
    )
    assert found.solution.overhead > 0
    assert found.measured_peak == found.solution.peak
