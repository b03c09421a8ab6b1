"""A size that changes is captured twice, then put in: bits, peaks, and how many captures there are."""

from __future__ import annotations

import copy
import gc
import logging
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import checkmate
from checkmate.backends.capture_cache import as_data
from checkmate.backends.step_problem import joint_of
from checkmate.capture.loss import ladder
from checkmate.core.rules import with_rules, without_rules
from checkmate.core.simulator import check_plan
from checkmate.errors import InfeasibleBudget
from checkmate.memory import measure_peak
from checkmate.torch_internals.capturing import FakeTensor
from tests.support.bits import assert_same_bits
from tests.support.stepping import left_by
from tests.support.whole_steps import plain_step

LENGTHS = (24, 30, 17, 9, 41, 24, 2, 30)


class _Net(nn.Module):
    """Tokens, dropout, a norm and a loss, with something in between that the length takes part in."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 50)
        self.norm, self.drop, self.between = nn.BatchNorm1d(64), nn.Dropout(0.2), between

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.first(self.embed(tokens))).transpose(1, 2)).transpose(1, 2)
        logits = self.last(self.drop(self.between(h)))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _tokens(length: int, batch: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens, target = torch.randint(50, (2, batch, length), generator=generator)
    return tokens, target


def _attend(h: Tensor) -> Tensor:
    q = h.unflatten(-1, (4, 16)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def _write_half(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, : h.shape[1] // 2] *= 3
    return h


# What is between, and for how many captures the lengths are.
BETWEEN = {
    "nothing": (lambda h: h, 2),
    "a number of the length": (lambda h: h / math.sqrt(h.shape[1]), 2),
    "a constant": (lambda h: h * torch.tensor(2.0), 2),
    "positions": (lambda h: h + torch.arange(h.shape[1])[:, None] * 0.01, 2),
    "attention": (_attend, 3),  # of two tokens
    "a branch": (lambda h: h * 2 if h.shape[1] > 20 else h.tanh(), 3),
    "a write to a half": (_write_half, 5),  # by what is left of the length, and of two tokens
}


@pytest.mark.parametrize("between", BETWEEN)
def test_lengths_have_plain_bits_at_the_smallest_budget(between: str) -> None:
    through, most = BETWEEN[between]
    torch.manual_seed(0)
    net = _Net(through)
    twin = copy.deepcopy(net)
    budget = checkmate.min_budget(checkmate.trace(copy.deepcopy(net), *_tokens(max(LENGTHS)))).peak
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget)
    for length in LENGTHS:
        assert_same_bits(left_by(step, twin, *_tokens(length)), left_by(net, net, *_tokens(length)))
    assert len(_captures(step)) <= most


class _Vocabulary(nn.Module):
    """A small model with a large vocabulary, whose loss takes most of the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(800, 16), nn.Linear(16, 16), nn.Linear(16, 800)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, target: Tensor, share: float = 1.0) -> Tensor:
        h = self.drop(self.inner(self.words(tokens)))
        return F.cross_entropy(self.head(h).flatten(0, 1), target.flatten()) * share


def test_a_loss_runs_in_parts_at_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = _Vocabulary()
    twin = copy.deepcopy(net)
    whole = checkmate.trace(copy.deepcopy(net), *_tokens(40))
    budget = checkmate.min_budget(whole).peak * 11 // 10
    assert budget < whole.unavoidable_bytes.max()
    asked: list[str] = []
    really = ladder.equal_inputs
    monkeypatch.setattr(ladder, "equal_inputs", lambda loss, how: asked.append(str(how)) or really(loss, how))
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget, cache=False)
    for length in (40, 32, 24, 36, 8):
        asked.clear()
        assert_same_bits(left_by(step, twin, *_tokens(length)), left_by(net, net, *_tokens(length)))
        assert measure_peak(lambda n=length: step(*_tokens(n)).backward()).peak <= budget
        twin.zero_grad()
        if length in (24, 36):
            assert len(asked) == 1  # the parts of other lengths
    assert len(_captures(step)) == 1
    in_parts = {plan.problem.splits[0].partition(":")[0] for plan in step.plans if plan.problem.splits}
    assert len(in_parts) == 1
    # That of the shortest length is whole, and is split further like the others when it is asked.
    (whole,) = (plan.problem for plan in step.plans if not plan.problem.splits)
    assert whole.next_split().splits[0].partition(":")[0] in in_parts
    for plan in step.plans:
        assert plan.modules.forward.graph.find_nodes(op="placeholder")


