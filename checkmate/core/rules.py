"""The user's rules: patterns of modules, ops or tags, and the demand on the ops that they name.

    "keep", "once"    its values stay at hand until the last op that reads them has run: it runs once
    "recompute"       its values are not kept for the backward, which makes again what it reads of them
    n                 it runs n times in a step at most, the first time included

A pattern is a module's name (``blocks.3``: all within it), an op's (``aten.convolution``, with or without its overload)
or a tag's (`checkmate.tag`); ``*``, ``?`` and ``[...]`` stand for what they do in file names. Modules name ops of the
forward, and so do tags, which are set there. Where several patterns name an op, the last holds, as in a ``.gitignore``:
``{"blocks.*": "recompute", "blocks.*.attn": "keep"}``.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from checkmate.core.graph import Graph, Op
from checkmate.core.limits import WORDS, Ask, Rule, last_stages
from checkmate.core.problem import Problem
from checkmate.errors import RuleError

log = logging.getLogger("checkmate.solve")

NEAR = 3  # names that an error suggests

Rules = Mapping[str, Ask]


def with_rules(problem: Problem, rules: Rules) -> Problem:
    """Replace the rules of a problem.

    Raises:
        RuleError: if a rule is none, names nothing, or cannot be obeyed by any op that it names; it says what is near.

    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4, forward=3)
    >>> with_rules(chain, {"op": 2}).limits.max_runs
    {0: 2, 1: 2, 2: 2, 3: 2}
    >>> with_rules(chain, {"opp": 2})
    Traceback (most recent call last):
    checkmate.errors.RuleError: The rule 'opp': 2 names nothing in this step. Near it: 'op'.
    """
    check(rules)
    plain = without_rules(problem)
    graph, bindings = plain.graph, list[Rule]()
    named = {pattern: [k for k, op in enumerate(graph.ops) if _names(pattern, op)] for pattern in rules}
    last = {k: pattern for pattern, ks in named.items() for k in ks}  # by the last pattern that names it
    for pattern, asks in rules.items():
        if not named[pattern]:
            raise RuleError(f"The rule {pattern!r}: {asks!r} names nothing in this step. {_near(graph, pattern)}")
        # Each rule is for those of its ops that no later rule names.
        own = [k for k in named[pattern] if last[k] == pattern]
        if not own:
            later = dict.fromkeys(repr(last[k]) for k in named[pattern])
            raise RuleError(
                f"The rule {pattern!r}: {asks!r} is for ops that later rules name too, and the last rule holds: "
                f"{', '.join(later)}. Put it after them, or leave it out."
            )
        # It binds those that can obey it.
        may = ((k, _runs_no_more(graph, k) if asks == "recompute" else None) for k in own)
        exempt = {k: why for k, why in may if why}
        free = tuple(k for k in own if k not in exempt)
        if not free:
            (k, why), more = next(iter(exempt.items())), f" (and {len(exempt) - 1} more)" if len(exempt) > 1 else ""
            raise RuleError(f"The rule {pattern!r}: {asks!r} cannot be obeyed: {graph.ops[k].name} {why}{more}.")
        bindings.append(Rule(pattern, asks, free, tuple(exempt.items())))
    if not bindings:
        return plain
    pins = {k: rule.pin for rule in bindings if rule.pin for k in rule.ops}
    ops = tuple(op if op.pinned else replace(op, pinned=pins.get(k)) for k, op in enumerate(graph.ops))
    next_split = None if plain.next_split is None else partial(ruled, plain.next_split, dict(rules))
    return replace(plain, graph=replace(graph, ops=ops), rules=tuple(bindings), next_split=next_split)


def ruled(next_split: Callable[[], Problem | None], rules: Rules) -> Problem | None:
    """Apply rules to the step's further split; None if they name nothing in it."""
    problem = next_split()
    try:
        return None if problem is None else with_rules(problem, rules)
    except RuleError as error:
        log.info("the step is not split: %s", error)
        return None


def read_rules(texts: Iterable[str]) -> dict[str, Ask]:
    """Parse rules as a command line gives them.

    Raises:
        RuleError: if one has no pattern, or asks for nothing that there is.

    >>> read_rules(["blocks.3=keep", "aten.mm=2"])
    {'blocks.3': 'keep', 'aten.mm': 2}
    """
    pairs = [text.rpartition("=") for text in texts]
    rules: dict[str, Ask] = {pattern: int(asks) if asks.isdecimal() else asks for pattern, _, asks in pairs}
    check(rules)
    return rules


