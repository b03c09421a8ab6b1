"""What a step asks of its tensors is decided before it runs: each set of answers has its plan, in the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.backends.tensor_state import same_bits
from checkmate.capture.guards import DataGuards, GuardFailed
from checkmate.memory import measure_peak
from tests.support.sampling import long
from tests.support.stepping import assert_same, train

Step = Callable[..., Tensor]
UP, DOWN = torch.linspace(0.5, 3, 8), torch.linspace(-3, -0.5, 8)
weight = torch.linspace(1, 2, 8).requires_grad_()


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Any:
    yield
    torch._dynamo.reset()


def _compiled(step: Step, **options: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", **{"time_limit": 1, "profile": "roofline:h100", **options})


def _outcome(step: Step, *batch: Tensor) -> tuple[Tensor, Tensor]:
    loss = step(*batch)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def _assert_same_bits(step: Step, compiled: Step, *batch: Tensor) -> None:
    for found, expected in zip(_outcome(compiled, *batch), _outcome(step, *batch), strict=True):
        assert same_bits(found, expected)


def test_another_answer_is_another_plan_and_an_earlier_one_its_own() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        if mask.any():
            x = x.masked_fill(mask, 0)
        return (weight * x).sin().sum()

    compiled, none, some = _compiled(step), torch.zeros(8, dtype=torch.bool), torch.arange(8) > 5
    for mask, plans in ((none, 1), (some, 2), (none, 2), (~some, 2)):
        _assert_same_bits(step, compiled, UP, mask)
        assert len(compiled.plans) == plans
    assert "masked_fill" in str([op.target for op in compiled.plans[1].problem.graph.ops])
    assert "masked_fill" not in str([op.target for op in compiled.plans[0].problem.graph.ops])


@torch.amp.autocast("cuda", enabled=False)
def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_question_behind_a_region_of_autocast_for_a_device_that_is_not_here() -> None:
    """As samplers of diffusion are decorated."""

    def step(x: Tensor) -> Tensor:
        x = _doubled(x)
        if x.max() > 0:
            x = x.cos()
        return (weight * x).sum()

    _assert_same_bits(step, _compiled(step), UP)


def _repeated(x: Tensor) -> Tensor:
    while x.abs().max() > 1:
        x = x / 2
    return x


def _counted(x: Tensor) -> Tensor:
    for _ in range((x > 0).sum().item() // 4):
        x = x.cos()
    return x


def _written(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 5
    y.mul_(2)
    return y.cos() if (y > 0).all() else y


def _asserted(x: Tensor) -> Tensor:
    assert (x < 4).all(), "too large"
    torch._check_tensor_all(x < 4, lambda: "too large")
    torch._assert((x < 4).all(), "too large")
    return x


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(x.bfloat16(), x.bfloat16() / 3)  # in float32
        return x.cos() if loss.float() != loss.bfloat16() else x


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
    "while": _repeated,
    "for": _counted,
    "written before": _written,
    "assert": _asserted,
    "autocast": _autocast,
}


@pytest.mark.parametrize("name", ASKING)
def test_each_way_to_ask(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * ASKING[name](x)).sin().sum()

    compiled = _compiled(step)
    for x in (UP, DOWN, UP):
        _assert_same_bits(step, compiled, x)
    assert len(compiled.plans) == (1 if name in ("assert", "a parameter", "autocast", "while") else 2)


def _product(x: Tensor) -> Tensor:
    return x.cos() if (x.view(2, 4) @ x.view(4, 2)).sum() > 0 else x


def _overwritten(x: Tensor) -> Tensor:
    PART.add_(1)
    return x.cos() if (WHOLE > 0).all() else x


def _overwritten_by_batch_norm(x: Tensor) -> Tensor:
    y = F.batch_norm(x.view(4, 2), mean := STATISTICS[0], STATISTICS[1], training=True).view(8)
    return y.cos() if mean.sum() > 0 else y


def _of_batch_norm(x: Tensor) -> Tensor:
    y = F.batch_norm(x.view(4, 2), *STATISTICS, training=True).view(8)
    return y.cos() if y[0] > 0 else y


def _checkpointed(x: Tensor) -> Any:
    return checkpoint(lambda x: x.cos() if (x > 0).all() else x, x, use_reentrant=False)


WHOLE = torch.zeros(4)
PART = WHOLE[2:]  # a copy of each would be written to apart
STATISTICS = (torch.zeros(2), torch.ones(2))
REFUSED: dict[str, tuple[Step, str]] = {
    "product": (_product, r"aten::mm, which costs too much"),
    "overwritten": (_overwritten, "overwritten before"),
    "by batch norm": (_overwritten_by_batch_norm, "overwritten before"),
    "of batch norm": (_of_batch_norm, "batch_norm, which costs too much"),
    "checkpointed": (_checkpointed, "within a checkpointed part"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_before_is_refused_and_nothing_changes(name: str) -> None:
    asking, words = REFUSED[name]
    x, random_state = UP.clone(), torch.get_rng_state()
    with pytest.raises(checkmate.Unsupported, match=words) as caught:
        _compiled(lambda x: (weight * asking(x)).sum())(x)
    assert "test_data_branches.py" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert same_bits(x, UP)
    assert same_bits(random_state, torch.get_rng_state())
    assert same_bits(STATISTICS[0], torch.zeros(2))
    assert same_bits(WHOLE, torch.zeros(4))


@pytest.mark.parametrize("strides", [(4, 1), (1, 2), (8, 2)], ids=["contiguous", "transposed", "with gaps"])
def test_what_the_step_has_written_to_an_input_before_it_asks(strides: tuple[int, int]) -> None:
    def step(x: Tensor) -> Tensor:
        x[:1].add_(1)
        x.mul_(2)
        y = x.view_as(x).masked_fill_(x > 5, 0)
        y = y.cos() if (x > 0).all() else y
        x.sub_(1)
        return (weight * (y.flatten() if x.sum() > 0 else y.sin().flatten())).sum()

    compiled = _compiled(step)
    for given, plans in ((UP, 1), (DOWN, 2), (UP, 2)):
        plain = torch.empty_strided((2, 4), strides).copy_(given.view(2, 4))
        found = torch.empty_strided((2, 4), strides).copy_(plain)
        expected, result = _outcome(step, plain), _outcome(compiled, found)
        assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True))
        assert same_bits(found, plain)
        assert len(compiled.plans) == plans


def test_a_buffer_that_counts_is_asked_after_it_was_counted_up() -> None:
    def step(x: Tensor) -> Tensor:
        calls.add_(1)
        return (weight * (x.cos() if calls > 2 else x)).sum()

    calls, compiled = torch.zeros(()), _compiled(step)
    for call in range(1, 5):
        loss = compiled(UP)
        assert calls == call
        assert same_bits(loss, (weight * (UP.cos() if call > 2 else UP)).sum())
    assert len(compiled.plans) == 2


def test_without_data_there_is_no_answer_but_to_what_needs_none() -> None:
    def step(x: Tensor, asked: Tensor | None = None) -> Tensor:
        known = torch.arange(4)
        x = x.cos() if (known > 2).any() else x
        return (x if asked is None or asked.all() else x.sin()).sum()

    with torch.device("meta"):
        x, asked = torch.ones(8, requires_grad=True), torch.ones(8)
    ops = checkmate.trace(step, x, profile="roofline:h100").graph.ops
    assert "aten.cos.default" in {op.target for op in ops}
    with pytest.raises(checkmate.Unsupported, match="no data here"):
        checkmate.trace(step, x, asked, profile="roofline:h100")


class _Writing(nn.Module):
    """Writes to a buffer and draws, before and after it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.add_(1)
        h = F.dropout(self.linear(x), 0.5)
        if mask.any():
            h = h.masked_fill(mask, 0)
        return F.dropout(h, 0.5).square().mean()


