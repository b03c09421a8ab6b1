"""A step whose loss no plan of the whole fits runs it in parts, with the bits of plain PyTorch and to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.capture.loss import ladder
from checkmate.core.problem import Problem
from checkmate.core.solution import Status
from checkmate.errors import InfeasibleBudget
from tests.support.plainly import verify_to_the_byte
from tests.support.sampling import few, long, slow

WORDS, DEPTH = 1000, 16
TOKENS = torch.randint(WORDS, (4, 32), generator=torch.Generator().manual_seed(0))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DEPTH)
        self.inner = nn.Sequential(nn.Linear(DEPTH, DEPTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(DEPTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.words(tokens))).flatten(0, 1), tokens.flatten())


@pytest.fixture
def model() -> _Model:
    return _Model()


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The step of a model like the others: bytes are the same."""
    torch.manual_seed(0)
    return checkmate.trace(_Model(), TOKENS)


def _floor(problem: Problem) -> int:
    return int(problem.unavoidable_bytes.max())


def test_splits_go_on_where_ctrl_c_ended_one(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that was interrupted is asked for again; one that was found is made once."""
    first = checkmate.trace(_Model(), TOKENS)
    really, interrupted = ladder.in_parts, iter([True])

    def split(*asked: Any) -> Any:
        if next(interrupted, False):
            raise KeyboardInterrupt
        return really(*asked)

    monkeypatch.setattr(ladder, "in_parts", split)
    with pytest.raises(KeyboardInterrupt):
        list(first.splits_in_turn())
    assert [one.splits for one in first.splits_in_turn()] == [one.splits for one in problem.splits_in_turn()]
    assert first.next_split() is first.next_split() is not None


@pytest.mark.slow
def test_below_the_smallest_budget_of_the_whole_the_loss_is_split(model: _Model, problem: Problem) -> None:
    whole, smallest = _floor(problem), checkmate.min_budget(problem)
    assert smallest.peak < 0.5 * whole
    assert "loss in" in str(smallest)
    for budget in (whole - 1, smallest.peak):
        verify_to_the_byte(model, TOKENS, budget=budget)
        solution = checkmate.solve(problem, budget, time_limit=1)
        assert "bits equal on" in str(solution)
        assert solution.problem.splits[0].startswith("loss in ")


def test_a_plan_of_a_split_step_says_so(model: _Model, problem: Problem) -> None:
    compiled = checkmate.compile(model, budget=int(0.7 * _floor(problem)), time_limit=1, wait="first")
    for _ in range(2):
        compiled(TOKENS).backward()
    (plan,) = compiled.plans
    assert plan.problem.splits[0].startswith("loss in ")
    assert "in parts   loss in 2 parts" in str(plan)


def test_where_a_plan_fits_none_is_split_nor_tried(
    model: _Model, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "equal_inputs", lambda *asked: pytest.fail("tried"))
    compiled = checkmate.compile(model, budget=_floor(problem) + 8 * TOKENS.numel() * DEPTH, time_limit=1)
    compiled(TOKENS).backward()
    assert compiled.plans[0].problem.splits == ()


@pytest.mark.slow
def test_a_split_with_other_bits_is_not_offered(model: _Model, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = checkmate.trace(model, TOKENS)  # what others split is known
    monkeypatch.setattr(ladder, "equal_inputs", lambda loss, split: 2 * (split == (8, False)))
    assert [one.splits[0][:15] for one in problem.splits_in_turn() if one.splits] == ["loss in 8 parts"]
    monkeypatch.setattr(ladder, "equal_inputs", lambda loss, parts: 0)
    with pytest.raises(InfeasibleBudget, match="alone needs") as refusal:
        checkmate.compile(model, budget=int(0.7 * _floor(problem)), time_limit=1)(TOKENS)
    assert refusal.value.min_budget >= _floor(problem)


@pytest.mark.slow
def test_a_rule_that_keeps_the_loss_whole_is_named_in_a_refusal(model: _Model, problem: Problem) -> None:
    """In further splits the rule names nothing: these are looked at without it."""
    budget = checkmate.min_budget(problem).peak * 11 // 10
    with pytest.raises(InfeasibleBudget, match="Rules are in the way: without 'head': 'recompute'"):
        checkmate.compile(model, budget=budget, rules={"head": "recompute"}, time_limit=1)(TOKENS)


def test_a_refusal_names_the_smallest_budget_with_parts(problem: Problem) -> None:
    solution = checkmate.solve(problem, problem.resident + 10, time_limit=1)
    assert solution.status is Status.INFEASIBLE
    assert solution.refusal.min_budget == checkmate.min_budget(problem).peak < 0.5 * _floor(problem)
    assert ", with loss in " in solution.message
    assert checkmate.solve(problem, solution.refusal.min_budget, time_limit=1).plan is not None


def test_rules_hold_for_the_split_step_too(problem: Problem) -> None:
    budget = int(0.7 * _floor(problem))
    kept = checkmate.solve(problem, budget, rules={"inner": "keep"}, time_limit=1)
    assert kept.plan is not None
    assert [rule.pattern for rule in kept.problem.rules] == ["inner"]
    refused = checkmate.solve(problem, budget, rules={"aten._log_softmax": "once"}, time_limit=1)
    assert refused.status is Status.INFEASIBLE  # there is no such op in the split step


def test_estimates_for_a_device_count_what_parts_hold(model: _Model) -> None:
    problem = checkmate.trace(_Model().to("meta"), TOKENS.to("meta"), profile="roofline:h100")
    whole, *split = problem.splits_in_turn()
    floors = [_floor(one) for one in (whole, *split)]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 0.5 * floors[0]
    assert split[0].splits == ("loss in 4 parts beside its logits: if the device keeps the bits: not tried here",)
    assert split[-1].keep_all_cost > whole.keep_all_cost


CLASS_WEIGHTS = torch.rand(WORDS) + 0.1
LOSSES: dict[str, Callable[[_Model, Tensor, Tensor], Any]] = {
    "capped": lambda m, h, y: F.cross_entropy((torch.tanh(m.head(h) / 30.0) * 30.0).flatten(0, 1), y.flatten()),
    "class weights": lambda m, h, y: F.cross_entropy(m.head(h).flatten(0, 1), y.flatten(), weight=CLASS_WEIGHTS),
    "label smoothing": lambda m, h, y: F.cross_entropy(m.head(h).flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "shifted": lambda m, h, y: F.cross_entropy(m.head(h)[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "shown": lambda m, h, y: F.cross_entropy((logits := m.head(h)).flatten(0, 1), y.flatten()) + logits.detach().amax(),
    "by a transposed embedding": lambda m, h, y: F.cross_entropy((h @ m.words.weight.T).flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("kind", few(4, [(kind,) for kind in LOSSES]))
def test_losses_of_other_kinds_are_split_to_the_byte(kind: str, model: _Model) -> None:
    def step(tokens: Tensor) -> Any:
        return LOSSES[kind](model, model.inner(model.words(tokens)), tokens)

    problem = checkmate.trace(step, TOKENS)
    *_, smallest = problem.splits_in_turn()
    assert smallest.splits[0].startswith("loss in ")
    assert ("beside its logits" in smallest.splits[0]) == (kind == "shown")
    report = verify_to_the_byte(step, TOKENS, budget=int(1.05 * _floor(smallest)))
    assert report.measured_peak < _floor(problem)


_WIDE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_T5 = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16, "decoder_start_token_id": 0}
NETWORKS: dict[str, dict[str, Any]] = {  # what their configurations take
    "GPT2LMHeadModel": {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32},
    "BertForMaskedLM": _WIDE,
    "LlamaForCausalLM": _WIDE,
    "T5ForConditionalGeneration": _T5,
}


@pytest.mark.parametrize(
    ("name", "half"),
    [
        *(slow("GPT2LMHeadModel", False), slow("LlamaForCausalLM", True)),
        *(long("BertForMaskedLM", False), long("T5ForConditionalGeneration", True)),
    ],
)
def test_language_models_of_transformers_need_no_change(name: str, half: bool) -> None:
    import benchmarks.networks.gpt2  # noqa: F401  # lets the library's warnings be left out of what is captured

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    tokens = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    network = kind(kind.config_class(**tokens, **NETWORKS[name])).train()
    network.to(torch.bfloat16 if half else torch.float32)

    def step(tokens: Tensor) -> Tensor:
        return network(input_ids=tokens, labels=tokens.where(tokens > 99, -100)).loss

    verify_to_the_byte(step, TOKENS, budget=int(0.75 * _floor(checkmate.trace(step, TOKENS))), time_limit=2)
