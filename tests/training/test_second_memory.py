"""Steps with a second memory: values that wait there, and whole steps whose tensors are at home there.

The numbers are plain PyTorch's, in the planned bytes.
"""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate.backends import ranks
from checkmate.backends.tensor_state import same_bits
from checkmate.core import files
from checkmate.core.simulator import simulate
from checkmate.errors import HostError, InfeasibleBudget, InvalidProblem, Unsupported, VerificationError
from checkmate.host import home_of, opening
from checkmate.memory import available, measure_peak
from checkmate.solvers.background_search import News
from checkmate.units import parse_bytes
from checkmate.updates.gradients import HELD_BYTES
from checkmate.updates.optimizers import Update
from checkmate.verification import compare
from tests.support.bits import assert_same_bits
from tests.support.offers import offered
from tests.support.processes import run_python
from tests.support.sampling import long, slow
from tests.support.stepping import assert_same, train
from tests.support.transfers import as_run, with_transfers
from tests.support.whole_steps import (
    Scored,
    TrainedWhole,
    adamw,
    assert_as_plain,
    classifier,
    itself,
    plain_step,
    planned_step,
    training,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 0.4  # to plan
THERE: dict[str, Any] = {"host_budget": "100 MB", "host": "file:/dev/shm"}


def net() -> nn.Module:
    """Dropout and batch norm, and values that are cheap to send for their bytes."""
    return Scored(*classifier(blocks=4))


def batch(size: int = 512, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=generator), torch.randint(8, (size,), generator=generator)


def below(step: Any) -> int:
    """A budget that holds with a second memory only."""
    problems = checkmate.trace(step, *batch()), checkmate.trace(step, *batch(), **THERE)
    return sum(checkmate.min_budget(problem, time_limit=SECONDS).peak for problem in problems) // 2


@functools.cache
def budget_of_net() -> int:
    return below(net())


def compiled(fn: Any) -> Any:
    return checkmate.compile(fn, budget=budget_of_net(), time_limit=SECONDS, wait="best", **THERE)


@pytest.mark.slow
def test_it_trains_below_what_recomputation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of plain PyTorch, the bytes of the plan here and there, and the same plan in the next process."""
    budget = budget_of_net()
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    monkeypatch.setattr(opening, "_measured", {})
    with pytest.raises(InfeasibleBudget):
        checkmate.compile(net(), budget=budget, time_limit=SECONDS)(*batch())
    plain = net()
    expected = train(plain, plain, batch())
    model = compiled(net())

    found = train(model, model, batch())

    assert_same(found, expected)
    (plan,) = model.plans
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    (use,) = model.memory().second_memories
    assert use.peak == simulate(plan.plan, plan.problem).host_peak > 0
    assert (use.where, use.calls, use.pending) == ("file:/dev/shm", 3, 0)
    assert "second memory" in str(model.memory())

    monkeypatch.setattr(opening, "_measured", {})  # as in another process
    again = compiled(net())
    again(*batch()).backward()
    assert again.plans[0].plan == plan.plan
    assert again.plans[0].origin == "plan cache"


@pytest.mark.slow
def test_batches_of_several_sizes_and_validation_between_them() -> None:
    plain, model = net(), compiled(net())
    left = []
    for one in (plain, model):
        torch.manual_seed(1)
        seen = []
        for i, size in enumerate((512, 300, 512)):
            one(*batch(size, i)).backward()
            with torch.no_grad():
                seen.append(one(*batch(100, i)))
        left.append((seen, [p.grad for p in one.parameters()], one.state_dict()))
    assert_same_bits(*left)
    assert len(model.plans) == 2


@pytest.mark.slow
def test_whole_steps_with_gradients_that_are_accumulated() -> None:
    """The budget holds with a second memory only."""
    how: dict[str, Any] = {"clip_norm": 1.0, "accumulate": 2}
    budget = below(planned_step(model := net(), adamw(model), **how))
    train = training(net, loss=itself, batch=lambda i: batch(seed=i), steps=4, metered=False, **how)
    step, _ = assert_as_plain(train, budget=budget, time_limit=SECONDS, **THERE)
    assert all(plan.plan.sent for plan in step.plans)
    assert len(step.memory().second_memories) == 1


@pytest.mark.slow
def test_a_plan_that_sends_takes_over_between_two_steps() -> None:
    plain, model = net(), net()
    most = checkmate.trace(plain, *batch()).keep_all_peak
    with offered() as searches:
        step = checkmate.compile(model, budget=most, memory="allocator", **THERE)
        left = []
        for one, run in ((plain, plain), (model, step)):
            torch.manual_seed(1)
            for i in range(3):
                run(*batch(seed=i)).backward()
                for search in searches:
                    begun = search.query.start
                    sent = as_run(begun.problem, with_transfers(begun.problem, begun.plan, np.random.default_rng(i)))
                    search.news = search.better = News(begun.cost, 0.0, float(i), sent)
                left.append([p.grad for p in one.parameters()])
                one.zero_grad()
        assert_same_bits(left[3:], left[:3])
        assert step.planning[0].swaps == 2
        for search in searches:
            search.better = None
    given = batch()
    use = measure_peak(lambda: step(*given).backward())
    (plan,) = step.plans
    assert plan.plan.sent
    assert plan.problem.resident + use.peak == plan.peak
    assert step.memory().second_memories[0].peak == simulate(plan.plan, plan.problem).host_peak


@pytest.mark.slow
def test_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"budget": budget_of_net(), "time_limit": SECONDS, **THERE}
    report = checkmate.verify(net(), *batch(), **how)
    assert report.measured_peak == report.predicted_peak
    # More bytes in the second memory than the plan has there are told.
    less = lambda plan, problem: replace(simulate(plan, problem), host_peak=1)  # noqa: E731
    monkeypatch.setattr(compare, "simulate", less)
    with pytest.raises(VerificationError, match=r"waited in the second memory at once, and not 1 B"):
        checkmate.verify(net(), *batch(), **how)


@pytest.mark.parametrize("where", ["file:/no/such/folder", "pinned"])
def test_where_there_is_no_such_memory(where: str) -> None:
    model = checkmate.compile(net(), budget="1 GB", host_budget="1 GB", host=where)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HostError, match="/no/such/folder" if where.startswith("file") else "CUDA"):
        model(*batch())
    assert_same_bits(model.state_dict(), before)


# ---------------------------------------------------------------- parameters, states and sums at home in a file

BUDGET = "9 MB"
WIDTH = 512  # a matrix of it takes 1 MiB, the least that has a home
X, Y = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


class Net(nn.Module):
    """A frozen layer with a small trained one beside it, one that is used twice, and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.tied, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        h = F.gelu(self.frozen(x) + self.up(self.down(x)))
        h = self.norm(self.tied(F.dropout(self.tied(h), 0.1)))
        for layer in self.layers:
            h = F.gelu(layer(h))
        return F.cross_entropy(self.head(h), y) * factor


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-4, centered=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, fused=True),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.1},
    "sums": {"accumulate": 3},
    "clipped sums": {"accumulate": 2, "clip_norm": 0.1},
    "scaled sums": {"accumulate": 2, "clip_norm": 0.1, "scaler": True},
}


