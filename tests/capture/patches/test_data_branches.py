"""Questions that a step asks of its tensors are answered before it runs: each set of answers has its own plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.capture.guards import DataGuards, GuardFailed
from checkmate.errors import Unsupported
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_each_as_plain, assert_refused, compiled
from tests.support.sampling import long
from tests.support.stepping import assert_same, train

Step = Callable[..., Tensor]
UP, DOWN = torch.linspace(0.5, 3, 8), torch.linspace(-3, -0.5, 8)
weight = torch.linspace(1, 2, 8).requires_grad_()
pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")


def _weighed(asking: Step) -> Step:
    """The step whose loss is the weighed sum of what a function gives that asks of its input."""
    return lambda x: (weight * asking(x)).sum()


class _Ways:
    """Ways to ask that take a few lines."""

    def repeated(x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x

    def counted(x: Tensor) -> Tensor:
        for _ in range((x > 0).sum().item() // 4):
            x = x.cos()
        return x

    def written(x: Tensor) -> Tensor:
        y = x.clone()
        y[0] = 5
        y.mul_(2)
        return y.cos() if (y > 0).all() else y

    def asserted(x: Tensor) -> Tensor:
        assert (x < 4).all(), "too large"
        torch._check_tensor_all(x < 4, lambda: "too large")
        torch._assert((x < 4).all(), "too large")
        return x

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(x.bfloat16(), x.bfloat16() / 3)  # in float32
            return x.cos() if loss.float() != loss.bfloat16() else x

    @torch.amp.autocast("cuda", enabled=False)
    def doubled(x: Tensor) -> Tensor:
        """Decorated as samplers of diffusion are, for a device that is not here."""
        return x * 2


LAYERS = [nn.Linear(8, 8) for _ in range(2)]


def layer_drop(p: float) -> Step:
    """Layers that are skipped at random, as in wav2vec and BART."""

    def step(x: Tensor) -> Tensor:
        for layer in LAYERS:
            x = x if torch.rand([]) < p else layer(F.dropout(x, 0.2)).sin()
        return x

    return step


ASKING: dict[str, Step] = {
    "not": lambda x: x.cos() if not (x > 0).all() else x,
    "and": lambda x: x.cos() if x[0] > 0 and x[1] > 0 else x,
    "or the value": lambda x: x * ((x[0] > 0) or x[1]),
    "bool": lambda x: x.cos() * bool((x > 0).any()) + x,
    "in": lambda x: x.cos() if 3.0 in x else x,
    "a number": lambda x: x.cos() if x.sum().item() > 0.25 else x,
    "float": lambda x: x.cos() if float(x[0]) > 0 else x,
    "int": lambda x: x.cos() if int(x[0]) == 0 else x,
    "numbers": lambda x: x.cos() if max((x > 0).long().tolist()) else x,
    "torch.equal": lambda x: x.cos() if torch.equal(x, x.abs()) else x,  # noqa: TID251
    "Tensor.equal": lambda x: x.cos() if x.equal(x.abs()) else x,
    "torch.allclose": lambda x: x.cos() if torch.allclose(x, x.abs()) else x,  # noqa: TID251
    "a parameter": lambda x: x.cos() if weight.max() > 1.5 else x,
    "while": _Ways.repeated,
    "for": _Ways.counted,
    "written before": _Ways.written,
    "assert": _Ways.asserted,
    "autocast": _Ways.autocast,
    "a mask": lambda x: x.masked_fill(x > 1, 0) if (x > 1).any() else x,
    **{f"a draw below {p!r}": layer_drop(p) for p in (0, 0.0, 1.0)},  # which leaves no doubt
    "behind autocast": lambda x: (lambda y: y.cos() if y.max() > 0 else y)(_Ways.doubled(x)),
}


@pytest.mark.parametrize("name", ASKING)
def test_each_way_to_ask(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * ASKING[name](x)).sin().sum()

    one_answer = name in ("assert", "a parameter", "autocast", "while") or name.startswith("a draw")
    assert_each_as_plain(step, (UP,), (DOWN,), (UP,), plans=1 if one_answer else 2, leaves=[weight])


WHOLE = torch.zeros(4)
PART = WHOLE[2:]  # a copy of each would be written to apart
STATISTICS = (torch.zeros(2), torch.ones(2))


def _overwritten(x: Tensor) -> Tensor:
    PART.add_(1)
    return x.cos() if (WHOLE > 0).all() else x


def _normed(x: Tensor) -> Tensor:
    return F.batch_norm(x.view(4, 2), *STATISTICS, training=True).view(8)


REFUSED: dict[str, tuple[Step, str]] = {
    "product": (lambda x: x.cos() if (x.view(2, 4) @ x.view(4, 2)).sum() > 0 else x, "aten::mm, which costs too much"),
    "overwritten": (_overwritten, "overwritten before"),
    "by batch norm": (lambda x: _normed(x) * (2 if STATISTICS[0].sum() > 0 else 1), "overwritten before"),
    "of batch norm": (lambda x: (y := _normed(x)) * (2 if y[0] > 0 else 1), "batch_norm, which costs too much"),
    "checkpointed": (
        lambda x: checkpoint(_cosine_if_positive, x, use_reentrant=False),
        "within a checkpointed part",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_before_is_refused_and_nothing_changes(name: str) -> None:
    asking, words = REFUSED[name]
    x, random_state = UP.clone(), torch.get_rng_state()
    said = assert_refused(_weighed(asking), x, words=words)
    assert all(words in said for words in ("test_data_branches.py", "torch.where"))
    left = x, torch.get_rng_state(), STATISTICS[0], WHOLE
    assert_same_bits(left, (UP, random_state, torch.zeros(2), torch.zeros(4)))


@pytest.mark.parametrize("strides", [(4, 1), (1, 2), (8, 2)], ids=["contiguous", "transposed", "with gaps"])
def test_what_the_step_has_written_to_an_input_before_it_asks(strides: tuple[int, int]) -> None:
    def step(x: Tensor) -> Tensor:
        x[:1].add_(1)
        x.mul_(2)
        y = x.view_as(x).masked_fill_(x > 5, 0)
        y = y.cos() if (x > 0).all() else y
        x.sub_(1)
        return (weight * (y.flatten() if x.sum() > 0 else y.sin().flatten())).sum()

    run = compiled(step)
    for given, plans in ((UP, 1), (DOWN, 2), (UP, 2)):
        results = []
        for one in (step, run):
            x = torch.empty_strided((2, 4), strides).copy_(given.view(2, 4))
            results.append((loss := one(x), torch.autograd.grad(loss, weight), x))
        assert_same_bits(*results)
        assert len(run.plans) == plans


def test_a_buffer_that_counts_is_asked_after_it_was_counted_up() -> None:
    def step(x: Tensor) -> Tensor:
        calls.add_(1)
        return (weight * (x.cos() if calls > 2 else x)).sum()

    calls, run = torch.zeros(()), compiled(step)
    for call in range(1, 5):
        assert_same_bits((run(UP), calls), ((weight * (UP.cos() if call > 2 else UP)).sum(), torch.tensor(float(call))))
    assert len(run.plans) == 2


def test_without_data_there_is_no_answer_but_to_what_needs_none() -> None:
    def step(x: Tensor, asked: Tensor | None = None) -> Tensor:
        known = torch.arange(4)
        x = x.cos() if (known > 2).any() else x
        return (x if asked is None or asked.all() else x.sin()).sum()

    with torch.device("meta"):
        x, asked = torch.ones(8, requires_grad=True), torch.ones(8)
    ops = checkmate.trace(step, x, profile="roofline:h100").graph.ops
    assert "aten.cos.default" in {op.target for op in ops}
    with pytest.raises(Unsupported, match="no data here"):
        checkmate.trace(step, x, asked, profile="roofline:h100")


class _Writing(nn.Linear):
    """Writes to a buffer and draws, before and after it asks."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.add_(1)
        h = F.dropout(super().forward(x), 0.5)
        if mask.any():
            h = h.masked_fill(mask, 0)
        return F.dropout(h, 0.5).square().mean()


