"""checkmate: train within a byte budget, at the least recomputation that can be proven.

The data types and the solvers work without PyTorch; it is imported by `compile` and `trace`, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem, Profile
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.errors import (
    BudgetError,
    CheckmateError,
    InfeasibleBudget,
    InvalidProblem,
    SolverError,
    Unsupported,
    VerificationError,
)
from checkmate.units import parse_bytes
from checkmate.version import __version__ as __version__

if TYPE_CHECKING:
    from checkmate import memory as memory
    from checkmate import plot as plot
    from checkmate.batch.result import LargestBatch
    from checkmate.batch.search import max_batch_size
    from checkmate.compiler import compile, trace, verify
    from checkmate.inspection.difference import Difference, diff
    from checkmate.inspection.explanation import Explanation, explain
    from checkmate.inspection.op_costs import Costs, profile
    from checkmate.inspection.peak import PeakExplanation
    from checkmate.solvers.catalogue import methods
    from checkmate.solvers.frontier import Frontier, frontier
    from checkmate.solvers.solve import solve
    from checkmate.verification.compare import Certificate

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
    "Certificate": "checkmate.verification.compare",
    "Costs": "checkmate.inspection.op_costs",
    "Difference": "checkmate.inspection.difference",
    "Explanation": "checkmate.inspection.explanation",
    "Frontier": "checkmate.solvers.frontier",
    "PeakExplanation": "checkmate.inspection.peak",
    "LargestBatch": "checkmate.batch.result",
    "compile": "checkmate.compiler",
    "diff": "checkmate.inspection.difference",
    "explain": "checkmate.inspection.explanation",
    "frontier": "checkmate.solvers.frontier",
    "max_batch_size": "checkmate.batch.search",
    "methods": "checkmate.solvers.catalogue",
    "profile": "checkmate.inspection.op_costs",
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
