"""A step is captured once for each kind of input, up to a limit, and not at all where nothing needs a gradient."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import checkmate
from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.compilation import Backend
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from checkmate.memory.meter import SELDOM
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, compiled
from tests.support.whole_steps import plain_step


def _no_dynamo() -> bool:
    """Whether Dynamo has captured nothing since its counters were cleared."""
    return not torch._dynamo.utils.counters["frames"] and not torch._dynamo.utils.counters["stats"]


def _encoder(layers: int) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """An encoder with a batch of padded sequences."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), layers).eval()
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None]
    return model, torch.randn(3, 7, 16), {"src_key_padding_mask": padding}


def test_a_capture_that_is_dropped_leaves_no_guards() -> None:
    """Dynamo keeps an object for the guards of each, with the lines of code that each guard is from."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    step = checkmate.compile(lambda x: model(x).sum(), budget="1 MB", max_plans=2, time_limit=1, wait="first")

    def held(sizes: range) -> int:
        for size in sizes:
            step(torch.randn(size, 8)).backward()
        gc.collect()
        return sum(isinstance(one, StackSummary) for one in gc.get_objects())

    before, after = held(range(1, 4)), held(range(4, 7))
    assert after - before <= 10 * 3  # 1 for each capture on PyTorch 2.15, 7 on 2.11; its guards had 67


@pytest.mark.parametrize("gradients_off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_plain_module_runs(gradients_off: type) -> None:
    """The encoder takes another way then, by nested tensors, whose numbers are others in the last bits."""
    model, x, padding = _encoder(2)
    compiled = checkmate.compile(model, budget="1 B")
    torch._dynamo.utils.counters.clear()
    with gradients_off():
        assert_same_bits(compiled(x, **padding), model(x, **padding))
    assert not compiled.plans
    assert _no_dynamo()


def test_garbage_is_looked_for_seldom_while_a_step_is_captured() -> None:
    before, within = gc.get_threshold(), []

    def plan(problem: checkmate.Problem) -> checkmate.Solution:
        within.append(gc.get_threshold())
        return checkmate.solve(problem, "1 GB" if len(within) == 1 else 1)

    x = torch.randn(4, requires_grad=True)
    for step in (lambda x: x.square().sum(), lambda x: x.square().sum().exp()):
        with nullcontext() if not within else pytest.raises(Exception, match="no modules"):
            CaptureCache(step, Backend(plan))(x)
        assert gc.get_threshold() == before
    assert [most for most, *_ in within] == [SELDOM[0]] * 2


def test_generation_is_that_of_the_plain_model() -> None:
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=96)
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(96, (1, 5))
    options = {"min_new_tokens": 40, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    torch._dynamo.utils.counters.clear()
    assert_same_bits(checkmate.compile(model, budget="1 B").generate(prompt, **options), expected)
    assert expected.shape[1] == 45
    assert _no_dynamo()


@pytest.mark.slow
def test_where_nothing_needs_a_gradient_the_plain_module_runs() -> None:
    model, x, padding = _encoder(1)
    compiled = checkmate.compile(model.requires_grad_(False), budget="1 MB", time_limit=1)
    for _ in range(2):
        assert_same_bits(compiled(x, **padding), model(x, **padding))
        torch._dynamo.utils.counters.clear()
    assert not compiled.plans
    model.requires_grad_(True)
    compiled(x).sum().backward()
    assert len(compiled.plans) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda loss_of, optimizer: plain_step(checkmate.compile(loss_of, budget="1 GB"), optimizer),
        lambda loss_of, optimizer: checkmate.training_step(loss_of, optimizer, budget="1 GB"),
    ],
    ids=["compile", "training step"],
)
def test_hooks_that_come_and_go_between_steps_are_called(make: Callable[..., Any]) -> None:
    """Dynamo looks by itself neither at those of a module nor at those of all modules."""

    def losses(make: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(3, 4)
        step = make(lambda x: net(x).square().mean(), torch.optim.SGD(net.parameters(), lr=0.1))
        found = [step(x).item()]
        for add in (
            lambda: net[0].register_forward_hook(lambda module, args, made: made * 2),
            lambda: net[1].register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
            lambda: nn.modules.module.register_module_forward_hook(lambda module, args, made: made * 1.5),
        ):
            hook = add()
            try:
                found.append(step(x).item())
            finally:
                hook.remove()
            found.append(step(x).item())
        return found

    plain = losses(plain_step)
    assert len({*plain}) == len(plain) == 7
    assert losses(make) == plain


def test_nine_lengths() -> None:
    """More than Dynamo compiles one function for; each is captured once."""
    model = nn.Linear(4, 4)
    plain = lambda x: model(x).square().mean()  # noqa: E731
    step, batches = compiled(plain), [torch.randn(n, 4) for n in range(1, 10)]
    for x in batches:
        assert_as_plain(plain, x, leaves=[*model.parameters()], run=step)
    plans = list(step.plans)
    assert len(plans) == len(batches)
    torch._dynamo.utils.counters.clear()
    for x in batches:
        assert_as_plain(plain, x, leaves=[*model.parameters()], run=step)
    assert _no_dynamo()
    assert all(a is b for a, b in zip(step.plans, plans, strict=True))


@pytest.mark.slow
def test_the_least_recently_used_is_dropped_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    step = checkmate.compile(lambda x: model(x.flatten(1)).sum(), budget="1 MB", time_limit=1, max_plans=4)
    batches = [torch.randn(2, *(1,) * n, 4) for n in range(5)]
    step(batches[0])
    with caplog.at_level(logging.WARNING):
        step(batches[1])
    assert "captured and planned 2 times" in caplog.text
    assert "Half of max_plans=4" in caplog.text
    caplog.clear()
    code = [weakref.ref(plan.modules.forward) for plan in step.plans]
    for x in (batches[2], batches[3], batches[0], batches[4]):  # that of the second batch was not used for longest
        step(x).backward()
    assert not caplog.records  # said once
    gc.collect()
    assert [made() is None for made in code] == [False, True]
    assert len(step.plans) == 4
    torch._dynamo.utils.counters.clear()
    step(batches[0]).backward()
    assert _no_dynamo()
    assert_same_bits(step(batches[1]), model(batches[1].flatten(1)).sum())
    assert not _no_dynamo()


@pytest.mark.slow
def test_what_is_dropped_between_forward_and_backward_still_runs_backward() -> None:
    model = nn.Linear(4, 4)
    step = checkmate.compile(lambda x: F.gelu(model(x)).sum(), budget="1 MB", time_limit=1, max_plans=1)
    x = torch.randn(3, 4)
    loss = step(x)
    step(torch.randn(3, 1, 4))
    gc.collect()
    losses = loss, F.gelu(model(x)).sum()
    assert_same_bits(*(torch.autograd.grad(each, [*model.parameters()]) for each in losses))


@pytest.mark.slow
def test_modes_within_one_length() -> None:
    """More states of one kind of input than Dynamo compiles one function for: each has its capture, and keeps it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 1))
    step, x = compiled(model), torch.randn(3, 4)
    for frozen, training in [*itertools.product(range(4), (True, False))] * 2:
        for i in (0, 2):
            model[i].requires_grad_(bool(frozen >> (i // 2) & 1))
        model.train(training)
        results = []
        for run in (step, model):
            torch.manual_seed(1)
            with torch.autocast("cpu", enabled=frozen == 3):
                results.append(run(x))
        assert_same_bits(*results)
    assert len(step.plans) == 8


class Annealed(nn.Module):
    """A network with numbers as attributes and as an argument, in the computation and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls, self.step, self.seen, self.beta, self.temperature = 0, 0, 0.0, 0.25, 1.5

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        self.step += 1
        self.seen += 0.5
        y = F.dropout(self.body(x), 0.1)
        kl = (self.head(y) / self.temperature).log_softmax(-1).square().sum()
        return (1 - self.beta) * y.mean() * scale + min(1, self.step / 3) * self.beta * kl


def test_numbers_that_change_are_inputs() -> None:
    """Counters beside the computation cost one capture more."""
    model = Annealed()
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    compiled = checkmate.compile(model, budget="1 MB", time_limit=1, max_plans=1)
    for i, scale in enumerate([0.1, -0.0, 7.3, float("inf"), 1e-300]):
        losses = []
        for each, run in ((model, compiled), (twin, twin)):
            each.beta, each.temperature = 0.3 * i, 1.1**i
            torch.manual_seed(1)
            losses.append(run(x, scale))
            each.zero_grad()
            losses[-1].backward()
        assert_same_bits(*losses)
        assert_same_bits(*([p.grad for p in each.parameters()] for each in (model, twin)))
        assert (model.calls, model.step, model.seen, type(model.step)) == (i + 1, twin.step, twin.seen, int)
        assert len(compiled.plans) == 1  # the second is for the first call too
        if i == 1:
            torch._dynamo.utils.counters.clear()
    assert _no_dynamo()


def test_the_peak_with_numbers_as_inputs_is_that_of_the_plan() -> None:
    model, x = Annealed(), torch.randn(64, 8)
    compiled = checkmate.compile(model, budget="1 MB", time_limit=1)

    def step() -> None:
        compiled(x, 1.0 + model.step).backward()
        model.beta += 0.1

    step()
    step()
    (plan,) = compiled.plans
    use = measure_peak(step)
    assert compiled.plans == [plan]
    assert plan.problem.resident + use.peak == plan.peak


def test_what_is_copied_into_a_parameter_is_let_go_when_the_forward_returns() -> None:
    """AOTAutograd writes to a parameter outside of the graph, and has the result of the forward only until then."""
    clamped, weight = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

    def step(x: Tensor) -> Tensor:
        clamped.data.clamp_(-0.3, 0.3)
        return (x @ clamped @ weight).sin().square().sum()

    compiled, x = checkmate.compile(step, budget="1 MB", time_limit=1), torch.randn(256, 64)
    compiled(x)
    (plan,) = compiled.plans
    graph = plan.problem.graph
    (back,) = (op for op in graph.ops if op.name == "return")
    assert [graph.values[v].name for v in back.inputs] == ["clamp"]
    assert not set(back.inputs).intersection(graph.outputs)
    taken = measure_peak(lambda: torch.autograd.grad(compiled(x), (clamped, weight))).peak
    assert plan.problem.resident + taken == plan.peak
    assert clamped.abs().max() == torch.tensor(0.3)


@pytest.mark.slow
def test_what_depends_on_a_number_in_other_ways_is_captured_for_each_value() -> None:
    """Branches, sizes, a switch of dropout, the types of integer tensors."""
    model = nn.Linear(8, 8)

    def step(x: Tensor, keep: int, p: float, warmup: int) -> Tensor:
        y = F.dropout(model(x)[:, :keep], p)
        whole = torch.arange(keep) * min(1, warmup / 2)
        return y.sum() * whole.sum() * (3.0 if warmup < 2 else p)

    run = compiled(step)
    values = [(8, 0.5, 1), (7, 0.5, 1), (7, 0.25, 1), (7, 1.0, 1), (7, 0.5, 2), (7, 0.5, 3), (8, 0.5, 1), (6, 0.1, 9)]
    for given in values:
        assert_as_plain(step, torch.randn(3, 8), *given, leaves=[*model.parameters()], run=run, seed=1)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.width = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.width += 1
        return self.body(x)[:, : self.width].sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Identity(), Growing())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_at_the_limit_the_number_is_named() -> None:
    model, x = Outer(), torch.randn(2, 8)
    step = compiled(model, max_plans=3)
    for _ in range(3):
        step(x).backward()
    with pytest.raises(Unsupported) as caught:
        step(x)
    said = str(caught.value).replace("'", '"')
    for words in (
        *("self.layers[1].width changes from call to call of ", "max_plans=3", "The last ones: 0, 1, 2, 3"),
        *("self.width", "test_capture_cache.py", 'self.layers[1].register_buffer("width", torch.tensor(3))'),
    ):
        assert words in said
    assert model.layers[1].width == 3  # nothing has run
    model.layers[1].width = 1
    step(x).backward()  # those that are kept still run


def test_at_the_limit_an_argument_is_named() -> None:
    model = nn.Linear(8, 8)

    def step(x: Tensor, keep: int) -> Tensor:
        return model(x)[:, :keep].sum()

    run, x = compiled(step, max_plans=2), torch.randn(2, 8)
    for keep in (5, 6, 5, 6):
        assert_same_bits(run(x, keep), step(x, keep))
    with pytest.raises(Unsupported, match=r"The last ones: 5, 6, 7.*\n.*\n.*keep = torch\.tensor\(7\)"):
        run(x, 7)


@pytest.mark.parametrize("by_name", [False, True], ids=["compile", "torch.compile"])
def test_a_capture_leaves_no_bytes_that_no_plan_knows(by_name: bool) -> None:
    """A tensor times a number: autograd of the fake tensors keeps the number, in a real tensor of eight bytes."""
    weight, x = nn.Parameter(torch.randn(64)), torch.randn(64)

    def train() -> object:
        def loss_of(x: Tensor) -> Tensor:
            return (weight.sigmoid() * 0.5 * x).sum()

        if by_name:
            torch._dynamo.reset()
            step = torch.compile(loss_of, backend="checkmate", options={"budget": "1 MB"}, dynamic=False)
        else:
            step = checkmate.compile(loss_of, budget="1 MB", time_limit=1)
        step(x).backward()
        weight.grad = None
        return step

    train()  # its ops are measured
    assert measure_peak(train).final == 0
