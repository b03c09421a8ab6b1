"""What each rule of a problem costs where no plan fits: the smallest budget with it and without."""

from __future__ import annotations

from checkmate.core.problem import Problem
from checkmate.core.rules import as_mapping, with_rules, without_rules
from checkmate.errors import RuleError
from checkmate.solvers.search.min_budget import MinBudget, min_budget
from checkmate.units import format_bytes

LEAST_SECONDS = 0.5  # to look for each of these budgets, at least
FOLLOWS_ALL = ("auto", "milp", "lp-rounding", "next-use")  # the others know of ops that run once, and of no other rule


def refuse_unknown_rules(problem: Problem, method: str) -> None:
    """Raise a RuleError where a method cannot follow a rule of the problem."""
    if method in FOLLOWS_ALL:
        return
    for rule in problem.rules:
        if rule.pin is None:
            raise RuleError(
                f"Method {method!r} cannot follow the rule {rule.text}: of all rules it knows 'keep' and 'once' only. "
                f"Methods that follow every rule: {', '.join(FOLLOWS_ALL)}."
            )


def smallest_without(problem: Problem, time_limit: float) -> dict[str, int]:
    """For each pattern the smallest budget in bytes without its rule; for "" that without all. None without rules.

    >>> dag = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[4, 1, 1, 1], forward=3)
    >>> smallest_without(with_rules(dag, {"op": "once"}), 1.0)
    {'op': 6}
    """
    rules = as_mapping(problem)
    if not rules:
        return {}
    patterns = [*rules, ""] if len(rules) > 1 else [*rules]
    seconds = max(LEAST_SECONDS, time_limit / len(patterns))
    plain, found = without_rules(problem), {}
    for pattern in patterns:
        others = {name: asks for name, asks in rules.items() if pattern and name != pattern}
        found[pattern] = min_budget(with_rules(plain, others), time_limit=seconds).peak
    return found


def in_words(problem: Problem, ends: MinBudget, without: dict[str, int]) -> str:
    """Which rules ask for more bytes, and how many: sentences to end a refusal with."""
    saving = {rule.pattern: rule.text for rule in problem.rules if without.get(rule.pattern, ends.peak) < ends.peak}
    parts = [f"without {text}, {format_bytes(without[pattern])} would do" for pattern, text in saving.items()]
    if (free := without.get("", ends.peak)) < min((without[pattern] for pattern in saving), default=ends.peak):
        parts.append(f"without any rule, {format_bytes(free)}{'' if parts else ' would do'}")
    if not parts:
        return " No rule is in the way: the smallest budget is no smaller without them." if without else ""
    return f" Rules are in the way: {'; '.join(parts)}."
