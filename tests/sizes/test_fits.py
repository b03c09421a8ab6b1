"""`checkmate.fits`: its page against the plans, the smallest budgets and the largest batches that others find."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import checkmate
from checkmate import Host, fits, max_batch_size, min_budget, trace
from checkmate.core import simulator
from checkmate.errors import BudgetError, Unsupported
from checkmate.memory.cuda_allocator import EXPANDABLE
from checkmate.profiling.data_sheets import DEVICES
from checkmate.sizes import fits as sized
from checkmate.sizes.batches import scaled
from checkmate.sizes.fits import NAMES, Held, planned
from checkmate.sizes.fits_page import NOT_ASKED, Fits
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn, long, slow

pytestmark = pytest.mark.slow

WIDTH, ROWS = 32, 256
ROOMY = 10**9
ON_META = torch.device("meta")


class Loss(nn.Sequential):
    """Layers, and the loss of what they give."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()]
        super().__init__(*layers, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x).squeeze(1), y)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Text(nn.Module):
    """Logits of a vocabulary, which are most of its bytes, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 32), nn.Linear(32, 512)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(F.gelu(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), (tokens if labels is None else labels).flatten())


def _on_meta(device: str = "rtx4090", *, train: Callable[[Any], Any] | None = None, **options: Any) -> Fits:
    with ON_META:
        model, batch = Loss(), (torch.ones(ROWS, WIDTH), torch.ones(ROWS))
    options |= {} if train is None else {"optimizer": train(model.parameters())}
    return fits(model, *batch, device=device, **{"time_limit": 30, "everything": True, **options})


def _asked(**more: Any) -> dict[str, Any]:
    return {"device": "rtx4090", "budget": ROOMY, "everything": True, "time_limit": 0.1, **more}


@pytest.fixture(scope="module")
def page() -> Fits:
    """A page with room for everything."""
    return _on_meta()


@pytest.fixture(scope="module")
def tight(page: Fits) -> Fits:
    """A page of what fits by recomputation."""
    return _on_meta(budget=_between(page.ways[0].smallest, page.kept.peak))


def _between(low: Any, high: Any) -> int:
    assert low < high
    return (low + high) // 2


def test_parts_add_up_to_the_peak_of_the_plan_that_runs_nothing_twice(page: Fits) -> None:
    plan = checkmate.solve(page.problem, page.problem.keep_all_peak, method="checkpoint-all").plan
    peak = simulator.simulate(plan, page.problem).peak
    assert page.kept.peak == sum(dict(page.kept).values()) == page.problem.keep_all_peak == peak
    # parameters and state are what they weigh in blocks
    model, block = Loss(), DEVICES["rtx4090"].block_bytes
    weights = [p.nbytes for p in model.parameters()]
    assert page.plain.parameters == page.kept.parameters == sum(-(-size // block) * block for size in weights)
    assert 2 * sum(weights) <= page.kept.optimizer_state <= 2 * page.kept.parameters
    assert dict(page.plain)["optimizer state"] == page.kept.optimizer_state
    assert page.kept.buffers_and_batch == ROWS * WIDTH * 4 + ROWS * 4


def test_kernels_of_groups_are_of_planned_steps_only() -> None:
    """What plain PyTorch takes stays; what is planned keeps less, takes less time, and is trained so."""
    with ON_META:
        net = nn.Sequential(*(Gated(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))
        batch = torch.ones(ROWS, WIDTH)
    eager, same = (
        fits(net, batch, device="h100", budget="400 kB", time_limit=20.0, kernels=kernels)
        for kernels in ("eager", "same-bits")
    )
    assert (eager.plain, eager.plain_seconds) == (same.plain, same.plain_seconds)
    assert eager.problem.keep_all_cost > same.problem.keep_all_cost
    assert eager.problem.keep_all_peak > same.problem.keep_all_peak
    assert ', kernels="same-bits"' in same.code
    assert "kernels" not in eager.code
    assert same.largest is None or eager.largest is None or same.largest.plain == eager.largest.plain


def test_an_optimizer_that_is_given_counts() -> None:
    plain, moving = (_on_meta(train=partial(optim.SGD, momentum=m), everything=False) for m in (0.0, 0.9))
    assert plain.optimizer == moving.optimizer == "SGD"
    assert plain.kept.optimizer_state == 0
    assert moving.kept.optimizer_state == sum(p.nbytes for p in Loss().parameters())
    assert moving.kept.peak - plain.kept.peak == moving.kept.optimizer_state


def test_smallest_budgets_are_those_of_min_budget(page: Fits) -> None:
    host = Host(64 * 10**9, 0.8 * 32e9, 0.8 * 32e9)
    ends = [min_budget(problem) for problem in (replace(page.problem, next_split=None), page.problem.with_host(host))]
    assert all(one.proven for one in ends)
    recomputed, in_parts, there, model_there = page.ways
    assert model_there.why_not == "nothing of 1 MiB to be there"
    assert [(way.smallest, way.bound) for way in (recomputed, there)] == [(one.peak, one.bound) for one in ends]
    assert (in_parts.smallest, in_parts.why_not) == (None, "no loss that would help")


@pytest.mark.long
def test_the_largest_batch_is_that_of_max_batch_size(tight: Fits) -> None:
    with ON_META:
        model = Loss()
    make_batch = lambda n: (torch.ones(n, WIDTH, device="meta"), torch.ones(n, device="meta"))  # noqa: E731
    step = checkmate.training_step(model, optim.AdamW(model.parameters()), budget=tight.room)
    found = max_batch_size(lambda: step, make_batch, budget=tight.room, profile="roofline:rtx4090", time_limit=20)
    assert (tight.largest.checked, tight.largest.planned) == (True, found.size)
    assert tight.largest.keep_all == found.keep_all
    assert tight.largest.given == ROWS > found.keep_all


def test_an_answer_that_is_known_is_given_at_once(page: Fits, tight: Fits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched if plain PyTorch fits, no later way if an earlier one does, and no other size is traced."""
    traced = Mock(side_effect=trace)
    monkeypatch.setattr(sys.modules[fits.__module__], "trace", traced)
    found = _on_meta(everything=False)
    assert (found.verdict, found.code, found.plain) == (page.verdict, page.code, page.plain)
    assert [way.why_not for way in found.ways] == [NOT_ASKED] * len(NAMES)
    assert found.why_no_largest == NOT_ASKED
    assert "everything=True" in str(found)
    planned_first = _on_meta(budget=tight.room, everything=False)
    assert planned_first.verdict == tight.verdict
    assert [way.why_not for way in planned_first.ways[1:]] == [NOT_ASKED] * (len(NAMES) - 1)
    assert traced.call_count == 2
    nothing = _on_meta(budget=page.kept.parameters, everything=False, time_limit=6)
    assert NOT_ASKED not in [*(way.why_not for way in nothing.ways), nothing.why_no_largest]