def _optimizer(model: nn.Module, name: str = "AdamW") -> optim.Optimizer:
    return OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def _homes(model: nn.Module, optimizer: optim.Optimizer) -> list[str]:
    """Where the large parameters, states and sums are."""
    states = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    held = [*model.parameters(), *states, *(p.grad for p in model.parameters() if p.grad is not None)]
    return ["in memory" if home_of(t) is None else "in a file" for t in held if t.nbytes >= 2**20]


CASES = [("AdamW", "plain"), ("AdamW", "clipped sums"), ("RMSprop", "scaled sums")]
REST = [(n, w) for n in OPTIMIZERS for w in WAYS if (n, w) not in CASES and ("fused" not in n or "scaled" not in w)]


@pytest.mark.parametrize(("name", "way"), [*CASES[:2], slow(*CASES[2]), *(long(*case) for case in REST)])
def test_same_numbers_within_the_bytes(name: str, way: str, tmp_path: Path) -> None:
    """Six steps at a budget that is half of what parameters, states and sums take; each peak is within its plan's."""
    options, homes = dict(WAYS[way]), list[list[str]]()
    if options.pop("scaler", False):
        options["scaler"] = lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def batch(i: int) -> tuple[Tensor, ...]:
        return X, Y, torch.tensor(float("inf") if "scaler" in options and i == 3 else 1.0)

    def train(make: Callable[..., Any]) -> TrainedWhole:
        new = (lambda: checkmate.in_file(Net(), tmp_path)) if make is not plain_step else Net
        seen = lambda model, optimizer: homes.append(_homes(model, optimizer))  # noqa: E731
        how = {"loss": itself, "batch": batch, "steps": 6, "look": seen, **options}
        return training(new, lambda model: _optimizer(model, name), **how)(make)

    step, found = assert_as_plain(train, budget=BUDGET, host=f"file:{tmp_path}", host_budget="100 MB")
    assert len(homes[0]) >= 4
    (use,) = step.memory().second_memories
    assert use.homes <= use.peak
    assert use.homes == step.plans[-1].problem.homes_bytes
    assert "at home" in str(step.memory())
    assert [{*where} for where in homes] == [{"in a file"}, {"in memory"}]
    firsts = 1 + options.get("accumulate", 1)  # steps in which small states and sums come to be
    assert all(plan.peak <= parse_bytes(BUDGET) and plan.problem.homes for plan in step.plans)
    most = max(plan.peak - plan.problem.resident for plan in step.plans)
    assert max(found.peaks[firsts:]) <= most + (HELD_BYTES if "scaler" in options else 0)  # which count as resident
    assert "accumulate" in options or max(found.peaks[firsts:]) == most