@pytest.mark.slow
def test_another_answer_comes_before_anything_is_written_or_drawn() -> None:
    some, module = torch.arange(8) > 5, _Writing()
    plain = copy.deepcopy(module)
    run = compiled(module)
    for mask in (some, ~some & some, some):
        assert_same(train(module, run, (UP, mask), steps=2), train(plain, plain, (UP, mask), steps=2))


def test_the_bytes_of_asking_are_within_the_predicted_peak_or_refused() -> None:
    def step(x: Tensor) -> Tensor:
        scale = 2 if (x.double() * 3).sum() > 0 else 3
        return (weight * scale).sum() * x[0]

    x = torch.ones(5000)
    run = compiled(step, profile="measure")
    run(x).backward()
    (plan,) = run.plans
    use = measure_peak(lambda: run(x).backward())
    assert plan.problem.resident + use.peak == plan.peak
    assert use.peak >= 2 * 8 * x.numel()
    words = r"test_data_branches\.py:\d+.*pass the answer in"
    assert_refused(step, x, words=words, budget=plan.problem.resident + 5000, profile="measure")


def test_too_many_answers() -> None:
    run = compiled(lambda x: (weight * x).sum() * len(range(int(x[0]))), max_plans=2)
    for first in (0, 1):
        run(torch.full((8,), float(first)))
    with pytest.raises(Unsupported, match=r"asks for \(.*The last ones: 0, 1, 2\.\nCompute without asking"):
        run(torch.full((8,), 2.0))
    run(torch.zeros(8))
    assert len(run.plans) == 2


