"""Plans whose budget holds in the blocks of PyTorch's allocator, whose bytes are foretold: on the simulated device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.backends.planner import Options, Planner
from checkmate.backends.static_memory import GIVEN, HELD, Replays, plan_in_blocks
from checkmate.core.solution import Solution
from checkmate.errors import InfeasibleBudget, SolverError
from checkmate.memory import measure_peak
from checkmate.memory.cuda_allocator import DeviceState, Used
from checkmate.solvers.search.min_budget import min_budget
from checkmate.units import format_bytes
from tests.support.sampling import long
from tests.support.simulated_cuda import install

simulated = pytest.mark.skipif(not install.is_installed(), reason="to the byte of the simulated CUDA device")
SHARES = (0.0, 0.5, 1.0)  # of the range between the smallest budget and that of keeping all
SECONDS = 0.3  # to plan


@pytest.fixture
def allocator() -> Iterator[Callable[[bool], None]]:
    """Sets expandable segments. No network of a test before is on the device, whoever still holds it."""

    def expand(on: bool) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        install.set_option("expandable", on)

    yield expand
    for tensor in (each for net in _nets for each in (*net.parameters(), *net.buffers())):
        tensor.grad, tensor.data = None, torch.empty(0, device="cuda")
    _nets.clear()
    expand(False)


_nets: list[nn.Module] = []


def linear(rows: int, width: int) -> tuple[Callable[..., Tensor], Tensor]:
    net = nn.Sequential(*(module for _ in range(5) for module in (nn.Linear(width, width), nn.GELU()))).cuda()
    _nets.append(net)
    return lambda x: net(x).square().mean(), torch.randn(rows, width, device="cuda")


class Mixed(nn.Module):
    """Convolutions, batch norm, dropout, attention with dropout; tensors of 1 to 3 MB that are no whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 15, 3, padding=1), nn.BatchNorm2d(15), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Conv2d(15, 15, 3, padding=1), nn.GELU()),
        )
        self.attention = nn.MultiheadAttention(196, 4, batch_first=True, dropout=0.1)
        self.norm, self.head = nn.LayerNorm(196), nn.Linear(196, 1001)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.body(x).flatten(2)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        return F.cross_entropy(self.head(self.norm(rows + mixed).mean(1)), y)


def mixed() -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    _nets.append(net := Mixed().cuda())
    batch = torch.randn(115, 3, 14, 14, device="cuda"), torch.randint(1001, (115,), device="cuda")
    return lambda x, y: net(x, y), *batch


def assert_budget_holds(step: Callable[..., Tensor], *batch: Tensor, budget: int) -> None:
    """Measure a step: it takes what is foretold from where it begins."""
    compiled = checkmate.compile(step, budget=budget, time_limit=SECONDS, wait="best", memory="allocator")
    compiled(*batch)
    wanted = [*_nets[0].parameters()]
    use = measure_peak(lambda: torch.autograd.grad(compiled(*batch), wanted), "cuda")
    (plan,) = compiled.plans
    assert use.began is not None
    assert Replays(use.began, use.device).first(plan) == (use.allocated, use.reserved)
    assert use.before + use.peak <= plan.peak <= budget
    assert use.allocated <= plan.details[GIVEN] <= budget


def assert_budgets_hold(step: Callable[..., Tensor], *batch: Tensor) -> int:
    """Try budgets of all shares, or the smallest that a refusal names; count the refusals."""
    problem, refusals = checkmate.trace(step, *batch), 0
    least = checkmate.min_budget(problem, time_limit=SECONDS).peak
    for share in SHARES:
        budget = least + int(share * (problem.keep_all_peak - least))
        try:
            assert_budget_holds(step, *batch, budget=budget)
        except InfeasibleBudget as refusal:
            refusals += 1
            assert_budget_holds(step, *batch, budget=refusal.min_budget)
    return refusals


@pytest.mark.cuda
@simulated
@pytest.mark.parametrize("expandable", [False, long(True)])
@pytest.mark.parametrize(
    "make",
    [lambda: linear(400, 1000), long(lambda: linear(512, 768)), long(lambda: linear(640, 600)), long(mixed)],
    ids=["400-1000", "512-768", "640-600", "mixed"],
)
def test_a_budget_holds_in_blocks_that_are_foretold_to_the_byte(
    allocator: Callable[[bool], None], make: Callable[[], tuple[Any, ...]], expandable: bool
) -> None:
    allocator(expandable)
    refusals = assert_budgets_hold(*make())
    assert make is mixed or (refusals == 0) == expandable