def _in_file(folder: Path) -> tuple[nn.Module, optim.Optimizer, checkmate.TrainingStep]:
    model = checkmate.in_file(Net(), folder)
    optimizer = _optimizer(model)
    there = {"host": f"file:{folder}", "host_budget": "100 MB", "time_limit": 0.5}
    return model, optimizer, checkmate.training_step(model, optimizer, budget=BUDGET, wait="best", **there)


def test_an_update_that_is_interrupted_is_told_and_a_checkpoint_heals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter that is at home is old or new with all of its state; the next call is refused until then."""
    model, optimizer, step = _in_file(tmp_path)
    batch = X, Y, torch.tensor(1.0)
    for _ in range(2):
        step(*batch)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    update, count = Update._step, itertools.count()

    def interrupted(self: Update, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        if next(count) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Update, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(*batch)
    left = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(Unsupported, match=r"update failed when [1-9] of 12 parameters .* step.calls = 0"):
        step(*batch)
    # A checkpoint, loaded into what is in the file, and the same step again.
    model.load_state_dict(before[0])
    optimizer.load_state_dict(copy.deepcopy(before[1]))
    torch.set_rng_state(before[2])
    step(*batch)
    assert {*_homes(model, optimizer)} == {"in a file"}
    after = model.state_dict(), optimizer.state_dict()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    kinds = []
    for i, name in enumerate(names):
        of = [[one[0][name], *one[1]["state"][i].values()] for one in (left, before, after)]
        if left[0][name].nbytes >= 2**20:
            kinds.append(["old", "new"][[all(map(same_bits, of[0], other)) for other in of[1:]].index(True)])
    assert {*kinds} == {"new", "old"}


def test_a_disk_that_is_full_in_the_middle_of_an_update_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be new in part is said; a checkpoint that is loaded heals it."""
    model, optimizer, step = _in_file(tmp_path)
    batch = X, Y, torch.tensor(1.0)
    step(*batch)
    _save(tmp_path, model, optimizer)
    write, count = os.pwrite, itertools.count()

    def full(*args: Any) -> int:
        if next(count) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HostError, match=r"to the file .* failed: .*No space left .* load a checkpoint"):
            step(*batch)
    with pytest.raises(Unsupported, match=r"update failed when [1-9]\d* of 12 parameters"):
        step(*batch)
    plain = Net()
    of_plain = _optimizer(plain)
    for other, its, run in ((model, optimizer, step), (plain, of_plain, plain_step(plain, of_plain))):
        _load(tmp_path, other, its)
        run(*batch)
    assert_same_bits((plain.state_dict(), of_plain.state_dict()), (model.state_dict(), optimizer.state_dict()))


