"""How people train: each habit gives the bits of plain PyTorch, or is refused with words that help.

Every habit is a function of a network and of ``wrap``, which is `checkmate.compile` or leaves its argument as it is; it
returns all that must agree. Compiled, each captured graph has the plan of the smallest budget that needs no parts, so
that much runs again.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import checkmate
from checkmate.backends.planner import Planner
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import Unsupported
from checkmate.solvers.common.incumbent import certify
from checkmate.solvers.search.min_budget import least_memory
from tests.support.bits import assert_same_bits
from tests.support.plainly import nothing_drawn
from tests.support.stepping import grads_of

Step = Callable[..., Tensor]
Wrap = Callable[[Any], Any]
Habit = Callable[[nn.Sequential, Wrap], Any]


@pytest.fixture(autouse=True, scope="module")
def _forgotten() -> Iterator[None]:
    """Forget captures at the end only: after each reset the next capture takes half as long again."""
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _tight(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Take the plan of the smallest budget whatever the budget says: ops run again in it."""

    def plan(self: Planner, problem: Problem, beside: int = 0, **options: Any) -> Solution:
        smallest, runs = least_memory(problem, time_limit=0.2)
        return certify(problem, smallest, runs, method="auto")

    monkeypatch.setattr(Planner, "plan", plan)


def _plain(fn: Any) -> Any:
    return fn


def _compiled(fn: Any) -> Any:
    return checkmate.compile(fn, budget="1 GB")


def _run(function: Habit, wrap: Wrap) -> list[Any]:
    torch.manual_seed(3)
    return [*tree_leaves(function(net(), wrap)), torch.get_rng_state()]


def net() -> nn.Sequential:
    """Batch norm has buffers, dropout draws."""
    first = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16), torch.randint(4, (size,))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def state(model: nn.Module) -> list[Tensor | None]:
    """Copy parameters, buffers and gradients."""
    return [*(t.clone() for t in model.state_dict().values()), *grads_of(model)]


def after_backward(model: nn.Module, *losses: Tensor) -> list[Any]:
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *state(model)]


def training(
    loss: Callable[..., Tensor] = cross_entropy,
    make: Callable[[], nn.Module] | None = None,
    *,
    data: Callable[[], tuple[Tensor, ...]] = batch,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    steps: int = 1,
) -> Habit:
    """Train by a loss of a model, the network or another, and its data; forwards are within a region."""

    def function(model: nn.Module, wrap: Wrap) -> Any:
        model, left = make() if make else model, []
        step = wrap(lambda *given: loss(model, *given))
        for _ in range(steps):
            given = data()
            with around():
                value = step(*given)
            left.append(after_backward(model, value))
        return left

    return function


# Gradients


@torch.autocast("cpu", dtype=torch.bfloat16)
def _mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(logits.float(), y)


def _in(dtype: torch.dtype) -> Habit:
    return training(lambda model, x, y: cross_entropy(model, x.to(dtype), y), lambda: net().to(dtype))


AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 16), net()[:4], nn.Linear(32, 16)
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.head(self.body(self.embedding(tokens))))


@dataclasses.dataclass
class _Result:
    loss: Tensor
    logits: Tensor | None = None
    note: str = ""


_Named = namedtuple("_Named", ["loss", "logits"])


@dataclasses.dataclass
class _Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


def _returning(make: Callable[..., Any], read: Callable[[Any], Any]) -> Habit:
    def function(model: nn.Sequential, wrap: Wrap) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            logits = model(x)
            return make(loss=F.cross_entropy(logits, y), logits=logits)

        result = wrap(step)(*batch())
        assert type(result) is (make if isinstance(make, type) else type(result))
        loss, logits = read(result)
        return after_backward(model, loss), logits.detach()

    return function


def _fields(result: Any) -> tuple[Tensor, Tensor]:
    return result.loss, result.logits


