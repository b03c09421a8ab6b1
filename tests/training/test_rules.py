"""What a person knows: rules in `compile`, tags in the forward, and the bits of plain PyTorch whatever they say."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.core.fingerprint import fingerprints
from checkmate.errors import InfeasibleBudget, RuleError
from tests.support.bits import assert_same_bits
from tests.support.stepping import assert_same, train

TAGS = "scores", "weights", "view"
X = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(1))


def untagged(x: Tensor, name: str) -> Tensor:
    return x


class Attention(nn.Module):
    """Its scores are read by three ops, once before they are tagged: how gradients are added up is seen in the bits."""

    def __init__(self, tag: Any) -> None:
        super().__init__()
        self.tag, self.qk, self.out, self.drop = tag, nn.Linear(16, 32), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, dim=-1)
        scores = q @ k.transpose(-1, -2)
        tagged = self.tag(scores, "scores")
        weights = self.tag(torch.softmax(tagged, -1), "weights")
        x = x + self.drop(self.out(weights @ x)) + scores.exp().mean() + 0.1 * tagged.sin().mean() + scores.cos().mean()
        return x + self.tag(x.view(-1, 4), "view").t().tanh().sum() / 97


class Net(nn.Module):
    def __init__(self, tag: Any = checkmate.tag) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(tag) for _ in range(2))

    def forward(self, x: Tensor, blocks: int = 2) -> Tensor:
        for block in self.blocks[:blocks]:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_a_tag_is_no_op() -> None:
    tagged, plain = checkmate.trace(Net(), X), checkmate.trace(Net(untagged), X)
    assert [(op.name, op.target) for op in tagged.graph.ops] == [(op.name, op.target) for op in plain.graph.ops]
    assert fingerprints(tagged).structure == fingerprints(plain).structure
    assert fingerprints(tagged).sizes == fingerprints(plain).sizes
    of_blocks = ("bmm", "_softmax", "add_3"), ("bmm_2", "_softmax_1", "add_8")  # last the op that makes the memory
    expected = [(name, (tag,)) for names in of_blocks for name, tag in zip(names, TAGS, strict=True)]
    assert [(op.name, op.tags) for op in tagged.graph.ops if op.tags] == expected
    assert not any(op.tags for op in plain.graph.ops)
    assert checkmate.tag(X, "x") is X


@pytest.mark.usefixtures("one_thread")
def test_the_same_numbers_and_a_plan_that_obeys() -> None:
    plain, net = Net(untagged), Net()
    plain.load_state_dict(net.state_dict())
    rules: dict[str, str | int] = {"weights": "recompute", "aten.exp": 2, "blocks.1": "keep", "view": "recompute"}
    compiled = checkmate.compile(net, budget="2 MB", rules=rules, time_limit=1)
    found = train(compiled, compiled, (X,))
    assert_same(found, train(plain, plain, (X,)))
    (plan,) = compiled.plans
    assert plan.schedule is not None
    assert [plan.problem.resident + peak for peak in found.peaks] == [plan.peak] * len(found.peaks)
    ops, runs = plan.problem.graph.ops, plan.schedule.R.sum(axis=0)
    in_forward = [k for k, op in enumerate(ops) if op.phase == "forward"]
    assert all(runs[k] == 1 for k in in_forward if "blocks.1" in (ops[k].where or "") and "view" not in ops[k].tags)
    assert [runs[k] for k in in_forward if "weights" in ops[k].tags] == [2, 1]  # block 1 is under the later rule
    assert {rule.pattern: rule.asks for rule in plan.problem.rules} == rules


def test_a_rule_that_names_nothing_is_an_error_at_the_first_call() -> None:
    net = Net()
    with pytest.raises(RuleError, match=r"'score': 'keep' names nothing in this step. Near it: 'scores'"):
        checkmate.compile(net, budget="2 MB", rules={"score": "keep"})(X)
    with pytest.raises(RuleError, match="Did you mean 'once'"):
        checkmate.compile(net, budget="2 MB", rules={"scores": "onec"})
    with pytest.raises(RuleError, match=r"'block\.0' is 'kep'"):
        checkmate.explain(net, X, rules={"block.0": "kep"})
    for wrong in ((net, "scores"), (X, 3), (X, "")):
        with pytest.raises(TypeError, match=r"a tensor and a name"):
            checkmate.tag(*wrong)


def test_a_part_that_is_left_out_takes_its_rule_with_it(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    step = checkmate.compile(lambda x, blocks: net(x, blocks), budget="2 MB", rules={"blocks.1": "keep"}, time_limit=1)
    step(X, 2)
    with caplog.at_level(logging.INFO, logger="checkmate.backends.planner"):
        step(X, 1)
    assert "in this graph rules name nothing: 'blocks.1'" in caplog.text
    assert step.plans[-1].problem.rules == ()


@pytest.mark.slow
def test_a_refusal_says_what_the_rules_cost() -> None:
    net = Net()
    smallest = checkmate.min_budget(checkmate.trace(net, X), time_limit=1).peak
    with pytest.raises(InfeasibleBudget, match=r"Rules are in the way: without 'blocks': 'keep', ") as refusal:
        checkmate.compile(net, budget=smallest, rules={"blocks": "keep"}, time_limit=1)(X)
    assert refusal.value.min_budget > smallest


def test_explain_and_the_page_show_the_rules(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())
    found = checkmate.explain(lambda x: net(x).sum(), X, rules={"[01]": "recompute", "2": 2})
    assert found.problem is not None
    table = repr(found).partition("\nrules\n")[2].splitlines()
    assert [line.split() for line in table[:3]] == [
        ["pattern", "rule", "ops", "makes", "cannot", "obey"],
        ["[01]", "recompute", "3", "18.43", "kB", "1:", "it", "draws", "random", "numbers"],
        ["2", "2", "1", "6.14", "kB"],
    ]
    plan = checkmate.solve(found.problem, "2 MB", time_limit=1)
    page = checkmate.report(plan, tmp_path / "plan.html").read_text()
    assert "&#39;[01]&#39;: &#39;recompute&#39;, for 3 ops; 1 op cannot obey it" in page
    assert "&#39;2&#39;: 2, for 1 op<" in page


def test_tags_where_tracing_goes_another_way() -> None:
    """Tags of values written in place, in a checkpointed part, in vmap, of an input; and a tag of a tag."""
    weight = torch.randn(16, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        y = checkmate.tag(checkmate.tag(checkmate.tag(x, "input") @ weight, "inner"), "outer")
        y = checkmate.tag(y.sin().relu_(), "written")
        y = checkpoint(lambda y: checkmate.tag(y.exp(), "within").cos(), y, use_reentrant=False)
        return torch.vmap(lambda row: checkmate.tag(row.tanh(), "mapped"))(y).sum()

    problem = checkmate.trace(step, X)
    tags = {tag: op.target for op in problem.graph.ops for tag in op.tags}
    assert (tags["inner"], tags["outer"]) == ("aten.mm.default",) * 2
    assert tags["written"] == "aten.relu.default"
    assert "input" not in tags
    step(X).backward()
    expected, weight.grad = copy.deepcopy(weight.grad), None
    checkmate.compile(step, budget="2 MB", rules={"inner": "recompute"}, time_limit=1)(X).backward()
    assert_same_bits(weight.grad, expected)