@in_turn(data=[False, long(True)])
def test_slices_of_one_tensor_have_a_largest_batch(data: bool) -> None:
    """The usual batch of a language model, whose rows are not contiguous: the step reads it as it is at each size."""
    with torch.device("cpu") if data else ON_META:
        model, tokens = Text(), torch.zeros(16, 33, dtype=torch.long)
    batch = tokens[:, :-1], tokens[:, 1:]
    batches = batch, [part.contiguous() for part in batch]
    sliced, whole = (fits(model, *parts, **_asked()).largest.planned for parts in batches)
    assert abs(sliced - whole) <= 0.01 * whole


def test_a_batch_of_another_size_is_laid_out_as_the_given_one() -> None:
    rows, images = torch.arange(40.0).view(4, 10), torch.ones(4, 3, 8, 8).to(memory_format=torch.channels_last)
    times = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)  # the second dimension is the outer one
    for tensor in (rows, rows[:, 1:], rows[:, ::2], rows[:1].expand(4, 10), images, images[:, :2], times):
        on_meta = tensor.to("meta")
        (same, other), _ = scaled(((tensor, on_meta), {}), len(tensor))
        assert_same_bits([same], [tensor])
        assert same.stride() == tensor.stride()
        assert (other.shape, other.stride()) == (on_meta.shape, on_meta.stride())
    (more,), _ = scaled(((times,), {}), 6)
    assert more.stride() == torch.empty(2, 6, 4).transpose(0, 1).stride()
    assert_same_bits([more], [torch.cat([times, times])])