class _Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.body, self.dropout = nn.Linear(16, 48), net(), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(3, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.body(y.transpose(1, 2).reshape(12, 16))


class _Straight(torch.autograd.Function):
    """Rounded on the way forward, untouched on the way back but for a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * (x.abs() < 1), None


@torch.library.custom_op("checkmate_habits::cube", mutates_args=())
def _cube(x: Tensor) -> Tensor:
    return x * x * x


@_cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("checkmate_habits::count_", mutates_args={"counter"})
def _count(counter: Tensor, x: Tensor) -> None:
    counter += (x > 0).sum()


def _between(op: Callable[[Tensor], Tensor]) -> Habit:
    """Apply an op between the first layers and the last ones."""
    return training(lambda model, x, y: F.cross_entropy(model[4:](op(model[:4](x))), y))


def _normed(norm: Callable[[nn.Module], Any], layer: int) -> Habit:
    """Buffers of some norms change at each forward."""

    def make() -> nn.Module:
        model = net()
        norm(model[layer])
        return model

    return training(make=make, steps=2)


def _images() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(8, 4, 3))
    return model.to(memory_format=torch.channels_last)


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class _Habits:
    """Habits by the words of their names: of a network and ``wrap``, or the step of its loss, or such a loss."""

    # Gradients

    def gradient_accumulation(model: nn.Sequential, step: Step, *, set_to_none: bool = True) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        left = []
        for _ in range(2):
            for _ in range(3):
                loss = step(*batch()) / 3
                loss.backward()
                left.append(loss.detach())
            left += state(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return left, state(model)

    gradient_accumulation_into_zeros = partial(gradient_accumulation, set_to_none=False)

    def module_zero_grad_and_gradients_set_by_hand(model: nn.Sequential, step: Step) -> Any:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        first = after_backward(model, step(*batch()))
        model.zero_grad()
        return first, after_backward(model, step(*batch()))

    def frozen_parameters_thawed_later(model: nn.Sequential, step: Step) -> Any:
        model[0].requires_grad_(False)
        frozen = after_backward(model, step(*batch()))
        model[0].requires_grad_(True)
        return frozen, after_backward(model, step(*batch()))

    def hooks_of_parameters(model: nn.Sequential, step: Step) -> Any:
        seen: list[Any] = []
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return after_backward(model, step(*batch())), after_backward(model, step(*batch())), seen

    def hooks_of_tensors(model: nn.Sequential, wrap: Wrap) -> Any:
        """On an input, on a result, and within the step."""
        seen: list[Any] = []

        def scaled(x: Tensor, y: Tensor) -> Tensor:
            hidden = model[:4](x)
            hidden.register_hook(lambda grad: grad * 3)
            return F.cross_entropy(model[4:](hidden), y)

        x, y = batch()
        x.requires_grad_().register_hook(lambda grad: seen.append(grad.clone()))
        loss = wrap(scaled)(x, y)
        loss.register_hook(lambda grad: grad * 0.5)
        return after_backward(model, loss), x.grad, seen

    def gradients_of_inputs(model: nn.Sequential, step: Step) -> Any:
        x, y = batch()
        x.requires_grad_()
        (grad,) = torch.autograd.grad(step(x, y), x)
        with torch.no_grad():
            x += 0.1 * grad.sign()
        return grad, x.detach(), after_backward(model, step(x, y)), x.grad

    def clipped_gradients(model: nn.Sequential, step: Step) -> Any:
        loss = step(*batch())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return loss.detach(), norm, state(model)

    # Precision

    autocast_to_bfloat16_outside = training(data=lambda: batch(48), around=AUTOCAST)
    autocast_to_bfloat16_inside = training(_mixed, data=lambda: batch(48), steps=2)
    model_in_bfloat16 = _in(torch.bfloat16)
    model_in_float64 = _in(torch.float64)

    def gradient_scaler(model: nn.Sequential, step: Step) -> Any:
        """A scale that is too large at first: one step is skipped."""
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        left = []
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = step(*batch(48))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            left += [loss.detach(), torch.tensor(scaler.get_scale()), *state(model)]
            optimizer.zero_grad()
        return left

    # What a step takes, holds and returns

    tied_weights = training(make=_Tied, data=lambda: (torch.randint(11, (12,)), torch.randint(11, (12,))))

    def several_forwards_then_backwards(model: nn.Sequential, step: Step) -> Any:
        first, second, third = (step(*batch()) for _ in range(3))
        return after_backward(model, second, third, first)

    def siamese_branches_in_one_backward(model: nn.Sequential, wrap: Wrap) -> Any:
        """A compiled module called twice, the loss outside."""
        shared = wrap(model)
        a, b = shared(batch()[0]), shared(batch()[0])
        return after_backward(model, (a - b).square().mean())

    def tied_weights_in_two_calls_of_one_backward(_: nn.Sequential, wrap: Wrap) -> Any:
        """A preference for one text over another: each call adds to the tied weight twice."""
        embedding, body = nn.Embedding(16, 16), nn.Linear(16, 16)

        def likelihood(text: Tensor) -> Tensor:
            logits = F.linear(torch.tanh(body(embedding(text))), embedding.weight)
            return -F.cross_entropy(logits[:-1], text[1:])

        step = wrap(likelihood)
        chosen, rejected = torch.arange(12) % 5, torch.arange(12) % 7
        loss = -F.logsigmoid(step(chosen) - step(rejected))
        return after_backward(nn.ModuleList([embedding, body]), loss)

    def several_losses(model: nn.Sequential, wrap: Wrap) -> Any:
        def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(x)
            return F.cross_entropy(logits, y), logits.square().mean()

        step = wrap(both)
        first = after_backward(model, sum(step(*batch())))
        one, other = step(*batch())
        one.backward(retain_graph=True)
        other.backward()
        only, _ = step(*batch())
        return first, one.detach(), other.detach(), state(model), after_backward(model, only)

    results_in_a_dict = _returning(dict, lambda result: (result["loss"], result["logits"]))
    results_in_a_dataclass = _returning(_Result, _fields)
    results_in_a_named_tuple = _returning(_Named, _fields)
    results_in_a_ModelOutput = _returning(_Output, _fields)
    results_in_nested_lists = _returning(
        lambda loss, logits: [None, ["text", 3, loss], {"logits": [logits]}], lambda r: (r[1][2], r[2]["logits"][0])
    )

    def arguments_of_every_kind(model: nn.Sequential, wrap: Wrap) -> Any:
        def step(
            x: Tensor, y: Tensor | None = None, *more: Tensor, scale: float = 1.0, mode: str = "mean", **rest: Any
        ) -> Tensor:
            logits = model(x) * scale
            if rest.get("mask") is not None:
                logits = logits.masked_fill(rest["mask"], 0.0)
            if y is None:
                return logits.logsumexp(1).mean()
            return F.cross_entropy(logits, y, reduction=mode, weight=more[0] if more else None)

        compiled = wrap(step)
        x, y = batch()
        losses = [
            compiled(x, y),
            compiled(x),
            compiled(x, None, scale=0.5),
            compiled(x, y, torch.rand(4), mode="sum", mask=torch.rand(12, 4) < 0.2),
            compiled(y=y, x=x, mask=None, unused={"deep": [1, None]}),
        ]
        return after_backward(model, *losses)

    def a_backward_from_results_that_are_no_scalar(model: nn.Sequential, wrap: Wrap) -> Any:
        logits = wrap(model)(batch()[0])
        logits.backward(torch.randn(12, 4))
        return logits.detach(), state(model)

    def detached_results_and_parts(critic: nn.Sequential, wrap: Wrap) -> Any:
        """A generator and a critic: each step trains one of the two."""
        generator = nn.Sequential(net(), nn.Linear(4, 16))
        judge = wrap(lambda x: F.softplus(critic(x)).mean())
        make = wrap(lambda x: generator(x))
        left = []
        for _ in range(2):
            fake = make(batch()[0])
            left += after_backward(critic, judge(fake.detach()) - judge(batch()[0]))
            critic.requires_grad_(False)
            left += after_backward(generator, judge(make(batch()[0])))
            critic.requires_grad_(True)
        return left

    # What stands within a step

    def custom_op_that_writes(model: nn.Sequential, wrap: Wrap) -> Any:
        """It counts, once a step, and is not run again."""
        counter = torch.zeros((), dtype=torch.int64)

        def step(x: Tensor, y: Tensor) -> Tensor:
            hidden = model[:4](x)
            _count(counter, hidden.detach())
            return F.cross_entropy(model[4:](hidden), y)

        compiled = wrap(step)
        return [(after_backward(model, compiled(*batch())), counter.clone()) for _ in range(2)]

    def checkpointed_parts(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(model[2:5], model[:2](x), use_reentrant=False)
        return F.cross_entropy(checkpoint(model[5:], hidden, use_reentrant=False), y)

    def in_place_ops_and_views(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:4](x).clone()
        hidden[:, ::2] *= 2
        hidden.view(-1)[3:7].add_(1.0)
        hidden = hidden.relu_().index_add(0, torch.tensor([0, 0, 1]), hidden[2:5])
        return F.cross_entropy(model[4:](hidden), y)

    def random_numbers_within_the_step(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        x = x[torch.randperm(len(x))] + 0.1 * torch.randn_like(x)
        hidden = F.rrelu(F.alpha_dropout(model[:4](x), 0.1, training=True), training=True)
        hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.9)) + torch.empty_like(hidden).uniform_(-0.1, 0.1)
        return F.cross_entropy(model[4:](hidden), y)

    attention_with_dropout = training(make=lambda: _Attending(0.3))
    attention_with_dropout_under_autocast = training(make=lambda: _Attending(0.3), around=AUTOCAST)
    attention_without_dropout = training(make=lambda: _Attending(0.0))
    multi_head_attention_module = training(
        _mean_square,
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
        data=lambda: (torch.randn(3, 5, 16),),
    )
    weight_norm = _normed(nn.utils.parametrizations.weight_norm, 0)
    spectral_norm = _normed(nn.utils.parametrizations.spectral_norm, 4)
    custom_autograd_function = _between(lambda x: _Straight.apply(x, 0.5))
    custom_op = _between(_cube)
    tensors_saved_on_the_cpu = training(around=torch.autograd.graph.save_on_cpu)
    images_with_channels_last = training(
        _mean_square, _images, data=lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),), steps=2
    )

    def compiled_within_compiled(model: nn.Sequential, wrap: Wrap) -> Any:
        """The inner ones become part of the outer one's graph."""
        inner, middle = (part if wrap is _plain else _compiled(part) for part in (model[:4], lambda x: model[4:6](x)))
        return after_backward(model, wrap(lambda x, y: F.cross_entropy(model[6](middle(inner(x))), y))(*batch()))

    def torch_compile_within_the_step(model: nn.Sequential, wrap: Wrap) -> Any:
        body = torch.compile(model[:4], backend="eager")
        return after_backward(model, wrap(lambda x, y: F.cross_entropy(model[4:](body(x)), y))(*batch()))

    def gradients_off_within_the_step(model: nn.Sequential, wrap: Wrap) -> Any:
        """A teacher without gradients beside the student."""
        teacher = net()

        def distill(x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            return F.cross_entropy(model(x), target)

        return after_backward(model, wrap(distill)(*batch())), state(teacher)

    # Around a step

    def evaluation_between_steps(model: nn.Sequential, wrap: Wrap) -> Any:
        compiled, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        left = []
        for evaluate in (torch.no_grad, torch.inference_mode):
            x, y = batch()
            left += after_backward(model, F.cross_entropy(compiled(x), y))
            optimizer.step()
            optimizer.zero_grad()
            compiled.eval()
            with evaluate():
                left.append(compiled(batch()[0]).clone())
            left.append(compiled(batch()[0]).detach())
            compiled.train()
            with evaluate():
                left.append(compiled(batch()[0]).clone())  # statistics are updated, gradients are not
        return left, state(model)

    def deep_copies(model: nn.Sequential, wrap: Wrap) -> Any:
        compiled = wrap(model)
        left = after_backward(model, compiled(batch()[0]).square().mean())
        twin = copy.deepcopy(compiled)
        left += after_backward(twin, twin(batch()[0]).square().mean())
        return left, state(model)

    def state_dict_and_back(model: nn.Sequential, wrap: Wrap) -> Any:
        compiled, optimizer = wrap(model), torch.optim.AdamW(model.parameters())
        left = after_backward(model, compiled(batch()[0]).square().mean())
        optimizer.step()
        kept = copy.deepcopy((compiled.state_dict(), optimizer.state_dict()))
        compiled.load_state_dict(net().state_dict())
        left += after_backward(model, compiled(batch()[0]).square().mean())
        compiled.load_state_dict(kept[0], assign=True)  # other tensors in the place of the parameters
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(kept[1])
        left += after_backward(model, compiled(batch()[0]).square().mean())
        optimizer.step()
        return left, state(model), list(kept[0])

    def the_model_saved_and_loaded(model: nn.Sequential, wrap: Wrap) -> Any:
        compiled = wrap(model)
        left = after_backward(model, compiled(batch()[0]).square().mean())
        loaded = []
        for what in (model, compiled):
            file = io.BytesIO()
            torch.save(what, file)
            file.seek(0)
            loaded.append(torch.load(file, weights_only=False))
            assert isinstance(loaded[-1], nn.Sequential)
        return left, [after_backward(m, m(batch()[0]).square().mean()) for m in loaded]

    def optimizers_foreach_and_fused(model: nn.Sequential, step: Step) -> Any:
        """One compiled step serves them all in turn."""
        left, by = [], torch.optim
        for kind, settings in (
            (by.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
            (by.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
            (by.Adam, {"foreach": False}),
            (by.AdamW, {"foreach": True, "amsgrad": True}),
            (by.AdamW, {"fused": True}),
            (by.Adagrad, {}),
            (by.RMSprop, {}),
        ):
            optimizer = kind(model.parameters(), **settings)
            for _ in range(2):
                optimizer.zero_grad()
                left += after_backward(model, step(*batch()))
                optimizer.step()
        return left, state(model)

    def optimizer_with_a_closure(model: nn.Sequential, step: Step) -> Any:
        optimizer, (x, y) = torch.optim.LBFGS(model.parameters(), max_iter=3), batch()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = step(x, y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach(), state(model)

    def optimizers_in_the_backward(model: nn.Sequential, step: Step) -> Any:
        """Each parameter is updated as soon as its gradient is there."""
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], 0.1)

            def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        return [after_backward(model, step(*batch())) for _ in range(3)]

    def averaged_copies(model: nn.Sequential, step: Step) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
        for _ in range(3):
            optimizer.zero_grad()
            step(*batch()).backward()
            optimizer.step()
            average.update_parameters(model)
        average.eval()
        return state(model), state(average), average(batch()[0]).detach()

    def learning_rate_schedulers(model: nn.Sequential, step: Step) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
        left = []
        for _ in range(4):
            optimizer.zero_grad()
            left += [*after_backward(model, step(*batch())), torch.tensor(scheduler.get_last_lr())]
            optimizer.step()
            scheduler.step()
        return left

    def parts_replaced_between_steps(model: nn.Sequential, step: Step) -> Any:
        """A new head of another width; weights written through ``.data``."""
        left = after_backward(model, step(*batch()))
        model[6] = nn.Linear(32, 7)
        model[0].weight.data.mul_(0.5)
        left += after_backward(model, step(*batch()))
        model[3].p = 0.5
        return left, after_backward(model, step(*batch()))

    def anomaly_detection(model: nn.Sequential, wrap: Wrap) -> Any:
        with torch.autograd.detect_anomaly(check_nan=True):
            return training()(model, wrap)


def _habit_of(function: Any) -> Habit:
    taken = inspect.signature(function).parameters
    if "step" in taken:
        return lambda model, wrap: function(model, wrap(lambda x, y: cross_entropy(model, x, y)))
    return training(function, steps=2) if "x" in taken else function


HABITS = {name.replace("_", " "): _habit_of(one) for name, one in vars(_Habits).items() if name[0] != "_"}
HABITS["optimizers, foreach and fused"] = HABITS.pop("optimizers foreach and fused")


@pytest.mark.parametrize("name", HABITS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_bits_of_plain_pytorch(name: str) -> None:
    compiled = []

    def wrap(fn: Any) -> Any:
        compiled.append(_compiled(fn))
        return compiled[-1]

    expected, found = _run(HABITS[name], _plain), _run(HABITS[name], wrap)
    assert_same_bits(found, expected)
    assert all(step.plans for step in compiled)
    assert any(plan.modules.again for step in compiled for plan in step.plans), "nothing ran again"


# What is refused, with what to do instead


def _backward_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model, x, y)
    loss.backward()
    return loss


def _optimizer_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    SGD.zero_grad()
    return cross_entropy(model, x, y)


def _penalty_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(model, x, y), x, create_graph=True)
    return grad.norm()


def _retained_gradient_within(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    hidden = model[:4](x)
    hidden.retain_grad()
    return F.cross_entropy(model[4:](hidden), y)


def _of_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda model, x, y: cross_entropy(model, change(x), y)


SGD, MINE, SPARSE = torch.optim.SGD(net().parameters(), 0.1), torch.Generator(), nn.Embedding(4, 16, sparse=True)
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "backward within the step": (_backward_within, r"loss\.backward\(\)\nReturn the loss, and call backward"),
    "optimizer within the step": (_optimizer_within, "optimizer outside"),
    "gradient penalty within the step": (_penalty_within, r"torch\.func\.grad_and_value|in with requires_grad_"),
    "gradient retained within the step": (_retained_gradient_within, r"tensor\.register_hook"),
    "a generator of one's own": (_of_input(lambda x: x + torch.randn(x.shape, generator=MINE)), "global generator"),
    "random numbers of Python": (_of_input(lambda x: x * 2 if random.gauss(0, 1) < 0.5 else x), "Draw with torch"),
    "computing with random numbers of Python": (_of_input(lambda x: x ** random.randint(2, 3)), "Draw with torch"),
    "sparse gradients": (lambda model, x, y: cross_entropy(model, SPARSE(y), y), "sparse=False"),
    "modules of torch.jit": (cross_entropy, "original eager nn.Module"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_with_what_to_do_instead(name: str) -> None:
    loss, words = REFUSED[name]
    model = torch.jit.script(net()) if "torch.jit" in name else net()
    given = batch()
    with nothing_drawn(), pytest.raises(Unsupported, match=words) as caught:
        _compiled(lambda x, y: loss(model, x, y))(*given)
    assert "test_habits.py" in str(caught.value)


@pytest.mark.parametrize("hold", [lambda model: model, lambda model: lambda x: model(x).square()])
def test_lazy_modules_are_to_be_called_once_before(hold: Callable[[nn.Module], Any]) -> None:
    """Capture gives back the random numbers that it draws: later ones would be those of the parameters again."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4))
    x, _ = batch()
    with pytest.raises(Unsupported, match=r"0\.weight .*Call it once"):
        _compiled(hold(model))(x)
    model(x)
    assert_same_bits(_compiled(hold(model))(x), hold(model)(x))


# What differs from plain PyTorch, and is told in docs/supported.md


def test_batch_norm_in_a_checkpointed_part_updates_its_statistics_once() -> None:
    """Plain PyTorch runs it again in the backward, and updates them twice. Here it is as without the checkpoint."""

    def train(model: nn.Module, forward: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        return after_backward(model, forward(*batch()))

    model = net()
    twin = copy.deepcopy(model)
    step = _compiled(lambda x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y))
    found, expected = train(model, step), train(twin, partial(cross_entropy, twin))
    assert_same_bits(found, expected)
    assert model[1].num_batches_tracked == 1


def test_results_are_ends_of_the_graph() -> None:
    """A loss does not depend on logits that are handed out beside it: they share what both are computed from."""
    model = net()

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        return F.cross_entropy(logits, y), logits

    loss, logits = _compiled(both)(*batch())
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        torch.autograd.grad(loss, logits)
