"""The errors of checkmate, each with the way out in its message."""

from __future__ import annotations


class CheckmateError(Exception):
    """The parent of every error raised on purpose by checkmate."""


class BudgetError(CheckmateError, ValueError):
    """A budget that is neither a positive number of bytes nor a share of the free memory."""


class InvalidProblem(CheckmateError, ValueError):
    """A graph, a profile or a file that describes no solvable problem; names the offender."""


class RuleError(CheckmateError, ValueError):
    """A rule that is none, or that names nothing in the step; it says what is near."""


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


class Unsupported(CheckmateError):
    """A program that cannot be captured or rematerialized; says where and what to do instead."""


class SolverError(CheckmateError):
    """A solver broke its promise: its answer failed the independent verifier."""


class VerificationError(CheckmateError):
    """A compiled step whose numbers or whose peak differ from what was promised."""


class HostError(CheckmateError):
    """A second memory, such as a file, that cannot be had, or that failed while a step used it."""