def test_a_checkpoint_goes_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    """Saved from a model in a file, loaded into another one there, in another process, and into a plain one."""
    model, optimizer, step = _in_file(tmp_path)
    batch = X, Y, torch.tensor(1.0)
    step(*batch)
    _save(tmp_path, model, optimizer)
    step(*batch)
    there = f"from tests.training.test_second_memory import _one_more_step; _one_more_step({str(tmp_path)!r})"
    run_python("-c", there)
    plain = Net()
    of_plain = _optimizer(plain)
    _load(tmp_path, plain, of_plain)
    plain_step(plain, of_plain)(*batch)
    left = torch.load(tmp_path / "there.pt")
    for after in (left, (plain.state_dict(), of_plain.state_dict())):
        assert_same_bits(after, (model.state_dict(), optimizer.state_dict()))


def _one_more_step(folder: str) -> None:
    """Load what was saved into a model in a file, run a step, and save what that leaves."""
    torch.set_num_threads(1)
    model, optimizer, step = _in_file(Path(folder))
    _load(Path(folder), model, optimizer)
    step(X, Y, torch.tensor(1.0))
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder, "there.pt"))


def _save(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> None:
    torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), folder / "saved.pt")


def _load(folder: Path, model: nn.Module, optimizer: optim.Optimizer) -> None:
    state, of_optimizer, rng = torch.load(folder / "saved.pt")
    model.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    torch.set_rng_state(rng)


def test_a_method_that_knows_of_no_homes_is_refused(tmp_path: Path) -> None:
    model = checkmate.in_file(Net(), tmp_path)
    there: dict[str, Any] = {"host": f"file:{tmp_path}", "host_budget": "100 MB", "method": "poet"}
    step = checkmate.training_step(model, _optimizer(model), budget=BUDGET, **there)
    with pytest.raises(InvalidProblem, match=r"'poet' plans no step with values at home .* that do: auto"):
        step(X, Y, torch.tensor(1.0))


def test_a_second_memory_that_is_too_small_is_told_with_what_is_at_home(tmp_path: Path) -> None:
    model = checkmate.in_file(Net(), tmp_path)
    step = checkmate.training_step(model, _optimizer(model), budget=BUDGET, host=f"file:{tmp_path}", host_budget="5 MB")
    with pytest.raises(
        HostError, match=r"there: 4.19 MB of parameters, 6.29 MB of states. Say host_budget="
    ) as refusal:
        step(X, Y, torch.tensor(1.0))
    (least,) = re.findall(r"host_budget=([0-9_]+)", str(refusal.value))
    there: dict[str, Any] = {"host": f"file:{tmp_path}", "host_budget": int(least), "time_limit": 0.5}
    checkmate.training_step(model, _optimizer(model), budget="24 MB", **there)(X, Y, torch.tensor(1.0))


class Momentum(optim.Optimizer):
    """Its state is made and replaced by functions of the parameter, or of the state, and of the number of updates."""

    def __init__(self, params: Any, new: Callable[[Tensor], dict[str, Any]], replace: Callable[..., Any] | None = None):
        super().__init__(params, {"lr": 0.1})
        self.new, self.replace = new, replace

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(self.new(p))
            for part in state["m"] if isinstance(state["m"], list) else [state["m"]]:
                p.sub_(part.add_(p.grad), alpha=0.1)
            state["n"] = state.get("n", 0) + 1
            if self.replace is not None and state["n"] == 3:
                state["m"] = self.replace(state["m"])


def _listed(p: Tensor) -> dict[str, Any]:
    return {"m": [torch.zeros_like(p)]}


def _in_one_storage(p: Tensor) -> dict[str, Any]:
    return dict(zip("mv", torch.zeros(2, *p.shape), strict=True))


def _of_two_names(p: Tensor) -> dict[str, Any]:
    m = torch.zeros_like(p)
    return {"m": m, "v": m}


def _wide_steps(folder: Path, new: Callable[[Tensor], dict[str, Any]], replace: Any = None) -> checkmate.TrainingStep:
    model = checkmate.in_file(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), folder)
    there: dict[str, Any] = {"budget": "9 MB", "host": f"file:{folder}", "host_budget": "100 MB", "time_limit": 0.5}
    optimizer = Momentum(model.parameters(), new, replace)
    return checkmate.training_step(lambda x: model(x).square().mean(), optimizer, alone=True, **there)


