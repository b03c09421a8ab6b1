"""Whole steps on a CUDA device of a model that is on the CPU: numbers of one that is there, in the planned bytes."""

from __future__ import annotations

import copy
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils import _pytree as pytree

import checkmate
from checkmate.backends.tensor_state import same_bits
from checkmate.errors import HostError, Unsupported
from checkmate.host import home_of
from checkmate.host.pinned import Pinned
from checkmate.memory import measure_peak
from checkmate.updates.optimizers import Update
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow
from tests.support.whole_steps import plain_step, planned_step
from tests.training.test_second_memory import OPTIMIZERS, WAYS, Net, X, Y, _optimizer

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("one_thread")]

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
LARGE = 2**20  # bytes
THERE: dict[str, Any] = {"device": DEVICE, "host_budget": "100 MB"}
LEAST = 6_000_000  # bytes beside what is resident
ONE = torch.tensor(1.0)


def on_cpu(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.detach().to(CPU, copy=True), tree)


def bits(model: nn.Module, optimizer: optim.Optimizer, *, sums: bool = False) -> Any:
    """All that must agree: states, random states, and between calls of one update the sums of gradients."""
    sums = [p.grad for p in model.parameters() if sums]
    return on_cpu([model.state_dict(), optimizer.state_dict(), sums, torch.get_rng_state(), torch.cuda.get_rng_state()])


def held(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    parts = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    sums = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *parts, *sums]


def assert_at_home(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """All is on the CPU between calls, and what is large is pinned."""
    for t in held(model, optimizer):
        assert t.device == CPU
        assert t.nbytes < LARGE or isinstance(home_of(t), Pinned)


def least(model: nn.Module, optimizer: optim.Optimizer, *batch: Any, **options: Any) -> int:
    """A small budget that works."""
    step = checkmate.training_step(model, optimizer, budget="1 GB", **THERE, **options)
    problem = checkmate.trace(step, *batch, host_budget="100 MB", host="pinned")
    return problem.resident + LEAST


CASES = [("AdamW", "plain")]
REST = [(n, w) for n in OPTIMIZERS for w in WAYS if (n, w) not in CASES and ("fused" not in n or "scaled" not in w)]


@pytest.mark.parametrize(("name", "way"), [*(slow(*c) for c in CASES), *(long(*c) for c in REST)])
def test_same_numbers_as_of_a_model_on_the_device(name: str, way: str) -> None:
    """Six steps at a budget that is half of what parameters, states and sums take; each peak is within its plan's."""
    options, found = dict(WAYS[way]), []
    is_scaled, calls = options.pop("scaler", False), options.get("accumulate", 1)
    for make, device in ((planned_step, CPU), (plain_step, DEVICE)):
        model, there = Net().to(device), dict[str, Any]()
        optimizer = _optimizer(model, name)
        if is_scaled:
            options["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        if device == CPU:
            there = {**THERE, "budget": least(model, optimizer, X, Y, ONE)}
        step = make(model, optimizer, **options, **there)
        torch.manual_seed(7)
        found.append(left := [])
        for i in range(6):
            factor = torch.tensor(float("inf") if is_scaled and i == 3 else 1.0)
            batch = X.to(device), Y.to(device), factor
            use = measure_peak(lambda: step(*batch), DEVICE)  # noqa: B023
            if device == CPU:
                assert_at_home(model, optimizer)
                plan = step.plans[-1 if (i + 1) % calls == 0 else 0]
                assert plan.problem.homes
                assert i < calls or use.before + use.peak <= plan.peak <= plan.budget
            left.append(on_cpu([use.result, step.norm if "clip_norm" in options and i + 1 >= calls else None]))
            left.append(bits(model, optimizer, sums=(i + 1) % calls > 0))
    assert_same_bits(*found)


BATCH = X, Y, ONE


def trained(model: nn.Module, **options: Any) -> tuple[optim.Optimizer, checkmate.TrainingStep]:
    optimizer = _optimizer(model)
    return optimizer, planned_step(model, optimizer, **THERE, **options)


@pytest.mark.slow
def test_between_calls_all_is_on_the_cpu_and_current() -> None:
    """Read, saved, evaluated, and written to: the next call goes on with what is there."""
    model = Net()
    kept = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    optimizer, step = trained(model)
    step(*BATCH)
    assert all(p is kept[name][0] for name, p in model.named_parameters())
    pinned = {name: p.data_ptr() for name, p in model.named_parameters()}
    small = [name for name, p in model.named_parameters() if p.nbytes < LARGE]
    assert [pinned[name] for name in small] == [kept[name][1] for name in small]
    assert "Parameter" in repr(model.tied.weight)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), torch.cuda.get_rng_state()], saved)
    with torch.no_grad(), torch.random.fork_rng(devices=[DEVICE]):
        alike = Net()
        alike.load_state_dict(model.state_dict())
        seen = []
        for one in (model.eval(), alike.eval()):
            torch.manual_seed(0)
            seen.append(one(*BATCH))
    assert_same_bits(*seen)
    model.train()
    step(*BATCH)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pinned
    after = bits(model, optimizer)
    # The same checkpoint in the same model, in another one whose tensors it replaces, and in one on the device.
    for other, device, how in ((model, CPU, {}), (Net(), CPU, {"assign": True}), (Net().to(DEVICE), DEVICE, {})):
        its, run = (optimizer, step) if other is model else trained(other)
        saved.seek(0)
        of_model, of_optimizer, *states = torch.load(saved)
        other.load_state_dict(of_model, **how)
        if other is not model:
            its.param_groups[0]["params"][:] = [p for p in other.parameters() if p.requires_grad]
        its.load_state_dict(of_optimizer)
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1])
        run(*(t.to(device) if t.ndim else t for t in BATCH))
        assert_same_bits(bits(other, its), after)
        assert device == DEVICE or assert_at_home(other, its) is None


