"""Limits on plans from rules and overwrites: how often and until when ops run, which values must be remade.

A rule that lets an op run once pins it, as an op is pinned that draws random numbers: `checkmate.core.graph.Op.pinned`
says so in its words. The others are two limits of their own: how often an op may run, and which values are not at hand
when the backward begins. `checkmate.core.rules` makes them of patterns.

A third comes from the graph: an op must not run after another one has overwritten what it reads, as the update of a
parameter does. `checkmate.core.simulator.check_plan` holds plans against all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from checkmate.core.graph import Graph
from checkmate.errors import RuleError

WORDS = ("keep", "once", "recompute")
Ask = str | int  # one of these, or the most runs in a step


@dataclass(frozen=True)
class Rule:
    """A pattern, the demand on the ops that it names, and these ops."""

    pattern: str
    asks: Ask
    ops: tuple[int, ...]  # the ops bound, ascending
    exempt: tuple[tuple[int, str], ...] = ()  # ops that it names and cannot bind, with why

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.pattern, *(why for _, why in self.exempt))):
            raise RuleError(f"The rule {self.text} has a pattern or a reason that is no text.")
        if self.asks not in WORDS and (type(self.asks) is not int or self.asks < 1):
            raise RuleError(
                f"The rule {self.text} asks for none of {', '.join(map(repr, WORDS))}, or a number of runs."
            )

    @property
    def text(self) -> str:
        """The rule as the user writes it: ``'blocks.3.*': 'once'``."""
        return f"{self.pattern!r}: {self.asks!r}"

    @property
    def pin(self) -> str | None:
        """The reason why its ops run once, in `Op.pinned`'s words; None if they may run again."""
        return f"is under the rule {self.text}" if self.asks in ("keep", "once", 1) else None


@dataclass(frozen=True)
class Limits:
    """The runs and values that plans must not have, pinned ops aside."""

    max_runs: Mapping[int, int] = field(default_factory=dict)  # op -> times in a step, 2 or more
    recomputed: frozenset[int] = frozenset()  # values that are not at hand when the backward begins
    last_stage: Mapping[int, int] = field(default_factory=dict)  # op -> the last stage in which it may run
    closing: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # such a stage -> what later ones may miss

    def __bool__(self) -> bool:
        return bool(self.max_runs or self.recomputed or self.last_stage)

    @classmethod
    def of(cls, graph: Graph, rules: Iterable[Rule]) -> Limits:
        """Collect the limits that rules and the graph set."""
        max_runs: dict[int, int] = {}
        recomputed: set[int] = set()
        has_backward = 0 < graph.forward_length < len(graph.ops)
        for rule in rules:
            if rule.asks == "recompute" and has_backward:
                recomputed.update(v for k in rule.ops for v in graph.ops[k].outputs)
            elif isinstance(rule.asks, int) and rule.pin is None:
                max_runs.update(dict.fromkeys(rule.ops, rule.asks))
        last = last_stages(graph)
        # Values that cannot be made again after each stage and may be read then; less results of the step.
        closing: dict[int, tuple[int, ...]] = {}
        read = lives(graph, last)[1] if last else []
        for k, stage in last.items():
            later = tuple(v for v in graph.ops[k].outputs if v not in graph.outputs and read[v] > stage)
            if later:
                closing[stage] = (*closing.get(stage, ()), *later)
        return cls(dict(sorted(max_runs.items())), frozenset(recomputed), last, closing)


def last_stages(graph: Graph) -> dict[int, int]:
    """For each op that reads a value overwritten later, the last stage in which it may run.

    Pinned ops are left out: they run in their own stage only.

    >>> from checkmate.core.problem import Problem
    >>> last_stages(Problem.from_dag([[], [0], [1], [0]], [1] * 4, [1] * 4, overwrites={2: [0, 1]}).graph)
    {0: 2, 1: 2}
    """
    stages: dict[int, int] = {}
    for v, by in graph.overwritten_by.items():
        for k in graph.users[v]:
            if k < by and graph.ops[k].pinned is None:
                stages[k] = min(by, stages.get(k, by))
    return dict(sorted(stages.items()))


def lives(graph: Graph, last: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """The last stage in which a run of each op can be useful, and the last that can read each value.

    Results of the step are at hand in any case, and not made again to be read.

    Args:
        last: for some ops the last stage in which they may run, as `last_stages` gives it.
    """
    results = set(graph.outputs)
    useful, read = list(range(len(graph.ops))), [-1] * len(graph.values)
    for k in reversed(range(len(graph.ops))):
        op = graph.ops[k]
        if op.pinned is None:
            latest = max([k, *(read[v] for v in op.outputs if v not in results)])
            useful[k] = min(latest, last.get(k, latest))
        for v in op.inputs:
            read[v] = max(read[v], useful[k])
    return useful, read