@pytest.mark.parametrize(("new", "part"), [long(_listed, "m"), long(_in_one_storage, "m"), (_of_two_names, "v")])
def test_a_state_that_cannot_move_alone_is_refused(new: Any, part: str, tmp_path: Path) -> None:
    """A list stayed in memory uncounted, and of two names for one tensor each had a home of its own: other numbers."""
    with pytest.raises(Unsupported, match=f"the state '{part}', which is no tensor with bytes of its own"):
        _wide_steps(tmp_path, new)(X)


def test_a_state_that_changes_its_bytes_is_told_and_left_as_the_update_made_it(tmp_path: Path) -> None:
    step = _wide_steps(tmp_path, lambda p: {"m": torch.zeros_like(p)}, lambda m: m.bfloat16())
    step(X)
    step(X)
    with pytest.raises(Unsupported, match=r"the state 'm' of a parameter of .* with 524.29 kB .* of 1.05 MB"):
        step(X)
    (optimizer,) = step._updates.optimizers
    states = [state["m"] for p, state in optimizer.state.items() if p.ndim == 2]
    (changed,) = (m for m in states if m.dtype == torch.bfloat16)
    assert changed.isfinite().all()
    assert changed.any()


@pytest.mark.long
def test_states_that_are_loaded_as_views_of_one_tensor_get_homes(tmp_path: Path) -> None:
    """As of a checkpoint whose tensors lie in one storage."""

    def flat(i: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        if i == 2:
            loaded = optimizer.state_dict()
            for state in loaded["state"].values():
                both = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
                state["exp_avg"], state["exp_avg_sq"] = both[0], both[1]
            optimizer.load_state_dict(loaded)

    def train(make: Callable[..., Any]) -> TrainedWhole:
        new = (lambda: checkmate.in_file(Net(), tmp_path)) if make is not plain_step else Net
        how: dict[str, Any] = {"loss": itself, "batch": (X, Y, torch.tensor(1.0)), "between": flat, "metered": False}
        return training(new, _optimizer, steps=4, **how)(make)

    assert_as_plain(train, budget=BUDGET, host=f"file:{tmp_path}", host_budget="100 MB")


def test_a_model_without_a_second_memory_and_one_beside_it_are_told(tmp_path: Path) -> None:
    model = checkmate.in_file(Net(), tmp_path)
    step = checkmate.training_step(model, _optimizer(model), budget=BUDGET)
    with pytest.raises(InfeasibleBudget, match=r"in a file, .* no second memory: with host="):
        step(X, Y, torch.tensor(1.0))
    model = Net()
    there: dict[str, Any] = {"host": f"file:{tmp_path}", "host_budget": "100 MB"}
    step = checkmate.training_step(model, _optimizer(model), budget=BUDGET, **there)
    with pytest.raises(InfeasibleBudget, match=r"No parameter is at home .* checkmate.in_file\(model, "):
        step(X, Y, torch.tensor(1.0))


@pytest.mark.long
def test_without_host_budget_it_is_what_is_free_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of it, beside what is at home there already; each sum is named where that is too little."""
    where, free = f"file:{tmp_path}", 100 * 2**20
    monkeypatch.setattr(available.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    def stepped(accumulate: int) -> checkmate.TrainingStep:
        model = checkmate.in_file(Net(), tmp_path)
        options = {"host": where, "accumulate": accumulate, "time_limit": 0.5}
        step = checkmate.training_step(model, _optimizer(model), budget=BUDGET, **options)
        step(X, Y, torch.tensor(1.0))
        return step

    (plan,) = stepped(1).plans
    blocks = 4096 * len(plan.problem.graph.values)  # which values may take more than their bytes
    assert 0 <= (90 + 4) * 2**20 - plan.problem.host.budget <= blocks
    free = 10 * 2**20
    sums = "4.19 MB of parameters, 6.29 MB of states, 3.15 MB of sums of gradients"
    with pytest.raises(HostError, match=f"there: {sums}. Say host_budget=13_7"):
        stepped(2)
    monkeypatch.setattr(ranks, "train_together", lambda: True)
    with pytest.raises(HostError, match="Ranks share a plan: say how many bytes each may take there"):
        stepped(1)


def test_a_device_that_is_no_accelerator_is_refused() -> None:
    model = Net()
    for device in ("cpu", "meta", "nonsense"):
        with pytest.raises(ValueError, match=f"device='{device}' is no accelerator of this machine"):
            checkmate.training_step(model, _optimizer(model), budget=BUDGET, host_budget="1 GB", device=device)