def without_rules(problem: Problem) -> Problem:
    """The problem without rules."""
    if not problem.rules:
        return problem
    pins = {rule.pin for rule in problem.rules} - {None}
    ops = tuple(replace(op, pinned=None) if op.pinned in pins else op for op in problem.graph.ops)
    next_split = problem.next_split
    if isinstance(next_split, partial) and next_split.func is ruled:  # also of splits in which the rules name nothing
        next_split = next_split.args[0]
    elif next_split is not None:
        next_split = partial(ruled, next_split, {})
    return replace(problem, graph=replace(problem.graph, ops=ops), rules=(), next_split=next_split)


def as_mapping(problem: Problem) -> dict[str, Ask]:
    """The rules of a problem as the user gave them."""
    return {rule.pattern: rule.asks for rule in problem.rules}


def check(rules: object) -> None:
    """Raise a RuleError for rules that are wrong for any step."""
    if not isinstance(rules, Mapping):
        raise RuleError(f'Rules are a dict of patterns, such as {{"blocks.3": "keep"}}, not {rules!r}.')
    for pattern, asks in rules.items():
        if not isinstance(pattern, str) or not pattern:
            raise RuleError(f"A rule is for a pattern of names, such as 'blocks.3.*', not for {pattern!r}.")
        is_count = isinstance(asks, int) and not isinstance(asks, bool) and asks >= 1
        if not is_count and not (isinstance(asks, str) and asks in WORDS):
            near = difflib.get_close_matches(asks, WORDS, 1) if isinstance(asks, str) else []
            meant = f" Did you mean {near[0]!r}?" if near else ""
            words = ", ".join(map(repr, WORDS))
            raise RuleError(
                f"The rule for {pattern!r} is {asks!r}: a rule is one of {words}, or how often an op may run at most, "
                f"1 or more.{meant}"
            )


def names_any(pattern: str, graph: Graph) -> bool:
    """Tell whether a pattern names an op of a graph."""
    return any(_names(pattern, op) for op in graph.ops)


def _runs_no_more(graph: Graph, k: int) -> str | None:
    """The reason why an op cannot run again in the backward; None if it can."""
    op = graph.ops[k]
    if op.phase == "backward":
        return "is in the backward"
    if op.pinned:
        return op.pinned
    if (by := last_stages(graph).get(k, len(graph.ops))) < graph.forward_length:
        return f"reads what {graph.ops[by].name} overwrites in the forward"
    return "makes a result of the step" if set(op.outputs) & set(graph.outputs) else None


def _names(pattern: str, op: Op) -> bool:
    """Tell whether a pattern names an op: by its target, a tag, or, in the forward, its module."""
    return any(fnmatchcase(name, pattern) for name in (*_targets(op), *op.tags, *_modules(op)))


def _targets(op: Op) -> tuple[str, ...]:
    """``aten.mm.default`` and ``aten.mm``."""
    packet, _, overload = op.target.rpartition(".")
    return (op.target, packet) if packet.count(".") and overload else (op.target,)


def _modules(op: Op) -> list[str]:
    """The module of a forward op, and those around it: ``h.3.attn``, ``h.3``, ``h``."""
    parts = op.place.module.split(".") if op.place.module and op.phase == "forward" else []
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def _near(graph: Graph, pattern: str) -> str:
    """The names in the step nearest to a pattern, and the kinds of names there are."""
    names: dict[str, None] = {}
    for op in graph.ops:
        names |= dict.fromkeys((*op.tags, *_modules(op), *_targets(op)[::-1]))
    stem = pattern.rstrip("*?.")
    near = difflib.get_close_matches(stem, names, NEAR)
    near = near or [name for name in names if stem and stem.lower() in name.lower()][:NEAR]
    if near:
        return f"Near it: {', '.join(map(repr, near))}."
    outer = dict.fromkeys(modules[-1] for op in graph.ops if (modules := _modules(op)))
    tags = dict.fromkeys(tag for op in graph.ops for tag in op.tags)
    parts = [f"{kind}: {', '.join(map(repr, names))}" for kind, names in (("modules", outer), ("tags", tags)) if names]
    return f"It has {'; '.join([*parts, 'ops such as ' + repr(_targets(graph.ops[0])[-1])])}."