@pytest.mark.slow
def test_another_answer_comes_before_anything_is_written_or_drawn() -> None:
    some = torch.arange(8) > 5

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        module = _Writing()
        step = wrap(module)
        return [train(module, step, (UP, mask), steps=2) for mask in (some, ~some & some, some)]

    for found, expected in zip(trained(_compiled), trained(lambda m: m), strict=True):
        assert_same(found, expected)


def test_the_bytes_of_asking_are_within_the_predicted_peak_or_refused() -> None:
    def step(x: Tensor) -> Tensor:
        scale = 2 if (x.double() * 3).sum() > 0 else 3
        return (weight * scale).sum() * x[0]

    x = torch.ones(5000)
    compiled = _compiled(step, profile="measure")
    compiled(x).backward()
    (plan,) = compiled.plans
    use = measure_peak(lambda: compiled(x).backward())
    assert plan.problem.resident + use.peak == plan.peak
    assert use.peak >= 2 * 8 * x.numel()
    with pytest.raises(checkmate.Unsupported, match=r"test_data_branches\.py:\d+.*pass the answer in"):
        checkmate.compile(step, budget=plan.problem.resident + 5000, time_limit=1)(x)


def test_too_many_answers() -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * x).sum() * len(range(int(x[0])))

    compiled = _compiled(step, max_plans=2)
    for first in (0, 1):
        compiled(torch.full((8,), float(first)))
    with pytest.raises(checkmate.Unsupported, match=r"asks for \(.*The last ones: 0, 1, 2\.\nCompute without asking"):
        compiled(torch.full((8,), 2.0))
    compiled(torch.zeros(8))
    assert len(compiled.plans) == 2


