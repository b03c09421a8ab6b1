"""Rules name ops by pattern, bind what can obey them, and travel with the problem; the verifier holds plans to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkmate.core import simulator
from checkmate.core.fingerprint import fingerprints, same_ops
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem, Profile
from checkmate.core.rules import as_mapping, read_rules, with_rules, without_rules
from checkmate.errors import RuleError
from tests.support.by_hand import plan_of
from tests.support.sampling import in_turn


def network() -> Problem:
    """A forward of five ops, of which the last makes a result, and a backward of two that read the first and third."""
    names = [
        ("embed", "aten.embedding.default", "embed (Embedding, net.py:3)", ()),
        ("mm", "aten.mm.default", "blocks.1.attn (Attention, net.py:9)", ("scores",)),
        ("relu", "aten.relu.default", "blocks.1 (Block, net.py:12)", ()),
        ("mask", "checkmate.draw_mask", "blocks.10.drop (Dropout, net.py:12)", ()),
        ("loss", "aten.mean.default", "net.py:20", ()),
        ("mm_1", "aten.mm.default", "blocks.1.attn (Attention, net.py:9)", ()),
        ("grad", "aten.add.Tensor", "embed (Embedding, net.py:3)", ()),
    ]
    reads = [(), (0,), (1,), (2,), (2, 3), (0, 2), (1, 5)]
    ops = tuple(
        Op(name, target, reads[k], (k,), "forward" if k < 5 else "backward", "draws" if k == 3 else None, where, tags)
        for k, (name, target, where, tags) in enumerate(names)
    )
    values = tuple(Value(f"v{k}", 10, k) for k in range(7))
    return Problem(Graph(ops, values, (4, 6)), Profile(np.ones(7), np.zeros(7)))


PATTERNS = {
    "blocks.1": (1, 2),  # a module is all within it, in the forward, and not blocks.10
    "blocks.1.*": (1,),
    "blocks.1*": (1, 2, 3),
    "blocks.*.attn": (1,),
    "embed": (0,),
    "scores": (1,),
    "aten.mm": (1, 5),  # an op is what it is in forward and backward
    "aten.mm.default": (1, 5),
    "aten.[mr]*": (1, 2, 4, 5),
    "checkmate.draw_mask": (3,),
}


@in_turn(pattern=PATTERNS)
def test_a_pattern_names_modules_ops_and_tags(pattern: str) -> None:
    (rule,) = with_rules(network(), {pattern: 2}).rules
    assert rule.ops == PATTERNS[pattern]


def test_what_cannot_be_made_again_is_exempt_with_its_reason_and_the_last_rule_holds() -> None:
    (rule,) = with_rules(network(), {"*": "recompute"}).rules
    assert rule.ops == (0, 1, 2)
    there = "is in the backward"
    assert dict(rule.exempt) == {3: "draws", 4: "makes a result of the step", 5: there, 6: there}
    problem = with_rules(network(), {"blocks.1": "recompute", "scores": "keep"})  # the last that names an op holds
    assert [rule.ops for rule in problem.rules] == [(2,), (1,)]
    assert problem.limits.recomputed == {2}
    assert problem.graph.ops[1].pinned == "is under the rule 'scores': 'keep'"
    assert read_rules(["blocks.1=keep", "a=b=3"]) == {"blocks.1": "keep", "a=b": 3}  # of a command line
    with pytest.raises(RuleError, match="pattern"):
        read_rules(["keep"])


def test_what_is_no_rule_is_refused_with_what_is_near() -> None:
    for rules, said in (
        ({"blcks.1": "keep"}, r"'blcks.1': 'keep' names nothing in this step. Near it: 'blocks.1'"),
        ({"score": 2}, r"Near it: 'scores'"),
        ({"aten.rleu": 2}, r"Near it: 'aten.relu'"),
        ({"xyz": 2}, r"It has modules: 'embed', 'blocks'; tags: 'scores'; ops such as 'aten.embedding'"),
        ({"blocks": "keeep"}, r"one of 'keep', 'once', 'recompute'.*Did you mean 'keep'\?"),
        ({"blocks": 0}, "how often an op may run at most, 1 or more"),
        ({"blocks": True}, "is True"),
        ({"blocks": 1.5}, "is 1.5"),
        ({"": "keep"}, "a pattern of names"),
        (["blocks"], "Rules are a dict"),
        ({"scores": "keep", "blocks": 2}, r"'scores': 'keep' is for ops that later rules name too.*'blocks'"),
        ({"checkmate.draw_mask": "recompute"}, "cannot be obeyed: mask draws"),
    ):
        with pytest.raises(RuleError, match=said):
            with_rules(network(), rules)


def _wrong(problem: Problem, *again: tuple[int, int]) -> list[str]:
    return simulator.check_plan(plan_of(problem, *again), problem)


def test_the_verifier_holds_plans_to_the_rules() -> None:
    limited = with_rules(network(), {"aten.relu": 2})
    assert _wrong(limited, (5, 2)) == []
    assert _wrong(limited, (5, 2), (6, 2)) == ["relu runs 3 times though a rule allows 2"]
    kept = with_rules(network(), {"scores": "keep"})
    assert _wrong(kept, (6, 1)) == ["mm runs 2 times though it is under the rule 'scores': 'keep'"]
    again = with_rules(network(), {"blocks.1": "recompute"})
    assert _wrong(again, (5, 1), (5, 2)) == []
    assert _wrong(again, (5, 2)) == ["v1 is at hand when the backward begins, though a rule has it made again"]
    assert len(_wrong(again)) == 2


def test_other_rules_are_another_problem_and_none_the_same_as_before() -> None:
    plain = network()
    ruled = [with_rules(plain, {"scores": asks}) for asks in ("keep", 2, 3, "recompute")]
    prints = {fingerprints(problem).structure for problem in (plain, *ruled)}
    assert len(prints) == 5
    assert same_ops(with_rules(plain, {"scores": "once"}), with_rules(plain, {"blocks.1.*": "keep"}))  # as constraints
    for problem in (*ruled, with_rules(plain, {})):
        assert same_ops(without_rules(problem), plain)
    assert without_rules(plain) is plain
    assert as_mapping(with_rules(ruled[0], {"aten.mm": 2})) == {"aten.mm": 2}  # in place of those before


def test_rules_and_tags_are_in_files_of_problems_that_have_any(tmp_path: Path) -> None:
    problem = with_rules(network(), {"blocks": "recompute", "aten.embedding": 2, "aten.mm": "keep"})
    for name in ("ruled.json", "ruled.json.gz"):
        problem.to_json(tmp_path / name)
        again = Problem.from_json(tmp_path / name)
        assert (again.rules, again.graph) == (problem.rules, problem.graph)
        assert fingerprints(again) == fingerprints(problem)
    assert '"version": 2,' in (tmp_path / "ruled.json").read_text()  # an earlier checkmate refuses it
    plain = replace(problem.graph, ops=tuple(replace(op, tags=()) for op in problem.graph.ops))
    Problem(plain, problem.profile).to_json(tmp_path / "plain.json")
    text = (tmp_path / "plain.json").read_text()
    assert '"version": 1,' in text
    assert "rules" not in text
    assert "tags" not in text
