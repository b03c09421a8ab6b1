"""checkmate: train within a byte budget, at the least recomputation that can be proven.

The data types and the solvers work without PyTorch; it is imported by `compile` and `trace`, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.host import Host
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem, Profile
from checkmate.core.schedule import Schedule
from checkmate.core.solution import Solution, Status
from checkmate.errors import (
    BudgetError,
    CheckmateError,
    HostError,
    InfeasibleBudget,
    InvalidProblem,
    RuleError,
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
    from checkmate.compiler import compile, verify
    from checkmate.costs import profile
    from checkmate.inspection.addresses import Addresses, addresses
    from checkmate.inspection.difference import Difference, diff
    from checkmate.inspection.explanation import Explanation
    from checkmate.inspection.op_costs import Costs
    from checkmate.inspection.peak import PeakExplanation, explain_peak
    from checkmate.solvers.catalogue import methods
    from checkmate.solvers.frontier import Frontier, frontier
    from checkmate.solvers.search.min_budget import MinBudget, min_budget
    from checkmate.solvers.solve import solve
    from checkmate.tags import tag
    from checkmate.tracing import explain, trace
    from checkmate.training import TrainingStep, training_step
    from checkmate.verification.compare import Certificate
    from checkmate.webpage.page import report

__all__ = [
    "Addresses",
    "BudgetError",
    "Certificate",
    "CheckmateError",
    "Costs",
    "Difference",
    "Explanation",
    "Frontier",
    "Graph",
    "Host",
    "HostError",
    "InfeasibleBudget",
    "InvalidProblem",
    "LargestBatch",
    "MinBudget",
    "Op",
    "PeakExplanation",
    "Plan",
    "Problem",
    "Profile",
    "RuleError",
    "Schedule",
    "Solution",
    "SolverError",
    "Status",
    "TrainingStep",
    "Unsupported",
    "Value",
    "VerificationError",
    "addresses",
    "compile",
    "diff",
    "explain",
    "explain_peak",
    "frontier",
    "max_batch_size",
    "methods",
    "min_budget",
    "parse_bytes",
    "profile",
    "report",
    "solve",
    "tag",
    "trace",
    "training_step",
    "verify",
]

_LAZY = {
    "Addresses": "checkmate.inspection.addresses",
    "Certificate": "checkmate.verification.compare",
    "Costs": "checkmate.inspection.op_costs",
    "Difference": "checkmate.inspection.difference",
    "Explanation": "checkmate.inspection.explanation",
    "Frontier": "checkmate.solvers.frontier",
    "LargestBatch": "checkmate.batch.result",
    "MinBudget": "checkmate.solvers.search.min_budget",
    "PeakExplanation": "checkmate.inspection.peak",
    "TrainingStep": "checkmate.training",
    "addresses": "checkmate.inspection.addresses",
    "compile": "checkmate.compiler",
    "diff": "checkmate.inspection.difference",
    "explain": "checkmate.tracing",
    "explain_peak": "checkmate.inspection.peak",
    "frontier": "checkmate.solvers.frontier",
    "max_batch_size": "checkmate.batch.search",
    "methods": "checkmate.solvers.catalogue",
    "min_budget": "checkmate.solvers.search.min_budget",
    "profile": "checkmate.costs",
    "report": "checkmate.webpage.page",
    "solve": "checkmate.solvers.solve",
    "tag": "checkmate.tags",
    "trace": "checkmate.tracing",
    "training_step": "checkmate.training",
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