def test_by_its_name_a_backend_says_that_it_has_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("checkmate", "checkmate.dynamo:backend", "torch_dynamo_backends")
    monkeypatch.setitem(registry._BACKENDS, "checkmate", found)

    def step(x: Tensor) -> Tensor:
        return (weight * (x.cos() if (x > 0).all() else x)).sum()

    options = {"budget": "1 MB", "profile": "roofline:h100"}
    try:
        compiled = torch.compile(step, backend="checkmate", options=options, dynamic=False)
        _assert_same_bits(step, compiled, UP)
        with pytest.raises(GuardFailed, match=r"was True when .* False now.*checkmate\.compile"):
            compiled(DOWN)
        _assert_same_bits(step, compiled, UP)
    finally:
        registry._COMPILER_FNS.pop("checkmate", None)


def test_other_backends_are_not_affected() -> None:
    def step(x: Tensor) -> Tensor:
        return x.cos() if (x > 0).all() else x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent"):
        torch.compile(step, backend="eager", fullgraph=True)(UP)
    assert same_bits(torch.compile(step, backend="eager")(UP), UP.cos())


SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", long("Qwen3")])
def test_a_padding_mask_is_dropped_as_in_plain_pytorch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config: Any = (
        transformers.BertConfig(**SMALL)
        if name == "BERT"
        else transformers.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8)
    )
    kind: Any = transformers.BertForMaskedLM if name == "BERT" else transformers.Qwen3ForCausalLM
    model, tokens = kind(config), torch.randint(1, 11, (4, 8))

    def step(tokens: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = model(tokens, attention_mask=mask, labels=tokens).loss
        return loss

    def outcome(step: Step, mask: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = step(tokens, mask)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    compiled = checkmate.compile(step, budget="1 GB", time_limit=1)
    ones = torch.ones(4, 8, dtype=torch.long)
    padded = ones.clone()
    padded[0, 5:] = 0
    for mask, plans in ((ones, 1), (padded, 2), (ones, 2), (padded.flip(0), 2)):
        pairs = zip(outcome(compiled, mask), outcome(step, mask), strict=True)
        assert all(same_bits(found, expected) for found, expected in pairs)
        assert len(compiled.plans) == plans
    assert not caplog.records


def test_a_layer_is_left_out_by_a_draw_of_pythons_generator() -> None:
    """LayerDrop. A capture that turns out to be for another draw has drawn; the next one starts from the same state."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            if random.uniform(0, 1) < 0.4:
                continue
            x = layer(x).sin()
        return (weight.sum() * x).sum()

    compiled, x = _compiled(step, profile="measure"), torch.linspace(-1, 1, 256).view(4, 64)
    for seed in range(6):
        states = []
        for run in (step, compiled):
            random.seed(seed)
            _outcome(run, x)
            states.append(random.getstate())
        assert states[0] == states[1]
        random.seed(seed)
        expected = _outcome(step, x)
        random.seed(seed)
        assert all(map(same_bits, _outcome(compiled, x), expected))
    assert len(compiled.plans) > 2


class LayerDrop(nn.Module):
    """Layers that are skipped at random, as in wav2vec and BART."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers, self.p = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), p

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.p:
                continue
            x = layer(F.dropout(x, 0.2)).sin()
        return (weight * x).sum()


@pytest.mark.parametrize("p", [0, 0.0, 1.0])
def test_draws_that_leave_no_doubt_are_asked(p: float) -> None:
    module = LayerDrop(p)
    compiled = _compiled(module)
    for seed in range(2):
        results = []
        for run in (module, compiled):
            torch.manual_seed(seed)
            results += [*_outcome(run, UP), torch.get_rng_state()]
        assert all(map(same_bits, results[:3], results[3:]))
    assert len(compiled.plans) == 1


def test_other_draws_of_torch_are_refused() -> None:
    steps = LayerDrop(0.5), lambda x: (weight * x).sum() * [1, 2][int(torch.rand(1).item() * 2)]
    before = torch.get_rng_state()
    for step in steps:
        with pytest.raises(checkmate.Unsupported, match=r"random numbers that the step draws[\s\S]* layerdrop=0"):
            _compiled(step)(UP)
        assert same_bits(torch.get_rng_state(), before)


def test_what_cannot_be_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor) -> Tensor:
        y = x.cos() if x[0] > 0 else x
        return (weight * (y.sin() if x[1] > 0 else y)).sum()

    compiled, asked, plain = _compiled(step), list[DataGuards](), DataGuards.check
    monkeypatch.setattr(DataGuards, "check", lambda self, inputs: (asked.append(self), plain(self, inputs))[1])

    def answers(*signs: bool) -> list[tuple[bool | int, ...]]:
        del asked[:]
        _assert_same_bits(step, compiled, torch.where(torch.tensor([*signs, *[True] * 6]), UP, DOWN))
        return [one.answers for one in asked]

    for subset in ((False, True), (True, False), (True, True)):
        answers(*subset)
    assert len(compiled.plans) == 3
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

    compiled = _compiled(step)
    compiled(UP)
    compiled(DOWN)
    assert not torch.is_autocast_enabled("cpu")
    before = converted()
    other.data.mul_(2)
    assert converted() == 2 * before, "autocast computes with a weight as it was"


@pytest.mark.parametrize("peak_of", ["forward", "backward"])
def test_draws_of_python_are_held_until_the_forward_returns(peak_of: str) -> None:
    layers, weights = range(3), nn.Parameter(torch.randn(64, 64))

    def step(x: Tensor) -> Tensor:
        for _ in layers:
            if random.uniform(0, 1) < 0:
                continue
            x = x @ weights
        return x.square().sum() if peak_of == "backward" else (torch.cat([x.detach()] * 9).sum() + x.sum())

    compiled, x = _compiled(step, profile="measure"), torch.randn(128, 64)
    compiled(x)
    (plan,) = compiled.plans
    assert {op.name for op in plan.problem.graph.ops if op.target == "autograd"} >= {"handed_in_numbers", "return"}
    taken = measure_peak(lambda: torch.autograd.grad(compiled(x), weights)).peak
    assert taken == plan.peak - plan.problem.resident
