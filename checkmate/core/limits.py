"""What a person asks of a plan beside its budget, as it binds a problem: rules, and the ops that each of them is for.

A rule that lets an op run once pins it, as an op is pinned that draws random numbers: `checkmate.core.graph.Op.pinned`
says so in its words. The others are two limits of their own: how often an op may run, and which values are not at hand
when the backward begins. `checkmate.core.rules` makes them of patterns; `checkmate.core.simulator.verify` holds plans
against them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from checkmate.core.graph import Graph

Ask = str | int  # "keep", "once", "recompute", or the most runs in a step


@dataclass(frozen=True)
class Rule:
    """A pattern, what is asked of the ops that it names, and which ops these are."""

    pattern: str
    asks: Ask
    ops: tuple[int, ...]  # that it binds, ascending
    exempt: tuple[tuple[int, str], ...] = ()  # ops that it names and cannot bind, with why

    @property
    def text(self) -> str:
        """The rule as it is written: ``'blocks.3.*': 'once'``."""
        return f"{self.pattern!r}: {self.asks!r}"

    @property
    def pin(self) -> str | None:
        """Why its ops run once, in the words of `Op.pinned`; None: they may run again."""
        if self.asks in ("keep", "once", 1):
            return f"is under the rule {self.text}"
        return None


@dataclass(frozen=True)
class Limits:
    """What rules forbid, beside runs of pinned ops."""

    most_runs: Mapping[int, int] = field(default_factory=dict)  # op -> times in a step, 2 or more
    gone: frozenset[int] = frozenset()  # values that are not at hand when the backward begins

    def __bool__(self) -> bool:
        return bool(self.most_runs or self.gone)

    @classmethod
    def of(cls, graph: Graph, rules: Iterable[Rule]) -> Limits:
        """The limits that rules set. Without a backward nothing is gone before it."""
        most_runs: dict[int, int] = {}
        gone: set[int] = set()
        for rule in rules:
            if rule.asks == "recompute":
                gone.update(v for k in rule.ops for v in graph.ops[k].outputs)
            elif isinstance(rule.asks, int) and rule.pin is None:
                most_runs.update(dict.fromkeys(rule.ops, rule.asks))
        has_backward = 0 < graph.forward_length < len(graph.ops)
        return cls(dict(sorted(most_runs.items())), frozenset(gone) if has_backward else frozenset())
