"""How people train: each habit gives the bits of plain PyTorch, or is refused with words that help.

Every habit is a function of ``wrap``, which is `checkmate.compile` or leaves its argument as it is; it returns all that
must agree. Compiled, each captured graph is planned close to the smallest budget that needs no parts, so that much
runs again.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from checkmate.solvers.search.min_budget import ends_of
from checkmate.solvers.solve import solve
from tests.support.bits import assert_same_bits
from tests.support.sampling import slow

Wrap = Callable[[Any], Any]
Habit = Callable[[Wrap], Any]
HABITS: dict[str, tuple[Habit, bool]] = {}  # and whether it belongs to the quick part of the tests


def habit(function: Habit) -> Habit:
    """Something that works, by the words of its name."""
    HABITS[function.__name__.replace("_", " ")] = function, False
    return function


def quick(function: Habit) -> Habit:
    """Tested in the quick part too."""
    HABITS[function.__name__.replace("_", " ")] = function, True
    return function


@pytest.fixture(autouse=True)
def _tight(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Whatever the budget says, plan close to the smallest at which ops run again."""

    def plan(self: Planner, problem: Problem, beside: int = 0, *, go_on: bool = False) -> tuple[Solution, None]:
        return solve(problem, ends_of(problem, time_limit=0.2).peak, method="auto", time_limit=0.2), None

    monkeypatch.setattr(Planner, "plan", plan)
    yield
    torch._dynamo.reset()


def _plain(fn: Any) -> Any:
    return fn


def _compiled(fn: Any) -> Any:
    return checkmate.compile(fn, budget="1 GB")


def _run(function: Habit, wrap: Wrap) -> list[Any]:
    torch.manual_seed(3)
    return [*tree_leaves(function(wrap)), torch.get_rng_state()]


def assert_same(function: Habit) -> None:
    """Compiled and plain leave the same bits."""
    compiled = []

    def wrap(fn: Any) -> Any:
        compiled.append(_compiled(fn))
        return compiled[-1]

    expected, found = _run(function, _plain), _run(function, wrap)
    assert_same_bits(found, expected)
    assert all(step.plans for step in compiled)
    assert any(plan.modules.again for step in compiled for plan in step.plans), "nothing ran again"


def net() -> nn.Sequential:
    """Batch norm has buffers, dropout draws."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16), torch.randint(4, (size,))


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y)


def state(model: nn.Module) -> list[Tensor | None]:
    """Parameters, buffers and gradients, as they are now."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*(t.clone() for t in model.state_dict().values()), *grads]


def after_backward(model: nn.Module, *losses: Tensor) -> list[Any]:
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *state(model)]


# Gradients


def _accumulate(wrap: Wrap, set_to_none: bool) -> Any:
    model = net()
    step, optimizer = wrap(loss_of(model)), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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


@quick
def gradient_accumulation(wrap: Wrap) -> Any:
    return _accumulate(wrap, set_to_none=True)


@habit
def gradient_accumulation_into_zeros(wrap: Wrap) -> Any:
    return _accumulate(wrap, set_to_none=False)


@habit
def module_zero_grad_and_gradients_set_by_hand(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first = after_backward(model, step(*batch()))
    model.zero_grad()
    return first, after_backward(model, step(*batch()))


@habit
def frozen_parameters_thawed_later(wrap: Wrap) -> Any:
    model = net()
    model[0].requires_grad_(False)
    step = wrap(loss_of(model))
    frozen = after_backward(model, step(*batch()))
    model[0].requires_grad_(True)
    return frozen, after_backward(model, step(*batch()))


@quick
def hooks_of_parameters(wrap: Wrap) -> Any:
    model, seen = net(), []
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step = wrap(loss_of(model))
    return after_backward(model, step(*batch())), after_backward(model, step(*batch())), seen


@habit
def hooks_of_tensors(wrap: Wrap) -> Any:
    """On an input, on a result, and within the step."""
    model, seen = net(), []

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:4](x)
        hidden.register_hook(lambda grad: grad * 3)
        return F.cross_entropy(model[4:](hidden), y)

    x, y = batch()
    x.requires_grad_().register_hook(lambda grad: seen.append(grad.clone()))
    loss = wrap(scaled)(x, y)
    loss.register_hook(lambda grad: grad * 0.5)
    return after_backward(model, loss), x.grad, seen