@pytest.mark.long
def test_a_number_that_changes_is_an_input_of_a_step_whose_loss_runs_in_parts() -> None:
    torch.manual_seed(0)
    net = _Vocabulary()
    twin = copy.deepcopy(net)
    budget = checkmate.min_budget(checkmate.trace(copy.deepcopy(net), *_tokens(40), 0.3)).peak * 11 // 10
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget=budget, cache=False)
    for share in (0.3, 0.7, 0.9):
        batch: Any = *_tokens(40), share
        assert_same_bits(left_by(step, twin, *batch), left_by(net, net, *batch))
    assert len(_captures(step)) == 1
    assert step.plans[0].problem.splits


def _captures(step: Any) -> list[Any]:
    """The captures that a compiled step keeps."""
    steps: list[Any] = step._caches[0].steps
    return steps


def _gpt2() -> tuple[nn.Module, Callable[..., Tensor]]:
    config = GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    return model, lambda tokens, _: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _bert() -> tuple[nn.Module, Callable[..., Tensor]]:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(config)
    return model, lambda tokens, mask: model(input_ids=tokens, attention_mask=mask % 7, labels=tokens).loss


def _llama() -> tuple[nn.Module, Callable[..., Tensor]]:
    """Sequences packed into one row, each with its own positions."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )

    def loss(tokens: Tensor, _: Tensor) -> Tensor:
        row = tokens[:1]
        places = torch.arange(row.shape[1])
        positions = torch.where(places < 5, places, places - 5)[None]
        out: Tensor = model(input_ids=row, position_ids=positions, labels=row, use_cache=False).loss
        return out

    return model, loss


@pytest.mark.parametrize("network", [_gpt2, _bert, _llama])
def test_each_length_is_what_would_be_captured_for_it_and_takes_the_bytes_of_its_plan(
    network: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    net, loss = network()
    problem = checkmate.trace(loss, *_tokens(32))
    budget = (checkmate.min_budget(problem).peak + problem.keep_all_peak) // 2
    step: Any = checkmate.compile(loss, budget=budget)
    of_length = {}
    for length in (32, 24, 13, 36):
        batch = _tokens(length)
        before = {id(plan) for plan in step._caches[0].plans}
        assert_same_bits(left_by(step, net, *batch), left_by(loss, net, *batch))
        assert len(_captures(step)) == 1
        (plan,) = [plan.plan for plan in step._caches[0].plans if id(plan) not in before]

        def again(batch: tuple[Tensor, ...] = batch) -> None:
            step(*batch).backward()
            net.zero_grad()

        assert measure_peak(again, torch.device("cpu")).peak == plan.peak - plan.problem.resident
        assert plan.peak <= budget
        # Captured for this length alone it is the same.
        alone = joint_of(checkmate.trace(loss, *batch, profile="roofline:laptop"))
        assert as_data({}, joint_of(plan.problem)) == as_data({}, alone)
        of_length[length] = plan.schedule.R, plan.schedule.S, as_data({}, alone), len(plan.modules.again)
    # A plan that has let go of its graphs has the same when it is asked.
    kept = {plan.problem.keep_all_peak: plan for plan in step.plans}
    assert len(kept) == len(of_length)
    for (_, expected), (_, plan) in zip(sorted(of_length.items()), sorted(kept.items()), strict=True):
        R, S, data, again = expected
        assert np.array_equal(plan.schedule.R, R)
        assert np.array_equal(plan.schedule.S, S)
        assert as_data({}, joint_of(plan.problem)) == data
        assert len(plan.modules.again) == again


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 1.0}])
def test_whole_steps_of_many_lengths(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = _Net(lambda h: h)
    twin = copy.deepcopy(net)
    optimizer, other = (torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, twin))
    plain = plain_step(net, optimizer, **options)
    step: Any = checkmate.training_step(twin, other, budget="50 MB", **options)
    for length in (24, 30, 17, 9, 24):
        torch.manual_seed(length)
        expected = plain(*_tokens(length))
        torch.manual_seed(length)
        assert_same_bits(step(*_tokens(length)), expected)
        assert_same_bits([*twin.state_dict().values()], [*net.state_dict().values()])
    assert all(len(cache.steps) == 1 for cache in step._caches)


def test_forwards_of_several_lengths_wait_for_their_backwards() -> None:
    torch.manual_seed(0)
    net = _Net(lambda h: h)
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    for length in (24, 30):
        step(*_tokens(length)).backward()
    twin.zero_grad()
    twin.load_state_dict(net.state_dict())

    def gradients(run: Callable[..., Tensor], of: nn.Module) -> list[Tensor | None]:
        torch.manual_seed(3)
        first, second, third = (run(*_tokens(length)) for length in (30, 22, 17))
        (second * 2).backward(retain_graph=True)
        first.backward()
        second.backward()
        third.backward()
        return [p.grad for p in of.parameters()]

    assert_same_bits(gradients(step, twin), gradients(net, net))


def test_a_length_that_is_too_long_is_refused_with_its_own_budget() -> None:
    net = _Net(lambda h: h)
    budget = checkmate.min_budget(checkmate.trace(net, *_tokens(40))).peak
    step: Any = checkmate.compile(lambda *batch: net(*batch), budget=budget)
    for length in (24, 30):
        step(*_tokens(length)).backward()
    before = copy.deepcopy(net.state_dict())
    for length in (50, 41):
        least = checkmate.min_budget(checkmate.trace(net, *_tokens(length))).peak
        net.load_state_dict(before)
        with pytest.raises(InfeasibleBudget) as refusal:
            step(*_tokens(length))
        assert refusal.value.min_budget == least
        assert_same_bits([*net.state_dict().values()], [*before.values()])
        step(*_tokens(40)).backward()


def test_plans_of_lengths_that_were_not_used_for_longest_go() -> None:
    net = _Net(lambda h: h)
    step: Any = checkmate.compile(lambda *batch: net(*batch), budget="10 MB", max_plans=3)
    twin = copy.deepcopy(net)
    for length in (24, 30, 11, 12, 13, 14, 11, 24):
        assert_same_bits(left_by(step, net, *_tokens(length)), left_by(twin, twin, *_tokens(length)))
    assert len(_captures(step)) == 1
    assert len(step.plans) == 1 + 3


def _alive() -> Counter[str]:
    gc.collect()
    kinds = (fx.Node, FakeTensor)
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


def test_a_plan_of_a_length_keeps_no_graph() -> None:
    net = _Net(_attend)
    step = checkmate.compile(lambda *batch: net(*batch), budget="10 MB")
    for length in (24, 30, 11, 12):
        step(*_tokens(length)).backward()
    before = _alive()
    for length in range(13, 17):
        step(*_tokens(length)).backward()
    after = _alive()
    assert all(after[kind] <= before[kind] * 1.05 for kind in before), (before, after)


def test_a_length_whose_graphs_are_gone_has_any_backward_and_says_where_an_op_fails() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.GELU())

    def two(tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = net(tokens).tanh()
        return h.square().mean(), (h * h.relu()).sum()

    step = checkmate.compile(two, budget="10 MB")
    for length in (24, 30, 17):
        sum(step(_tokens(length)[0])).backward()  # type: ignore[arg-type]
    batches = [_tokens(length)[0] for length in (20, 21, 22)]

    def gradients(results: tuple[Tensor, Tensor]) -> list[Tensor | None]:
        net.zero_grad()
        results[1].backward(retain_graph=True)
        results[1].backward(retain_graph=True)
        results[0].backward()
        return [parameter.grad for parameter in net.parameters()]

    waiting = [step(tokens) for tokens in batches]  # each of another length lets go of the graphs of the one before
    for results, tokens in zip(waiting, batches, strict=True):
        assert_same_bits(gradients(results), gradients(two(tokens)))
    with pytest.raises(IndexError, match=r"in aten\.embedding\.default of the forward: .*test_sizes\.py"):
        step(batches[0] + 50)


def test_what_cannot_be_open_is_captured_for_each_length_and_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    net = _Net(lambda h: h * torch.hann_window(h.shape[1])[:, None])
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    with caplog.at_level(logging.INFO, "checkmate.backends.capture_cache"):
        for length in (24, 30, 17):
            assert_same_bits(left_by(step, twin, *_tokens(length)), left_by(net, net, *_tokens(length)))
    assert len(_captures(step)) == 3
    (said,) = caplog.messages
    assert re.search(r"PyTorch traces it for one size only: test_sizes\.py:\d+, .*hann_window", said)


def test_a_length_that_takes_another_way_is_opened_with_another(caplog: pytest.LogCaptureFixture) -> None:
    """Distances of more than 25 vectors are computed by products."""
    net = _Net(lambda h: h + torch.cdist(h, h).sum(-1, keepdim=True))
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    with caplog.at_level(logging.INFO, "checkmate.backends.capture_cache"):
        for length in (24, 30, 17, 9, 12):
            assert_same_bits(left_by(step, twin, *_tokens(length)), left_by(net, net, *_tokens(length)))
    assert len(_captures(step)) == 2
    (said,) = caplog.messages
    assert re.search(r"what is computed depends on the size: test_sizes\.py:\d+, .*cdist", said)


@pytest.mark.parametrize(("options", "why"), [({}, "are tagged"), ({"host_budget": "10 MB"}, "a second memory")])
def test_a_kind_of_step_without_open_sizes_says_why(
    options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:
        h = net(x)
        return (h if options else checkmate.tag(h, "h")).square().mean()

    step: Any = checkmate.compile(loss, budget="10 MB", **options)
    with caplog.at_level(logging.INFO, "checkmate.backends.capture_cache"):
        for length in (12, 9, 15):
            x = torch.randn(length, 8)
            assert_same_bits(left_by(step, net, x), left_by(loss, net, x))
    assert len(_captures(step)) == 3
    assert why in caplog.text


def _least(step: Callable[..., Tensor], *batch: Tensor) -> int:
    return checkmate.min_budget(checkmate.trace(step, *batch)).peak


@pytest.mark.parametrize("lengths", [(12, 15, 33), (33, 12, 3)])
def test_conjugated_operands_take_the_bytes_of_the_plan(lengths: tuple[int, ...]) -> None:
    net = nn.Linear(8, 8, dtype=torch.complex64)

    def loss(x: Tensor) -> Tensor:
        return net(x).conj().imag.square().mean() + net(x.conj()).real.mean() + net(x).abs().mean()

    batches = [torch.randn(length, 8, dtype=torch.complex64) for length in lengths]
    step: Any = checkmate.compile(loss, budget=_least(loss, batches[lengths.index(33)]))
    for x in batches:
        before = {id(plan) for plan in step._caches[0].plans}
        assert_same_bits(left_by(step, net, x), left_by(loss, net, x))
        (plan,) = [plan.plan for plan in step._caches[0].plans if id(plan) not in before]

        def again(x: Tensor = x) -> None:
            step(x).backward()
            net.zero_grad()

        assert measure_peak(again, torch.device("cpu")).peak == plan.peak - plan.problem.resident
    assert len(_captures(step)) == 1


def test_a_long_sequence_after_short_ones_keeps_the_random_states_that_it_needs() -> None:
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def loss(x: Tensor) -> Tensor:
        for layer in layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().mean()

    step = checkmate.compile(loss, budget=_least(loss, torch.randn(2000, 16)))
    for length in (20, 30, 2000, 25):
        x = torch.randn(length, 16)
        assert_same_bits(left_by(step, layers, x), left_by(loss, layers, x))


@pytest.mark.parametrize("most", [1, 2])
def test_sizes_are_opened_where_no_more_captures_are_kept(most: int) -> None:
    net = nn.Linear(8, 8)
    step: Any = checkmate.compile(lambda x, *_: net(x).square().mean(), budget="10 MB", max_plans=most)
    for nones in range(most):
        step(torch.randn(12, 8), *[None] * nones).backward()
    for length in (15, 16):
        step(torch.randn(length, 8)).backward()
    assert len(_captures(step)) == most


def test_a_refused_length_leaves_nothing_behind_and_closes_nothing() -> None:
    net = _Net(lambda h: h)
    step: Any = checkmate.compile(lambda *batch: net(*batch), budget=_least(net, *_tokens(40)))
    step(*_tokens(24)).backward()
    with pytest.raises(InfeasibleBudget):
        step(*_tokens(60))
    for length in (30, 31):
        step(*_tokens(length)).backward()
    assert len(_captures(step)) == 1
    batch = _tokens(60)
    alive = [weakref.ref(tensor) for tensor in batch]
    with pytest.raises(InfeasibleBudget):
        step(*batch)
    del batch
    gc.collect()
    assert [tensor() for tensor in alive] == [None, None]


def test_two_modes_that_alternate_have_a_capture_each() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    step: Any = checkmate.compile(lambda x: net(x).square().mean(), budget="10 MB")
    for length in range(10, 18):
        net.train(length % 2 == 0)
        x = torch.randn(length, 8)
        assert_same_bits(left_by(step, net, x), left_by(lambda x: net(x).square().mean(), net, x))
    assert len(_captures(step)) == 2


def test_parts_of_a_padded_batch() -> None:
    """Their strides are those of the whole, whatever the length."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    padded, step = torch.randn(6, 40, 8), checkmate.compile(lambda x: net(x).square().mean(), budget="10 MB")
    cast: Any = step
    for length in (40, 24, 17, 30):
        x = padded[:, :length]
        assert_same_bits(left_by(step, net, x), left_by(lambda x: net(x).square().mean(), net, x))
    assert len(_captures(cast)) <= 2  # of the whole, and of a part


