"""The errors of checkmate, each with the way out in its message."""

from __future__ import annotations

from functools import partial
from typing import Any


class CheckmateError(Exception):
    """The base class of all errors that checkmate raises on purpose."""


class BudgetError(CheckmateError, ValueError):
    """A budget that is neither a positive number of bytes nor a share of the free memory."""


class InvalidProblem(CheckmateError, ValueError):
    """A graph, profile or file that describes no solvable problem; the message names the offender."""


class RuleError(CheckmateError, ValueError):
    """An invalid rule, or one that names nothing in the step; the message lists near names."""


class InfeasibleBudget(CheckmateError):
    """No schedule fits the budget: none that runs each op once a stage at most, in PyTorch's order.

    Attributes:
        budget: the bytes asked for.
        min_budget: the smallest budget in bytes for which a plan is known.
        op: name of the operation that stands in the way.
    """

    def __init__(self, message: str, *, budget: int, min_budget: int, op: str) -> None:
        super().__init__(message)
        self.budget = budget
        self.min_budget = min_budget
        self.op = op

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(InfeasibleBudget, budget=self.budget, min_budget=self.min_budget, op=self.op), self.args

    def saying(self, words: str, budget: int | None = None, beside: int = 0) -> InfeasibleBudget:
        """The same refusal with more words, of a larger budget, if so many of its bytes were for something beside."""
        budget = self.budget if budget is None else budget
        return InfeasibleBudget(f"{self} {words}", budget=budget, min_budget=self.min_budget + beside, op=self.op)


class Unsupported(CheckmateError):
    """A program that cannot be captured or rematerialized; the message says where and what to do instead."""


class SolverError(CheckmateError):
    """A solver's answer failed the independent verifier."""


class VerificationError(CheckmateError):
    """A compiled step whose numbers or peak differ from the promise."""


class HostError(CheckmateError):
    """A second memory, such as a file, that is not available or failed while a step used it."""