class Replacing(optim.Optimizer):
    """Puts another tensor in the place of a parameter's data, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data = p.data - 0.1 * p.grad


@pytest.mark.slow
def test_an_optimizer_that_replaces_data_updates_small_and_large_parameters() -> None:
    """Small ones came back as they were."""
    found = []
    for make, device, how in ((planned_step, CPU, {**THERE, "alone": True}), (plain_step, DEVICE, {})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(device)
        step = make(lambda x, model=model: model(x).square().mean(), Replacing(model.parameters()), **how)
        losses = [step(X.to(device)) for _ in range(3)]
        found.append(on_cpu([losses, model.state_dict()]))
    assert_same_bits(*found)


class Branches(nn.Module):
    """Of two large layers a call uses one; a batch without rows of the first kind has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.unused = nn.Linear(512, 512)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x).tanh().square().mean()


@pytest.mark.parametrize("way", [slow("clipped sums"), long("sums"), long("scaled sums")])
def test_sums_that_the_last_call_does_not_reach(way: str) -> None:
    """Their parameters are updated on the device, as those of what `step.update` ends."""
    options, found = {**WAYS[way], "accumulate": 2}, []
    is_scaled = options.pop("scaler", False)
    for make, device in ((planned_step, CPU), (plain_step, DEVICE)):
        model = Branches().to(device)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        if is_scaled:
            options["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        step = make(model, optimizer, **options, **(THERE if device == CPU else {}))
        for i in (0, 1, 1, 0, 1):
            step(X.to(device), i)
        step.update()
        found.append(bits(model, optimizer))
        assert device == DEVICE or assert_at_home(model, optimizer) is None
    assert_same_bits(*found)


@pytest.mark.long
def test_another_size_is_planned_with_the_states_that_there_are() -> None:
    """And gradients that are left in .grad, of parameters that no optimizer has too, come to the CPU."""
    found = []
    for make, device in ((planned_step, CPU), (plain_step, DEVICE)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(device)
        table = torch.randn(512, 512).to(device).requires_grad_()  # no `nn.Parameter`, but one of an optimizer
        optimizer = optim.AdamW([*model[0].parameters(), table], lr=1e-3)
        there: Any = {**THERE, "gradients": True} if device == CPU else {}
        step = make(lambda x, model=model, table=table: model(x @ table).square().mean(), optimizer, **there)
        for rows in (16, 16, 8, 16):
            step(X[:rows].to(device))
            found.append((bits(model, optimizer, sums=True), on_cpu([table, table.grad])))
            assert device == DEVICE or {t.device for t in [*held(model, optimizer), table]} == {CPU}
    assert_same_bits(found[:4], found[4:])


@pytest.mark.parametrize("at", [slow(3), long(0), long(9)])
def test_an_update_that_fails_leaves_tensors_on_the_cpu_and_whole(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer, step = trained(model)
    step(*BATCH)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.cuda.get_rng_state()))
    update, count = Update._step, itertools.count()

    def interrupted(self: Update, *args: Any, **kwargs: Any) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        update(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Update, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(*BATCH)
    assert_at_home(model, optimizer)
    left = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if at:
        with pytest.raises(Unsupported, match=r"update failed when [1-9] of 12 parameters"):
            step(*BATCH)
    model.load_state_dict(before[0])
    optimizer.load_state_dict(copy.deepcopy(before[1]))
    torch.cuda.set_rng_state(before[2])
    step(*BATCH)
    after = model.state_dict(), optimizer.state_dict()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    kinds = set()
    for i, name in enumerate(names):
        of = [[one[0][name], *one[1]["state"][i].values()] for one in (left, before, after)]
        kinds.add(["old", "new"][[all(map(same_bits, of[0], other)) for other in of[1:]].index(True)])
    assert kinds == ({"old", "new"} if at else {"old"})


class Renormed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.kind = nn.Embedding(512, 512, max_norm=1.0 if kind == "written" else None), kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "branch" and self.table.weight.sum() > 1e9:
            return self.table(x).sum()
        loss = self.table(x).square().mean()
        loss = loss.detach() if self.kind == "without a gradient" else loss
        return (loss, self.table.weight) if self.kind == "returned" else loss


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("written", "is at home on the CPU, and the step writes to it or returns it"),
        ("returned", "loss_fn returns a parameter that is at home on the CPU"),
        ("branch", "at home on the CPU with device="),
        ("without a gradient", "computes nothing that needs a gradient"),
    ],
)
def test_a_step_that_needs_more_of_a_parameter_than_its_plan_brings_is_refused(kind: str, says: str) -> None:
    model = Renormed(kind)
    before = on_cpu(model.state_dict())
    step = planned_step(model, optim.SGD(model.parameters(), lr=0.1), **THERE)
    with pytest.raises(Unsupported, match=says):
        step(torch.arange(8))
    assert_same_bits(model.state_dict(), before)