@pytest.mark.cuda
@simulated
def test_a_plan_and_the_log_say_what_is_given_and_held(
    allocator: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The log also says what expandable segments would save, where the allocator runs without."""
    step, x = linear(640, 600)
    for expandable in (False, True):
        allocator(expandable)
        caplog.clear()
        with caplog.at_level(logging.INFO, "checkmate.memory"):
            compiled = checkmate.compile(step, budget="1 GB", wait="best", time_limit=SECONDS)
            compiled(x)
        (plan,) = compiled.plans
        given, held = (format_bytes(plan.details[f"{what}_peak"]) for what in ("allocated", "reserved"))
        assert f"allocated  {given} in blocks of PyTorch's allocator, which holds {held}, as replayed" in str(plan)
        told = f"a plan asks for {format_bytes(plan.peak)}; PyTorch's allocator gives {given} for it, and holds {held}"
        (line,) = [record.message for record in caplog.records if record.message.startswith("a plan asks for")]
        assert line.startswith(told)
        assert ("; PYTORCH_ALLOC_CONF=expandable_segments:True would save" in line) == (not expandable)


@pytest.mark.cuda
@simulated
@pytest.mark.parametrize("expandable", [False, long(True)])
def test_steps_one_after_another_stay_within_what_was_foretold(
    allocator: Callable[[bool], None], expandable: bool
) -> None:
    step, x = linear(512, 768)
    allocator(expandable)
    compiled = checkmate.compile(step, budget="1 GB", wait="best", time_limit=SECONDS)
    torch.cuda.reset_peak_memory_stats()
    for turn in range(3):
        compiled(x).backward()
        _nets[0].zero_grad()
        (plan,) = compiled.plans
        assert torch.cuda.max_memory_allocated() <= plan.details["allocated_peak"]
        assert torch.cuda.max_memory_reserved() <= plan.details["reserved_peak"] or turn == 0
        torch.cuda.reset_peak_memory_stats()


class Stand:
    """For `Replays`: the allocator gives so much more than each plan asks for."""

    def __init__(self, budget: int, *more: int) -> None:
        self.budget, self._more = budget, [*more]

    def told(self, plan: Solution) -> Solution:
        assert plan.peak is not None
        return replace(plan, details={**plan.details, GIVEN: plan.peak + self._more.pop(0), HELD: 99})

    def tell(self, plan: Solution) -> None:
        pass

    def steps(self, plan: Solution, *, expanding: bool) -> Used:
        assert expanding
        return Used(plan.peak or 0, 0)


DEPS = [[], *([k] for k in range(8)), *([k - 1, 16 - k] for k in range(9, 16))]  # eight ops and back
CHAIN = checkmate.Problem.from_dag(DEPS, [1] * 16, [8] * 16, forward=9)  # from 40 to 72 bytes


def planned(budget: int, *more: int) -> Solution:
    planner = Planner(Options(budget=f"{budget} B", cache=False, time_limit=SECONDS))
    return plan_in_blocks(planner.plan, CHAIN, Stand(budget, *more))


@pytest.fixture(scope="module")
def least() -> int:
    return min_budget(CHAIN).peak


def test_a_plan_is_taken_once_no_more_is_given_than_the_budget(least: int) -> None:
    most = CHAIN.keep_all_peak
    assert least + 16 <= most
    assert planned(most, 0).peak == most
    within = planned(most, 8, 8)
    assert within.peak + 8 <= most
    assert within.budget == most - 8
    assert planned(most, 8, 16, 8).budget <= most - 16
    assert planned(least, 0).peak == least


def test_the_lowest_plan_is_tried_last_and_a_refusal_says_what_it_takes(least: int) -> None:
    most = CHAIN.keep_all_peak
    assert planned(most, 999, most - least).peak == least  # what the first is given leaves nothing
    assert planned(most, 8, 16, 24, 32, 0).peak == least  # each is given more than the last
    for budget, more in ((least + 8, (99, 9)), (least - 1, (9,))):
        with pytest.raises(InfeasibleBudget, match="in blocks of PyTorch's allocator") as found:
            planned(budget, *more)
        assert (found.value.budget, found.value.min_budget) == (budget, least + 9)
        assert f"Smallest budget that works: {least + 9} B, {least} B with PYTORCH_ALLOC_CONF" in str(found.value)


def test_a_plan_that_is_found_later_is_refused_if_more_is_given_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = checkmate.solve(CHAIN, 1000)
    replays = Replays(DeviceState(), torch.device("cuda"), budget=100)
    monkeypatch.setattr(Replays, "steps", lambda self, plan: Used(100, 120))
    replays.check(plan)
    assert (plan.details[GIVEN], plan.details[HELD]) == (100, 120)
    monkeypatch.setattr(Replays, "steps", lambda self, plan: Used(101, 120))
    with pytest.raises(SolverError, match="would give 101 B for it, of a budget of 100 B"):
        replays.check(plan)