def test_nothing_has_to_be_done_where_plain_pytorch_fits(page: Fits) -> None:
    assert (page.fits, page.fits_plainly, page.best) == (True, True, None)
    assert page.room == DEVICES["rtx4090"].room
    assert page.verdict.startswith("It fits NVIDIA GeForce RTX 4090 as it is: plain PyTorch takes about ")
    assert "checkmate" not in page.code
    assert page.plain_seconds == page.problem.keep_all_cost


def _growing(budget: int) -> Fits:
    """A step whose tensors grow, so that none takes the place of an earlier one."""
    with ON_META:
        layers = nn.ModuleList([nn.Linear(1000 + 300 * i, 1300 + 300 * i) for i in range(4)])
        x = torch.ones(2048, 1000)
    return fits(lambda x: nn.Sequential(*layers)(x).square().mean(), x, device="rtx4090", budget=budget, time_limit=5)


def test_bytes_that_the_allocator_holds_beyond_the_room_are_in_the_first_sentence() -> None:
    roomy = _growing(2 * 10**9)
    held = roomy.plain_reserved
    assert held > roomy.plain.peak
    assert roomy.verdict.endswith("there is room for 2.00 GB.")
    assert "allocator holds: memory of the device" in str(roomy)
    # as it is
    over = _growing(_between(roomy.plain.peak, held))
    assert over.fits_plainly
    assert re.match(
        r"It fits NVIDIA GeForce RTX 4090 as it is, (with PYTORCH_ALLOC_CONF|if its bytes al)", over.verdict
    )
    assert "; PyTorch's allocator would hold " in over.verdict
    # planned
    planned = next(found for share in range(99, 50, -4) if (found := _growing(roomy.plain.peak * share // 100)).best)
    assert (planned.best.reserved > planned.room) == ("PyTorch's allocator would hold" in planned.verdict)


@in_turn(expanded=[90, 105])
def test_a_setting_is_named_where_it_makes_the_step_fit(expanded: int) -> None:
    held = Held(reserved=110, expanded=expanded, room=100)
    enough = expanded <= 100
    assert held.condition == (f", with {EXPANDABLE}" if enough else ", if its bytes alone count")
    says = "110 B for it without that setting, and 90 B with it" if enough else "105 B for it at least: name a smaller"
    assert says in held.clause
    assert Held(100, 100, 100).condition == Held(100, 100, 100).clause == ""


def test_recomputation_makes_it_fit(tight: Fits) -> None:
    """The line of code plans for no more than the room."""
    best = tight.best
    assert (tight.fits, tight.fits_plainly, best.name) == (True, False, "recomputation")
    assert best.peak <= tight.room < tight.kept.peak
    assert best.overhead > 0
    assert best.seconds == pytest.approx(tight.plain_seconds * (1 + best.overhead))
    assert " by recomputation, if its bytes alone count: " in tight.verdict  # the allocator has units of 2 MiB
    made = Mock()
    exec(tight.code, {"checkmate": made, "loss_fn": 1, "optimizer": 2})
    assert made.training_step.call_args.args == (1, 2)
    assert best.peak <= checkmate.parse_bytes(made.training_step.call_args.kwargs["budget"]) <= tight.room


class Residual(nn.Module):
    """Layers with dropout, whose inputs wait for their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(4))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.long
def test_only_a_second_memory_makes_it_fit() -> None:
    with ON_META:
        model, batch = Residual(), (torch.ones(512, 32), torch.zeros(512, dtype=torch.long))
    recomputed, _, there, _ = fits(model, *batch, **_asked(budget=None, time_limit=60)).ways
    room = _between(there.smallest, recomputed.smallest)
    found = fits(model, *batch, **_asked(budget=room, time_limit=60))
    assert found.best.name == "with a second memory"
    assert "only with a second memory" in found.verdict
    assert 'host_budget="64 GB"' in found.code


LARGE = 512  # a float32 matrix of so many rows and columns has 1 MiB
FOUND = re.compile(
    r"with (?P<ram>[\d.]+ MB) of (?P<where>RAM|a file), at (?P<speed>[\d.]+) of the speed of a device that holds it "
    r"\(no plan above (?P<most>[\d.]+)\)"
)


def _large(**asked: Any) -> Fits:
    """Layers whose parameters and states take more than there is room for."""
    with ON_META:
        model, x = nn.Sequential(*(nn.Linear(LARGE, LARGE) for _ in range(5))), torch.ones(64, LARGE)
    return fits(model, x, **{"device": "rtx4090", "budget": "9 MB", "time_limit": 10, **asked})


def test_its_model_in_a_second_memory_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized, "HOMES_SECONDS", 0.5)
    found = _large()
    best, steps = found.best, found.best.solution
    assert (best.name, {way.why_not for way in found.ways[:3:2]}) == (NAMES[3], {"15.89 MB are here all the time"})
    # What is at home: each matrix, and the two states of it.
    problem = steps.problem
    assert problem.homes_bytes == 3 * 5 * 4 * LARGE**2
    assert {problem.graph.values[v].role for v in problem.homes} == {"parameter", "state"}
    assert simulator.check_plan(steps.plan, problem, found.room) == []
    # The verdict: bytes there, and the speed beside a device that holds all, which no other plan and no bound is above.
    assert best.host_bytes == simulator.simulate(steps.plan, problem).host_peak >= problem.homes_bytes
    assert best.speed == found.plain_seconds / steps.cost <= best.speed_bound <= 1
    for kept in ((), [min(problem.homes)]):
        other = checkmate.solve(problem.with_homes(problem.homes, kept), found.room, time_limit=0.5)
        assert found.plain_seconds / other.cost <= best.speed_bound
    said = FOUND.search(found.verdict)
    assert said["where"] == "RAM"
    assert checkmate.parse_bytes(said["ram"]) >= best.host_bytes
    assert float(said["speed"]) <= best.speed <= best.speed_bound <= float(said["most"])
    assert found.verdict.endswith(" for 64 samples.")
    # The line of code.
    made = Mock()
    exec(found.code, {"checkmate": made, "loss_fn": 1, "optimizer": 2})
    options = made.training_step.call_args.kwargs
    assert (options["device"], checkmate.parse_bytes(options["host_budget"])) == (
        "cuda",
        checkmate.parse_bytes(said["ram"]),
    )
    assert found.records()[3]["speed_bound"] == best.speed_bound


def test_a_second_memory_has_to_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized, "HOMES_SECONDS", 0.5)
    little = _large(host_budget="15 MB")
    assert not little.fits
    assert little.ways[3].why_not == "15.73 MB would be at home there"
    assert _large(host_budget="20 MB").best.host_bytes <= 20 * 10**6
    # Beside a CPU it is a file.
    there = Host(10**9, 1e9, 1e9)
    beside_cpu = _large(device="laptop", host=there)
    assert FOUND.search(beside_cpu.verdict)["where"] == "a file"
    made, model = Mock(), object()
    exec(beside_cpu.code, {"checkmate": made, "loss_fn": 1, "optimizer": 2, "model": model, "folder": "/disk"})
    made.in_file.assert_called_once_with(model, "/disk")
    assert made.training_step.call_args.kwargs["host"] == "file:/disk"
    for asked in ({"host": there}, {"device": "laptop"}):
        with pytest.raises(ValueError, match=r"host_budget= is for a GPU that device= names"):
            _large(host_budget="1 GB", **asked)
    with pytest.raises(BudgetError, match="much"):
        _large(host_budget="much")


def test_its_loss_in_parts_makes_it_fit() -> None:
    with ON_META:
        model, tokens = Text(), torch.zeros(16, 32, dtype=torch.long)
    found = fits(model, tokens, device="laptop", budget="1.5 MB", time_limit=60)
    recomputed, parts, *_ = found.ways
    assert recomputed.bound > found.room
    assert found.best is parts
    assert "with its loss in parts" in found.verdict
    assert parts.record()["splits"]


def test_nothing_makes_it_fit(page: Fits) -> None:
    found = _on_meta("laptop", budget=page.kept.parameters)
    assert (found.fits, found.best, found.largest.planned) == (False, None, 0)
    assert found.verdict.startswith("It does not fit laptop CPU: there is room for ")
    assert found.code.startswith("none: ")


@in_turn(device=["rtx4090", slow("laptop")])
def test_tensors_with_data_give_the_page_of_those_without(device: str) -> None:
    torch.manual_seed(0)
    model, x, y = Loss(), torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    optimizer = optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own, state = dict(model.named_parameters()), torch.get_rng_state()
    found = fits(lambda a, b: model(a, b), x, y, **_asked(device=device, optimizer=optimizer, time_limit=30))
    expected = _on_meta(device, budget=ROOMY)
    assert (found.plain, found.kept, found.verdict) == (expected.plain, expected.kept, expected.verdict)
    assert [way.smallest for way in found.ways] == [way.smallest for way in expected.ways]
    sizes = ("given", "plain", "keep_all", "planned")  # what else it says depends on the time there was
    assert [getattr(found.largest, name) for name in sizes] == [getattr(expected.largest, name) for name in sizes]
    assert all(model.get_parameter(name) is parameter for name, parameter in own.items())
    assert all(parameter.grad is None for parameter in own.values())
    assert_same_bits([model.state_dict(), torch.get_rng_state()], [before, state])
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]


def test_nothing_is_changed_where_the_step_cannot_be_captured() -> None:
    model = Loss()
    own = dict(model.named_parameters())
    step = lambda x, y: (torch._dynamo.graph_break(), model(x, y))[1]  # noqa: E731
    with pytest.raises(Unsupported, match=r"test_fits\.py"):
        fits(step, torch.ones(4, WIDTH), torch.ones(4), device="rtx4090")
    assert all(model.get_parameter(name) is parameter for name, parameter in own.items())


def test_without_a_device_ops_are_measured_here() -> None:
    model, x, y = Loss(), torch.randn(16, WIDTH), torch.randn(16)
    before = [p.clone() for p in model.parameters()]
    found = fits(model, x, y, budget="1 MB", everything=True, time_limit=5)
    assert found.device == "this machine's CPU"
    assert found.problem.profile.source.startswith("measured on cpu")
    assert [way.why_not for way in found.ways[2:]] == ["give host=checkmate.Host(...)"] * 2
    assert_same_bits(model.parameters(), before)
    assert 0 < found.room < found.memory_bytes


def test_outputs_that_are_no_numbers() -> None:
    """Logits stand with their sum, a model's output with its loss, several results with the first."""
    with ON_META:
        model, x = nn.Linear(8, 3), torch.ones(16, 8)
    results: list[Callable[[Tensor], Any]] = [
        lambda x: model(x).sum(),
        model,
        lambda x: SimpleNamespace(loss=model(x).sum(), logits=x),
        lambda x: (model(x).sum(), x),
        lambda x: {"loss": model(x).sum()},
    ]
    asked = _asked(everything=False)
    peaks = [fits(fn, x, **asked).kept.peak for fn in results]
    assert {*peaks, fits(lambda inputs: model(inputs), inputs=x, **asked).kept.peak} == {peaks[0]}


def test_from_a_batch_of_one_the_largest_is_that_from_others() -> None:
    """At size 1 the step has other ops: what is broadcast there, is added as it is elsewhere."""
    with ON_META:
        model, one, two = nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH), torch.ones(2, WIDTH)

    def loss_fn(x: Tensor) -> Tensor:
        scale = x.new_ones(len(x), 1)
        return (model(x) * (scale if len(x) == 1 else scale + x[:, :1])).square().mean()

    small, other = (fits(loss_fn, x, **_asked()).largest for x in (one, two))
    assert (small.given, other.given) == (1, 2)
    assert small.planned == other.planned > 2
    # a batch without one first dimension has no largest size
    with ON_META:
        model, x, mask = nn.Linear(8, 8), torch.ones(16, 8), torch.ones(8, 8)
    found = fits(lambda x, mask: (model(x) @ mask).sum(), x, mask, **_asked(time_limit=2))
    assert found.largest is None
    assert "(16, 8), (8, 8)). Give make_batch=" in found.why_no_largest


def test_what_makes_no_sense_is_refused() -> None:
    with ON_META:
        model, x = nn.Linear(8, 3), torch.ones(16, 8)
    step = checkmate.training_step(model, optim.AdamW(model.parameters()), budget="1 MB")
    for fn, device, error, says in (
        (model, "rtx9090", ValueError, r"There is no device 'rtx9090'. Did you mean .*There are h100, .*rtx4090"),
        (model, "laptop", BudgetError, "How much memory a laptop CPU has is not known"),
        (lambda x: x.sum(), "rtx4090", Unsupported, "nothing to train"),
        (3, "rtx4090", TypeError, "takes a module or a function"),
        (step, "rtx4090", TypeError, "and the optimizer, not a training step"),
    ):
        with pytest.raises(error, match=says):
            fits(fn, x, device=device)


def test_the_page_says_what_a_reader_needs(tight: Fits) -> None:
    text = str(tight)
    assert text == repr(tight)
    assert text.startswith(tight.verdict)
    words = "parameters", "optimizer state", "workspaces", "allocator holds", "largest batch", "AdamW"
    assert [word for word in (tight.code, *words) if word not in text] == []
    assert "<table>" in tight._repr_html_()
    assert json.loads(json.dumps(tight.summary()))["ways"][0]["smallest"] == tight.ways[0].smallest


STEP = """
import torch

def example(n=64):
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    return (lambda x: model(x).square().sum()), torch.ones(n, 32)
"""


def test_the_command_answers_as_text_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    (tmp_path / "train.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    asked = "fits train.py:example --time-limit 2 --device"
    assert shell(f"{asked} rtx4090")[0].startswith("It fits NVIDIA GeForce RTX 4090 as it is")
    document = json.loads(shell(f"{asked} t4 --json --size 128 --optimizer SGD --everything")[0])
    assert (document["fits"], document["largest"]["given"], document["optimizer"]) == (True, 128, "SGD")
    assert shell(f"{asked} rtx4090 --budget 10kB", 1)[0].startswith("It does not fit NVIDIA GeForce RTX 4090")
    assert "There is no device 'abacus'. There are h100," in shell(f"{asked} abacus", 2)[1]
    assert shell(f"{asked} rtx4090 --budget 10kB --host-budget 1kB", 1)[0].startswith("It does not fit NVIDIA")
    assert "torch.optim has no optimizer 'Newton'" in shell(f"{asked} t4 --optimizer Newton", 2)[1]


def test_with_no_time_left_only_what_is_needed_is_looked_at(tight: Fits) -> None:
    """A plan that is found stays where there is no time for a better one."""
    recomputed, *others = _on_meta(time_limit=0.1).ways
    assert recomputed.fits
    assert {way.why_not for way in others} == {"not looked at, for want of time"}
    found = planned(replace(tight.problem, next_split=None), tight.room, 20.0, improve=1e-9)
    assert found.peak <= tight.room