def test_a_layer_that_cannot_be_open_says_nothing_on_standard_error(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.LSTM(8, 8, batch_first=True)
    step: Any = checkmate.compile(lambda x: net(x)[0].square().mean(), budget="10 MB")
    for length in (6, 8, 4):
        x = torch.randn(2, length, 8)
        assert_same_bits(left_by(step, net, x), left_by(lambda x: net(x)[0].square().mean(), net, x))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_op_that_cannot_be_traced_with_open_sizes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.LSTM(8, 8, batch_first=True)
    step: Any = checkmate.compile(lambda x: net(x)[0].square().mean(), budget="10 MB")
    with caplog.at_level(logging.INFO, "checkmate.backends.capture_cache"):
        for length in (6, 8, 4):
            step(torch.randn(2, length, 8)).backward()
    (said,) = caplog.messages
    assert re.search(r"test_sizes\.py:\d+ in .*net\(x\).*oneDNN tells .* given sizes only\)$", said)


def test_a_length_while_torch_compile_is_turned_off_changes_no_capture() -> None:
    torch.manual_seed(0)
    net = _Net(lambda h: h)
    twin = copy.deepcopy(net)
    step: Any = checkmate.compile(lambda *batch: twin(*batch), budget="10 MB")
    for length, stance in ((24, "default"), (30, "force_eager"), (24, "default"), (17, "default"), (9, "default")):
        with torch.compiler.set_stance(stance):
            left = left_by(step, twin, *_tokens(length))
        assert_same_bits(left, left_by(net, net, *_tokens(length)))
    assert [len(_captures(step)), len(step.plans)] == [1, 3]  # of 24, 17 and 9


@pytest.mark.parametrize("rules", [{"first": "recompute", "aten.tanh": 2}, {"first": "keep"}])
def test_known_plans_of_other_lengths_obey_rules(rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = _Net(lambda h: h.tanh().tanh())
    ruled = with_rules(checkmate.trace(net, *_tokens(41)), rules)
    budget = (checkmate.min_budget(ruled).peak + ruled.keep_all_peak) // 2
    step: Any = checkmate.compile(lambda *batch: net(*batch), budget=budget, rules=rules, time_limit=1)
    twin = copy.deepcopy(net)
    for place, length in enumerate((41, 30, 36, 40, 9)):
        if place == 2:
            monkeypatch.setattr("checkmate.solvers.solve.attempt", None)  # nothing is searched for
        assert_same_bits(left_by(step, net, *_tokens(length)), left_by(twin, twin, *_tokens(length)))
    assert len(_captures(step)) == 1
    assert len(step.plans) == 5
    for plan in step.plans:
        alone = with_rules(without_rules(plan.problem), rules)
        assert [op.pinned for op in plan.problem.graph.ops] == [op.pinned for op in alone.graph.ops]
        assert check_plan(plan.plan, alone, budget) == []
