"""checkmate: train within a byte budget, at the least recomputation that can be proven.

The data types and the solvers work without PyTorch; it is imported by `compile` and `trace`, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkmate.errors import (
    BudgetError,
    CheckmateError,
    InfeasibleBudget,
    InvalidProblem,
    SolverError,
    Unsupported,
    VerificationError,
)
from checkmate.graph import Graph, Op, Value
from checkmate.plan import Plan
from checkmate.problem import Problem, Profile
from checkmate.schedule import Schedule
from checkmate.solution import Solution, Status
from checkmate.units import parse_bytes
from checkmate.version import __version__ as __version__

if TYPE_CHECKING:
    from checkmate import memory as memory
    from checkmate import plot as plot
    from checkmate.batch import max_batch_size
    from checkmate.compiler import compile, trace, verify
    from checkmate.costs import Costs, profile
    from checkmate.difference import Difference, diff
    from checkmate.explanation import Explanation, explain
    from checkmate.peak import PeakExplanation
    from checkmate.solvers.catalogue import methods
    from checkmate.solvers.frontier import Frontier, frontier
    from checkmate.solvers.solve import solve
    from checkmate.throughput import LargestBatch
    from checkmate.verification import Certificate

__all__ = [
    "BudgetError",
    "Certificate",
    "CheckmateError",
    "Costs",
    "Difference",
    "Explanation",
    "Frontier",
    "Graph",
    "InfeasibleBudget",
    "InvalidProblem",
    "LargestBatch",
    "Op",
    "PeakExplanation",
    "Plan",
    "Problem",
    "Profile",
    "Schedule",
    "Solution",
    "SolverError",
    "Status",
    "Unsupported",
    "Value",
    "VerificationError",
    "compile",
    "diff",
    "explain",
    "frontier",
    "max_batch_size",
    "methods",
    "parse_bytes",
    "profile",
    "solve",
    "trace",
    "verify",
]

_LAZY = {
    "Certificate": "checkmate.verification",
    "Costs": "checkmate.costs",
    "Difference": "checkmate.difference",
    "Explanation": "checkmate.explanation",
    "Frontier": "checkmate.solvers.frontier",
    "PeakExplanation": "checkmate.peak",
    "LargestBatch": "checkmate.throughput",
    "compile": "checkmate.compiler",
    "diff": "checkmate.difference",
    "explain": "checkmate.explanation",
    "frontier": "checkmate.solvers.frontier",
    "max_batch_size": "checkmate.batch",
    "methods": "checkmate.solvers.catalogue",
    "profile": "checkmate.costs",
    "solve": "checkmate.solvers.solve",
    "trace": "checkmate.compiler",
    "verify": "checkmate.compiler",
}


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch or a solver when it is first asked for (PEP 562)."""
    if name in ("memory", "plot"):
        return import_module(f"checkmate.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = attribute = getattr(import_module(_LAZY[name]), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