def test_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(512, 512)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def refused(error: type[Exception], says: str, **options: Any) -> None:
        with pytest.raises(error, match=says):
            checkmate.training_step(model, optimizer, budget="1 GB", **{**THERE, **options})

    for device in ("cpu", "meta", "cuda:7", "xpu", "nonsense"):
        refused(
            ValueError,
            f"device='{device}' is no accelerator of this machine, .* There are 2 of cuda here",
            device=device,
        )
    for name, option in (("overlap=True", {"overlap": True}), ("verify=True", {"verify": True})):
        refused(Unsupported, f"device='cuda:0' is not planned with {name}.*: leave out one", **option)
    ema = optim.swa_utils.AveragedModel(model), model
    refused(Unsupported, "is not planned with ema=: leave out one", ema=ema)


def test_without_host_budget_it_is_what_is_free() -> None:
    model = nn.Linear(512, 512)
    step = planned_step(lambda x: model(x).square().mean(), optim.SGD(model.parameters(), lr=0.1), device=DEVICE)
    step(X)
    (plan,) = step.plans
    assert plan.problem.homes
    assert 10 * model.weight.nbytes < plan.problem.host.budget


def test_refused_at_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: nn.Module, says: str, error: type[Exception] = Unsupported, **options: Any) -> None:
        step = planned_step(lambda x: model(x).square().mean(), optim.AdamW(model.parameters()), **{**THERE, **options})
        with pytest.raises(error, match=says):
            step(X)

    class Special(Tensor):
        pass

    special = nn.Linear(512, 512)
    special.weight = nn.Parameter(special.weight.data.as_subclass(Special))
    refused(special, "weight, a Special of torch.float32 and torch.strided on cpu, cannot be moved to cuda:0 and back")
    refused(nn.Linear(512, 512).to("cuda:1"), "on cuda:1, cannot be moved to cuda:0 and back")
    refused(checkmate.in_file(nn.Linear(512, 512), tmp_path), "weight, .* is in a file, and a step on cuda:0 has homes")
    says = r"1.05 MB of parameters, 2.10 MB of states. Say host_budget="
    refused(nn.Linear(512, 512), says, HostError, host_budget="2 MB")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refused(nn.Linear(512, 512), "A CUDA graph is being captured")


@pytest.mark.slow
def test_a_model_that_is_on_the_device_stays_there() -> None:
    model = Net().to(DEVICE)
    _, step = trained(model)
    step(*BATCH)
    assert not step.plans[0].problem.homes
    assert {t.device for t in model.parameters()} == {DEVICE}
