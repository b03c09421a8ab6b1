"""A question that depends on random draws is answered beforehand, by making all draws that come before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.earlier_draws import _AS_MANY_WHATEVER_THE_VALUES
from checkmate.capture.patches import branches  # noqa: F401  # has Dynamo ask
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.capture.patches.recurrent import with_recurrent_modules
from checkmate.capture.questions import AnotherAnswer, Questions, asking_first, taken_out
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

Step = Callable[..., Tensor]
SMALL = {"layers": 1, "attention_heads": 2, "ffn_dim": 16, "layerdrop": 0.5}
X = torch.linspace(-1, 1, 2 * 4 * 8).view(2, 4, 8)


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Any:
    yield
    torch._dynamo.reset()


def _ask_first(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return asking_first(module.forward, taken_out(module))


_ask_first.answer = Answer()


def _captured(step: Step) -> Step:
    """The step, its questions asked before its graph runs as it is."""
    run: Step = with_recurrent_modules(torch.compile(step, backend=_ask_first, fullgraph=True, dynamic=False))
    return run


def _assert_known(step: Step, *batch: Tensor) -> None:
    """Captured at each seed, the answers are those of plain PyTorch; and asking changes nothing."""
    results = set()
    for seed in range(2):
        torch.manual_seed(seed)
        expected = step(*[t.clone() for t in batch])
        then = torch.get_rng_state()
        torch.manual_seed(seed)
        torch._dynamo.reset()
        compiled = _captured(step)
        assert_same_bits(compiled(*[t.clone() for t in batch]), expected)
        assert_same_bits(torch.get_rng_state(), then)
        results.add(expected.sum().item())
        torch.manual_seed(seed + 10)
        then = torch.get_rng_state()
        with pytest.raises(AnotherAnswer):
            compiled(*batch)
        assert_same_bits(torch.get_rng_state(), then)
    assert len(results) == 2


def _number() -> int:
    """A draw, as a number that Python needs: another draw is another number."""
    return len(range(int(torch.rand(()) * 2**20)))


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.dropout(x) * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


def _in_place(x: Tensor) -> Tensor:
    return F.dropout(x.clone(), 0.5, True, True)


def _under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.dropout(x @ x.mT).float()


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.dropout(x)


def _drawn_twice(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x) * _number())


torch.manual_seed(0)
weight = torch.ones(8, requires_grad=True)
attention, lstm = nn.MultiheadAttention(8, 2, dropout=0.5), nn.LSTM(8, 8, num_layers=3, dropout=0.5)
EARLIER: dict[str, Step] = {
    "nothing": lambda x: x,
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of float64": lambda x: F.dropout(x.double()),
    "dropout of bfloat16": lambda x: F.dropout(x.bfloat16()),
    "dropout in place": _in_place,
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of no elements": lambda x: F.dropout(x[:0]).sum() + x,
    "dropout that nobody reads": lambda x: (F.dropout(x), x)[1],
    "dropout of a transpose": lambda x: F.dropout(x.mT),
    "channels": lambda x: F.dropout1d(x),
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(x, x, x),
    "multi-head attention": lambda x: attention(x, x, x)[0],
    "LSTM": lambda x: lstm(x)[0],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.abs()),
    "bernoulli of one number": lambda x: torch.bernoulli(torch.full((1,), 0.5).expand(8)),
    "in place by tensors": lambda x: x.clone().bernoulli_(x.abs()),
    "normal by tensors": lambda x: torch.normal(x, x.abs()),
    "normal": lambda x: torch.randn_like(x),
    "normal of a transpose": lambda x: torch.randn_like(x.mT),
    "few normal": lambda x: torch.randn(3),
    "multinomial": lambda x: torch.multinomial(x[0].abs(), 3),
    "multinomial, replaced": lambda x: torch.multinomial(x[0].abs(), 3, replacement=True),
    "a permutation": lambda x: torch.randperm(7),
    "integers": lambda x: torch.randint(0, 2**40, (3,)),
    "exponential": lambda x: x.clone().exponential_(),
    "geometric": lambda x: x.clone().geometric_(0.2),
    "cauchy": lambda x: x.clone().cauchy_(),
    "log-normal": lambda x: x.clone().log_normal_(),
    "a checkpointed part": lambda x: checkpoint(lambda x: F.dropout(x), x, use_reentrant=False),
    "a function of its own": lambda x: _Noisy.apply(x * weight).detach(),
    "autocast": _under_autocast,
    "without gradients": _without_gradients,
    "a question before": _drawn_twice,
    "a write and a number": lambda x: x.clone().mul_(2) * (x > 0).sum().item(),
}


ALONE = ["a question before"], ["a write and a number"]  # what each of these asks is asked first
TOGETHER = [name for name in EARLIER if [name] not in ALONE]


@pytest.mark.parametrize("names", [*(TOGETHER[i::7] for i in range(7)), *ALONE], ids=", ".join)
def test_what_is_drawn_before(names: list[str]) -> None:
    def step(x: Tensor) -> Tensor:
        y = torch.zeros(())
        for name in names:
            y = y + EARLIER[name](x).sum()
        return x * _number() + y + F.dropout(x)

    _assert_known(step, X)


def test_what_is_asked_may_depend_on_data_as_well() -> None:
    def step(x: Tensor) -> Tensor:
        noise = torch.empty(2, 4, 8).normal_()
        noise.add_(x.abs())
        return x * len(range(2**20 + int((F.dropout(x, 0.5) * noise).sum() * 2**15)))

    _assert_known(step, X)


def test_draws_that_are_asked_for_need_not_be_of_a_known_number() -> None:
    def step(x: Tensor) -> Tensor:
        return x * len(range(int(torch.poisson(100 * x.abs()).sum())))

    _assert_known(step, X)


@pytest.mark.parametrize("values", [torch.ones(40, 7), torch.linspace(1e-6, 1, 280).view(40, 7)])
def test_as_many_numbers_whatever_the_values(values: Tensor) -> None:
    def left(draw: Callable[[Tensor], Any], x: Tensor) -> Tensor:
        torch.manual_seed(0)
        draw(x)
        return torch.get_rng_state()

    reading: dict[str, Callable[[Tensor], Any]] = {
        "bernoulli": torch.bernoulli,
        "multinomial": lambda x: torch.multinomial(x, 3),
        "multinomial, replaced": lambda x: torch.multinomial(x, 3, replacement=True),
        "normal": lambda x: torch.normal(x, x),
        "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    }
    assert {name.partition(",")[0] for name in reading} <= _AS_MANY_WHATEVER_THE_VALUES
    for draw in reading.values():
        assert_same_bits(left(draw, values), left(draw, values.flip(1)))
        assert_same_bits(left(draw, values), left(draw, torch.ones_like(values)))


def _by_each(x: Tensor) -> Tensor:
    return torch.vmap(lambda x: F.dropout(x), randomness="different")(x)


def _by_number(x: Tensor) -> Tensor:
    return torch.randint(0, (x > 0).sum().item(), (3,))


REFUSED: dict[str, tuple[Step, str]] = {
    "poisson": (lambda x: torch.poisson(x.abs()), r"poisson \(test_earlier_draws.py:\d+\) draws before it: how many"),
    "rrelu": (lambda x: F.rrelu(x, training=True), r"rrelu_with_noise \(test_earlier_draws.py:\d+\) draws before it"),
    "vmap": (_by_each, r"what .*batch_dim.* \(test_earlier_draws.py:\d+\) draws before it cannot be told"),
    "a number from data": (_by_number, r"what .*randint.* draws before it cannot be told"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_is_not_known_how_much_is_drawn_before(name: str) -> None:
    earlier, words = REFUSED[name]

    def step(x: Tensor) -> Tensor:
        return earlier(x).sum() + (x if torch.rand(()) < 0.5 else x.cos())

    before = torch.get_rng_state()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        _captured(step)(X)
    assert_same_bits(torch.get_rng_state(), before)


def test_another_answer_leaves_autocast() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x * _number()

    weight = torch.ones(2, 2, requires_grad=True)

    def converted() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.ones(2, 2) @ weight).sum().item()

    compiled = _captured(step)
    compiled(X)
    with pytest.raises(AnotherAnswer):
        compiled(X)
    assert not torch.is_autocast_enabled("cpu")
    before = converted()
    weight.data.mul_(2)
    assert converted() == 2 * before, "autocast computes with a weight as it was"


class LayerDrop(nn.Module):
    """Layers that are skipped at random, as in wav2vec and BART."""

    def __init__(self, layers: int, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.p, self.head = p, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        for layer in self.layers:
            if torch.rand([]) < self.p:
                continue
            x = x + F.dropout(layer(x).relu(), 0.2)
        return self.head(F.dropout(x, 0.1)).square().mean()


def _trained(module: nn.Module, step: Step, seed: int, calls: int = 2) -> list[Tensor | None]:
    torch.manual_seed(seed)
    module.zero_grad()
    losses = []
    for _ in range(calls):
        loss = step(X)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in module.parameters()), torch.get_rng_state()]


def _assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a is b is None or (a is not None and b is not None and same_bits(a, b))


def _of(module: LayerDrop, seed: int) -> tuple[bool, ...]:
    """The layers that a step from this seed skips."""
    torch.manual_seed(seed)
    skipped = []
    F.dropout(X, 0.1)
    for _ in module.layers:
        skipped.append(bool(torch.rand([]) < module.p))
        if not skipped[-1]:
            F.dropout(X, 0.2)
    return tuple(skipped)


@pytest.mark.slow
def test_layers_are_dropped_as_in_plain_pytorch_each_subset_by_its_plan() -> None:
    module = LayerDrop(2, 0.5)
    step = checkmate.compile(module, budget="1 MB", time_limit=1, profile="roofline:h100")
    first = {_of(module, seed): seed for seed in range(20)}
    assert len(first) == 4
    seeds = [*first.values()]
    for seed in (*seeds[:2], seeds[0], *seeds[2:], *seeds):
        expected = [p if p is None else p.clone() for p in _trained(module, module, seed, calls=3)]
        _assert_same(_trained(module, step, seed, calls=3), expected)
    assert len(step.plans) == 4


def test_subsets_are_never_too_many_and_what_cannot_be_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LayerDrop(2, 0.5)
    step = checkmate.compile(module, budget="1 MB", time_limit=1, profile="roofline:h100", max_plans=3)
    first = {_of(module, seed): seed for seed in range(20)}
    asked: list[Questions] = []
    plain = Questions.ask
    monkeypatch.setattr(Questions, "ask", lambda self, inputs: (asked.append(self), plain(self, inputs))[1])

    def answers(subset: tuple[bool, bool]) -> list[tuple[bool | int, ...]]:
        del asked[:]
        _assert_same(_trained(module, step, first[subset], 1), _trained(module, module, first[subset], 1))
        return [one.answers for one in asked]

    for subset in ((True, True), (True, False), (False, True)):
        answers(subset)
    assert len(step.plans) == 3
    assert answers((False, True)) == [(False, True)]
    assert answers((True, True)) == [(False, True), (True, False), (True, True)]
    assert answers((False, True)) == [(True, True), (False, True)]  # after its first question (True, False) is out, too
    answers((False, False))
    assert len(step.plans) == 3


def test_the_bytes_of_drawing_beforehand_are_within_the_predicted_peak() -> None:
    def step(x: Tensor) -> Tensor:
        noise = torch.randn(5000).sum()
        return (weight * (x if torch.rand(()) < 2 else x.cos())).sum() * noise

    compiled = checkmate.compile(step, budget="1 MB", time_limit=1)
    compiled(X[0, 0]).backward()
    (plan,) = compiled.plans
    use = measure_peak(lambda: compiled(X[0, 0]).backward())
    assert plan.problem.resident + use.peak == plan.peak
    assert use.peak >= 4 * 5000 + torch.get_rng_state().numel()
    with pytest.raises(checkmate.Unsupported, match="which is found out before the step runs"):
        checkmate.compile(step, budget=plan.peak - 1, time_limit=1)(X[0, 0])


@pytest.mark.slow
@pytest.mark.long
def test_m2m100_drops_layers_as_in_plain_pytorch() -> None:
    small = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in SMALL.items()}
    config = transformers.M2M100Config(vocab_size=11, d_model=16, max_position_embeddings=16, **small)
    torch.manual_seed(0)
    model, tokens = transformers.M2M100ForConditionalGeneration(config), torch.randint(3, 11, (2, 4))

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    compiled = checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")
    for seed in range(2):
        outcomes = []
        for run in (step, compiled):
            torch.manual_seed(seed)
            model.zero_grad()
            for _ in range(2):
                run(tokens).backward()
            outcomes.append([*(p.grad for p in model.parameters()), torch.get_rng_state()])
        _assert_same(*outcomes)
    assert len(compiled.plans) >= 2


def test_what_the_step_writes_to_may_be_asked_for_before_a_draw() -> None:
    """Both are answered in one program: the write on a copy, the draws in their order."""
    weight = torch.linspace(1, 2, 8).requires_grad_()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        labels.masked_fill_(labels == 3, -100)
        y = F.dropout(weight * x, 0.2) * (0.5 if (labels == -100).any() else 1.0)
        return (y.cos() if torch.rand([]) < 0.5 else y + labels).sum()

    def outcome(step: Step, seed: int, labels: Tensor) -> list[Tensor]:
        torch.manual_seed(seed)
        loss = step(X, labels)
        return [loss.detach(), *torch.autograd.grad(loss, weight), labels, torch.get_rng_state()]

    compiled = checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")
    for seed in range(4):
        for first in (0, 4):
            labels = torch.arange(first, first + 8)
            assert_same_bits(outcome(compiled, seed, labels.clone()), outcome(step, seed, labels.clone()))
    assert len(compiled.plans) == 4