@habit
def gradients_of_inputs(wrap: Wrap) -> Any:
    model = net()
    x, y = batch()
    x.requires_grad_()
    step = wrap(loss_of(model))
    (grad,) = torch.autograd.grad(step(x, y), x)
    with torch.no_grad():
        x += 0.1 * grad.sign()
    return grad, x.detach(), after_backward(model, step(x, y)), x.grad


@habit
def clipped_gradients(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    loss = step(*batch())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss.detach(), norm, state(model)


# Precision


@quick
def autocast_to_bfloat16_outside(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(*batch(48))
    return after_backward(model, loss)


@habit
def autocast_to_bfloat16_inside(wrap: Wrap) -> Any:
    model = net()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(logits.float(), y)

    step = wrap(mixed)
    return [after_backward(model, step(*batch(48))) for _ in range(2)]


@habit
def gradient_scaler(wrap: Wrap) -> Any:
    """A scale that is too large at first: one step is skipped."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    step, optimizer = wrap(loss_of(model)), torch.optim.SGD(model.parameters(), lr=0.1)
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


@habit
def model_in_bfloat16(wrap: Wrap) -> Any:
    model = net().bfloat16()
    x, y = batch()
    return after_backward(model, wrap(loss_of(model))(x.bfloat16(), y))


@habit
def model_in_float64(wrap: Wrap) -> Any:
    model = net().double()
    x, y = batch()
    return after_backward(model, wrap(loss_of(model))(x.double(), y))


# What a step takes, holds and returns


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 16), net()[:4], nn.Linear(32, 16)
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.head(self.body(self.embedding(tokens))))


@quick
def tied_weights(wrap: Wrap) -> Any:
    model = _Tied()
    tokens, y = torch.randint(11, (12,)), torch.randint(11, (12,))
    return after_backward(model, wrap(loss_of(model))(tokens, y))


@quick
def several_forwards_then_backwards(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    first, second, third = (step(*batch()) for _ in range(3))
    return after_backward(model, second, third, first)


@habit
def siamese_branches_in_one_backward(wrap: Wrap) -> Any:
    """A compiled module called twice, the loss outside."""
    model = net()
    shared = wrap(model)
    a, b = shared(batch()[0]), shared(batch()[0])
    return after_backward(model, (a - b).square().mean())


@quick
def tied_weights_in_two_calls_of_one_backward(wrap: Wrap) -> Any:
    """A preference for one text over another: each call adds to the tied weight twice."""
    embedding, body = nn.Embedding(16, 16), nn.Linear(16, 16)

    def likelihood(text: Tensor) -> Tensor:
        logits = F.linear(torch.tanh(body(embedding(text))), embedding.weight)
        return -F.cross_entropy(logits[:-1], text[1:])

    step = wrap(likelihood)
    chosen, rejected = torch.arange(12) % 5, torch.arange(12) % 7
    loss = -F.logsigmoid(step(chosen) - step(rejected))
    return after_backward(nn.ModuleList([embedding, body]), loss)


@quick
def several_losses(wrap: Wrap) -> Any:
    model = net()

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


@dataclasses.dataclass
class _Result:
    loss: Tensor
    logits: Tensor | None = None
    note: str = ""


class _Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclasses.dataclass
class _Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


def _returning(make: Callable[..., Any], read: Callable[[Any], Any]) -> Habit:
    def function(wrap: Wrap) -> Any:
        model = net()

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


HABITS |= {
    "results in a dict": (_returning(dict, lambda result: (result["loss"], result["logits"])), False),
    "results in a dataclass": (_returning(_Result, _fields), False),
    "results in a named tuple": (_returning(_Named, _fields), False),
    "results in a ModelOutput": (_returning(_Output, _fields), True),
    "results in nested lists": (
        _returning(
            lambda loss, logits: [None, ["text", 3, loss], {"logits": [logits]}], lambda r: (r[1][2], r[2]["logits"][0])
        ),
        False,
    ),
}


@habit
def arguments_of_every_kind(wrap: Wrap) -> Any:
    model = net()

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


@habit
def a_backward_from_results_that_are_no_scalar(wrap: Wrap) -> Any:
    model = net()
    logits = wrap(model)(batch()[0])
    logits.backward(torch.randn(12, 4))
    return logits.detach(), state(model)


@habit
def detached_results_and_parts(wrap: Wrap) -> Any:
    """A generator and a critic: each step trains one of the two."""
    generator, critic = nn.Sequential(net(), nn.Linear(4, 16)), net()
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


@quick
def checkpointed_parts(wrap: Wrap) -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(model[2:5], model[:2](x), use_reentrant=False)
        return F.cross_entropy(checkpoint(model[5:], hidden, use_reentrant=False), y)

    compiled = wrap(step)
    return [after_backward(model, compiled(*batch())) for _ in range(2)]


class _Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.body, self.dropout = nn.Linear(16, 48), net(), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(3, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.body(y.transpose(1, 2).reshape(12, 16))


@habit
def attention_with_dropout(wrap: Wrap) -> Any:
    model = _Attending(0.3)
    return after_backward(model, wrap(loss_of(model))(*batch()))


@habit
def attention_with_dropout_under_autocast(wrap: Wrap) -> Any:
    """Made of several ops on the CPU, whose backward is traced; under autocast it would be another one."""
    model = _Attending(0.3)
    step = wrap(loss_of(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(*batch())
    return after_backward(model, loss)


@habit
def attention_without_dropout(wrap: Wrap) -> Any:
    model = _Attending(0.0)
    return after_backward(model, wrap(loss_of(model))(*batch()))


@habit
def multi_head_attention_module(wrap: Wrap) -> Any:
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    x = torch.randn(3, 5, 16)
    return after_backward(model, wrap(lambda x: model(x).square().mean())(x))


@habit
def weight_norm(wrap: Wrap) -> Any:
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    step = wrap(loss_of(model))
    return [after_backward(model, step(*batch())) for _ in range(2)]


@habit
def spectral_norm(wrap: Wrap) -> Any:
    """Its buffers change at each forward."""
    model = net()
    nn.utils.parametrizations.spectral_norm(model[4])
    step = wrap(loss_of(model))
    return [after_backward(model, step(*batch())) for _ in range(2)]


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


@quick
def custom_autograd_function(wrap: Wrap) -> Any:
    model = net()
    step = wrap(lambda x, y: F.cross_entropy(model[4:](_Straight.apply(model[:4](x), 0.5)), y))
    return after_backward(model, step(*batch()))


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


@habit
def custom_op(wrap: Wrap) -> Any:
    model = net()
    step = wrap(lambda x, y: F.cross_entropy(model[4:](_cube(model[:4](x))), y))
    return after_backward(model, step(*batch()))


@torch.library.custom_op("checkmate_habits::count_", mutates_args={"counter"})
def _count(counter: Tensor, x: Tensor) -> None:
    counter += (x > 0).sum()


@habit
def custom_op_that_writes(wrap: Wrap) -> Any:
    """It counts, once a step, and is not run again."""
    model, counter = net(), torch.zeros((), dtype=torch.int64)

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:4](x)
        _count(counter, hidden.detach())
        return F.cross_entropy(model[4:](hidden), y)

    compiled = wrap(step)
    return [(after_backward(model, compiled(*batch())), counter.clone()) for _ in range(2)]


@habit
def in_place_ops_and_views(wrap: Wrap) -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:4](x).clone()
        hidden[:, ::2] *= 2
        hidden.view(-1)[3:7].add_(1.0)
        hidden = hidden.relu_().index_add(0, torch.tensor([0, 0, 1]), hidden[2:5])
        return F.cross_entropy(model[4:](hidden), y)

    return after_backward(model, wrap(step)(*batch()))


@habit
def random_numbers_within_the_step(wrap: Wrap) -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x[torch.randperm(len(x))] + 0.1 * torch.randn_like(x)
        hidden = F.rrelu(F.alpha_dropout(model[:4](x), 0.1, training=True), training=True)
        hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.9)) + torch.empty_like(hidden).uniform_(-0.1, 0.1)
        return F.cross_entropy(model[4:](hidden), y)

    compiled = wrap(step)
    return [after_backward(model, compiled(*batch())) for _ in range(2)]


@habit
def compiled_within_compiled(wrap: Wrap) -> Any:
    """The inner ones become part of the outer one's graph."""
    model = net()
    inner, middle = (part if wrap is _plain else _compiled(part) for part in (model[:4], lambda x: model[4:6](x)))
    return after_backward(model, wrap(lambda x, y: F.cross_entropy(model[6](middle(inner(x))), y))(*batch()))


@habit
def torch_compile_within_the_step(wrap: Wrap) -> Any:
    model = net()
    body = torch.compile(model[:4], backend="eager")
    return after_backward(model, wrap(lambda x, y: F.cross_entropy(model[4:](body(x)), y))(*batch()))


@habit
def gradients_off_within_the_step(wrap: Wrap) -> Any:
    """A teacher without gradients beside the student."""
    model, teacher = net(), net()

    def distill(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        return F.cross_entropy(model(x), target)

    return after_backward(model, wrap(distill)(*batch())), state(teacher)


@habit
def tensors_saved_on_the_cpu(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    with torch.autograd.graph.save_on_cpu():
        loss = step(*batch())
    return after_backward(model, loss)


# Around a step


@habit
def evaluation_between_steps(wrap: Wrap) -> Any:
    model = net()
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


@habit
def deep_copies(wrap: Wrap) -> Any:
    model = net()
    compiled = wrap(model)
    left = after_backward(model, compiled(batch()[0]).square().mean())
    twin = copy.deepcopy(compiled)
    left += after_backward(twin, twin(batch()[0]).square().mean())
    return left, state(model)


@quick
def state_dict_and_back(wrap: Wrap) -> Any:
    model, other = net(), net()
    compiled, optimizer = wrap(model), torch.optim.AdamW(model.parameters())
    left = after_backward(model, compiled(batch()[0]).square().mean())
    optimizer.step()
    kept = copy.deepcopy((compiled.state_dict(), optimizer.state_dict()))
    compiled.load_state_dict(other.state_dict())
    left += after_backward(model, compiled(batch()[0]).square().mean())
    compiled.load_state_dict(kept[0], assign=True)  # other tensors in the place of the parameters
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(kept[1])
    left += after_backward(model, compiled(batch()[0]).square().mean())
    optimizer.step()
    return left, state(model), list(kept[0])


@habit
def the_model_saved_and_loaded(wrap: Wrap) -> Any:
    model = net()
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


def _with_optimizers(wrap: Wrap) -> Any:
    """One compiled step serves them all in turn."""
    model, left = net(), []
    step = wrap(loss_of(model))
    for make in OPTIMIZERS.values():
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            left += after_backward(model, step(*batch()))
            optimizer.step()
    return left, state(model)


HABITS["optimizers, foreach and fused"] = _with_optimizers, True


@habit
def optimizer_with_a_closure(wrap: Wrap) -> Any:
    model = net()
    step, optimizer, (x, y) = wrap(loss_of(model)), torch.optim.LBFGS(model.parameters(), max_iter=3), batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = step(x, y)
        loss.backward()
        return loss

    return optimizer.step(closure).detach(), state(model)


@habit
def optimizers_in_the_backward(wrap: Wrap) -> Any:
    """Each parameter is updated as soon as its gradient is there."""
    model = net()
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], 0.1)

        def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    step = wrap(loss_of(model))
    return [after_backward(model, step(*batch())) for _ in range(3)]


@habit
def averaged_copies(wrap: Wrap) -> Any:
    model = net()
    step, optimizer = wrap(loss_of(model)), torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
    for _ in range(3):
        optimizer.zero_grad()
        step(*batch()).backward()
        optimizer.step()
        average.update_parameters(model)
    average.eval()
    return state(model), state(average), average(batch()[0]).detach()


@habit
def learning_rate_schedulers(wrap: Wrap) -> Any:
    model = net()
    step, optimizer = wrap(loss_of(model)), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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


@habit
def parts_replaced_between_steps(wrap: Wrap) -> Any:
    """A new head of another width; weights written through ``.data``."""
    model = net()
    step = wrap(loss_of(model))
    left = after_backward(model, step(*batch()))
    model[6] = nn.Linear(32, 7)
    model[0].weight.data.mul_(0.5)
    left += after_backward(model, step(*batch()))
    model[3].p = 0.5
    return left, after_backward(model, step(*batch()))


@habit
def anomaly_detection(wrap: Wrap) -> Any:
    model = net()
    step = wrap(loss_of(model))
    with torch.autograd.detect_anomaly(check_nan=True):
        return after_backward(model, step(*batch()))


@habit
def images_with_channels_last(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(8, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    step = wrap(lambda x: model(x).square().mean())
    return [after_backward(model, step(x)) for _ in range(2)]


@pytest.mark.parametrize("name", [name if fast else slow(name) for name, (_, fast) in HABITS.items()])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_bits_of_plain_pytorch(name: str) -> None:
    assert_same(HABITS[name][0])


# What is refused, with what to do instead


def _backward_within() -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return step


def _optimizer_within() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        return F.cross_entropy(model(x), y)

    return step


def _gradient_within() -> Any:
    model = net()

    def penalty(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)
        return grad.norm()

    return penalty


def _retained_gradient_within() -> Any:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = model[:4](x)
        hidden.retain_grad()
        return F.cross_entropy(model[4:](hidden), y)

    return step


def _own_generator() -> Any:
    model, mine = net(), torch.Generator()
    return lambda x, y: F.cross_entropy(model(x + torch.randn(x.shape, generator=mine)), y)


def _random_numbers_of_python() -> Any:
    model = net()
    return lambda x, y: F.cross_entropy(model(x * 2 if random.gauss(0, 1) < 0.5 else x), y)


def _computing_with_random_numbers_of_python() -> Any:
    model = net()
    return lambda x, y: F.cross_entropy(model(x ** random.randint(2, 3)), y)


def _sparse_gradients() -> Any:
    model, embedding = net(), nn.Embedding(4, 16, sparse=True)
    return lambda x, y: F.cross_entropy(model(embedding(y)), y)


def _scripted_module() -> Any:
    model = torch.jit.script(net())
    return lambda x, y: F.cross_entropy(model(x), y)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "backward within the step": (_backward_within, r"loss\.backward\(\)\nReturn the loss, and call backward"),
    "optimizer within the step": (_optimizer_within, "optimizer outside"),
    "gradient penalty within the step": (
        _gradient_within,
        r"autograd\.grad\(\) on it outside|pass it in with requires_grad_",
    ),
    "gradient retained within the step": (_retained_gradient_within, r"tensor\.register_hook"),
    "a generator of one's own": (_own_generator, "global generator"),
    "random numbers of Python": (_random_numbers_of_python, "Draw with torch"),
    "computing with random numbers of Python": (_computing_with_random_numbers_of_python, "Draw with torch"),
    "sparse gradients": (_sparse_gradients, "sparse=False"),
    "modules of torch.jit": (_scripted_module, "original eager nn.Module"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_with_what_to_do_instead(name: str) -> None:
    make, words = REFUSED[name]
    step = make()
    with pytest.raises(checkmate.Unsupported, match=words) as caught:
        _compiled(step)(*batch())
    assert "test_habits.py" in str(caught.value)


@pytest.mark.parametrize("hold", [lambda model: model, lambda model: lambda x: model(x).square()])
def test_lazy_modules_are_to_be_called_once_before(hold: Callable[[nn.Module], Any]) -> None:
    """Capture gives back the random numbers that it draws: later ones would be those of the parameters again."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 4))
    x, _ = batch()
    with pytest.raises(checkmate.Unsupported, match=r"0\.weight .*Call it once"):
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
    found, expected = train(model, step), train(twin, loss_of(twin))
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