def test_by_its_name_a_backend_says_that_it_has_one_answer(found_by_name: None) -> None:
    options = {"budget": "1 MB", "profile": "roofline:h100"}
    step = _weighed(_cosine_if_positive)
    run = torch.compile(step, backend="checkmate", options=options, dynamic=False)
    assert_as_plain(step, UP, run=run, leaves=[weight])
    with pytest.raises(GuardFailed, match=r"was True when .* False now.*checkmate\.compile"):
        run(DOWN)
    assert_as_plain(step, UP, run=run, leaves=[weight])


def _cosine_if_positive(x: Tensor) -> Tensor:
    return x.cos() if (x > 0).all() else x


def test_other_backends_are_not_affected() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent"):
        torch.compile(_cosine_if_positive, backend="eager", fullgraph=True)(UP)
    assert_same_bits(torch.compile(_cosine_if_positive, backend="eager")(UP), UP.cos())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", long("Qwen3")])
def test_a_padding_mask_is_dropped_as_in_plain_pytorch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    small: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    other = {} if name == "Bert" else {"num_key_value_heads": 1, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**small, num_hidden_layers=1, **other)
    model = getattr(transformers, f"{name}ForMaskedLM" if name == "Bert" else f"{name}ForCausalLM")(config)
    tokens, ones = torch.randint(1, 11, (4, 8)), torch.ones(4, 8, dtype=torch.long)

    def step(mask: Tensor) -> Tensor:
        return model(tokens, attention_mask=mask, labels=tokens).loss

    run = compiled(step, budget="1 GB", profile="measure")
    padded = torch.ones_like(ones)
    padded[0, 5:] = 0
    for mask, plans in ((ones, 1), (padded, 2), (ones, 2), (padded.flip(0), 2)):
        assert_as_plain(step, mask, run=run, leaves=[*model.parameters()], seed=1)
        assert len(run.plans) == plans
    assert not caplog.records


def test_a_layer_is_left_out_by_a_draw_of_pythons_generator() -> None:
    """LayerDrop. A capture that turns out to be for another draw has drawn; the next one starts from the same state."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = x if random.uniform(0, 1) < 0.4 else layer(x).sin()
        return (weight.sum() * x).sum()

    run = compiled(step, profile="measure")
    for seed in range(6):
        assert_as_plain(step, torch.linspace(-1, 1, 256).view(4, 64), run=run, leaves=[weight], seed=seed)
    assert len(run.plans) > 2


def test_other_draws_of_torch_are_refused() -> None:
    before = torch.get_rng_state()
    for asking in (layer_drop(0.5), lambda x: x * [1, 2][int(torch.rand(1).item() * 2)]):
        assert_refused(_weighed(asking), UP, words=r"random numbers that the step draws[\s\S]* layerdrop=0")
        assert_same_bits(torch.get_rng_state(), before)


def test_what_cannot_be_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor) -> Tensor:
        y = x.cos() if x[0] > 0 else x
        return (weight * (y.sin() if x[1] > 0 else y)).sum()

    run, asked, plain = compiled(step), list[DataGuards](), DataGuards.before
    monkeypatch.setattr(DataGuards, "before", lambda self, inputs: (asked.append(self), plain(self, inputs))[1])

    def answers(*signs: bool) -> list[tuple[bool | int, ...]]:
        del asked[:]
        x = torch.where(torch.tensor([*signs, *[True] * 6]), UP, DOWN)
        assert_as_plain(step, x, run=run, leaves=[weight])
        return [one.answers for one in asked]

    for subset in ((False, True), (True, False), (True, True)):
        answers(*subset)
    assert len(run.plans) == 3
    assert answers(True, True) == [(True, True)]
    assert answers(False, True) == [(True, True), (False, True)]  # after one question (True, False) is out, too
    assert answers(True, False) == [(False, True), (True, True), (True, False)]


def test_another_answer_leaves_autocast() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (weight * x).sum() * (2 if x.sum() > 0 else 3)

    other = torch.ones(2, 2, requires_grad=True)

    def converted() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (torch.ones(2, 2) @ other).sum().item()

    run = compiled(step)
    run(UP)
    run(DOWN)
    assert not torch.is_autocast_enabled("cpu")
    before = converted()
    other.data.mul_(2)
    assert converted() == 2 * before, "autocast computes with a weight as it was"


@pytest.mark.parametrize("peak_of", ["forward", "backward"])
def test_draws_of_python_are_held_until_the_forward_returns(peak_of: str) -> None:
    layers, weights = range(3), nn.Parameter(torch.randn(64, 64))

    def step(x: Tensor) -> Tensor:
        for _ in layers:
            x = x if random.uniform(0, 1) < 0 else x @ weights
        return x.square().sum() if peak_of == "backward" else (torch.cat([x.detach()] * 9).sum() + x.sum())

    run, x = compiled(step, profile="measure"), torch.randn(128, 64)
    run(x)
    (plan,) = run.plans
    assert {op.name for op in plan.problem.graph.ops if op.target == "autograd"} >= {"handed_in_numbers", "return"}
    taken = measure_peak(lambda: torch.autograd.grad(run(x), weights)).peak
    assert taken == plan.peak - plan.problem.resident
