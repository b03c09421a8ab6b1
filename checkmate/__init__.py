"""checkmate: train within a byte budget, at the least recomputation that can be proven.

The data types and the solvers work without PyTorch; it is imported by `compile` and `trace`, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkmate.core.graph import Graph as Graph
from checkmate.core.graph import Op as Op
from checkmate.core.graph import Value as Value
from checkmate.core.host import Host as Host
from checkmate.core.plan import Plan as Plan
from checkmate.core.problem import Problem as Problem
from checkmate.core.problem import Profile as Profile
from checkmate.core.schedule import Schedule as Schedule
from checkmate.core.solution import Solution as Solution
from checkmate.core.solution import Status as Status
from checkmate.errors import BudgetError as BudgetError
from checkmate.errors import CheckmateError as CheckmateError
from checkmate.errors import HostError as HostError
from checkmate.errors import InfeasibleBudget as InfeasibleBudget
from checkmate.errors import InvalidProblem as InvalidProblem
from checkmate.errors import RuleError as RuleError
from checkmate.errors import SolverError as SolverError
from checkmate.errors import Unsupported as Unsupported
from checkmate.errors import VerificationError as VerificationError
from checkmate.units import parse_bytes as parse_bytes
from checkmate.version import __version__ as __version__

if TYPE_CHECKING:
    from checkmate import memory as memory
    from checkmate import plot as plot
    from checkmate.compiler import compile as compile
    from checkmate.compiler import verify as verify
    from checkmate.costs import profile as profile
    from checkmate.host.homes import in_file as in_file
    from checkmate.inspection.addresses import Addresses as Addresses
    from checkmate.inspection.addresses import addresses as addresses
    from checkmate.inspection.difference import Difference as Difference
    from checkmate.inspection.difference import diff as diff
    from checkmate.inspection.explanation import Explanation as Explanation
    from checkmate.inspection.op_costs import Costs as Costs
    from checkmate.inspection.peak import PeakExplanation as PeakExplanation
    from checkmate.inspection.peak import explain_peak as explain_peak
    from checkmate.sizes.fits import fits as fits
    from checkmate.sizes.fits_page import Fits as Fits
    from checkmate.sizes.largest_batch import LargestBatch as LargestBatch
    from checkmate.sizes.max_batch_size import max_batch_size as max_batch_size
    from checkmate.solvers.catalogue import methods as methods
    from checkmate.solvers.frontier import Frontier as Frontier
    from checkmate.solvers.frontier import frontier as frontier
    from checkmate.solvers.search.min_budget import MinBudget as MinBudget
    from checkmate.solvers.search.min_budget import min_budget as min_budget
    from checkmate.solvers.solve import solve as solve
    from checkmate.tags import tag as tag
    from checkmate.tracing import explain as explain
    from checkmate.tracing import trace as trace
    from checkmate.training import TrainingStep as TrainingStep
    from checkmate.training import training_step as training_step
    from checkmate.verification.compare import Certificate as Certificate
    from checkmate.webpage.page import report as report

_LAZY = {  # names that need PyTorch or a solver, by module
    name: f"checkmate.{module}"
    for module, names in {
        "compiler": "compile verify",
        "costs": "profile",
        "host.homes": "in_file",
        "inspection.addresses": "Addresses addresses",
        "inspection.difference": "Difference diff",
        "inspection.explanation": "Explanation",
        "inspection.op_costs": "Costs",
        "inspection.peak": "PeakExplanation explain_peak",
        "sizes.fits": "fits",
        "sizes.fits_page": "Fits",
        "sizes.largest_batch": "LargestBatch",
        "sizes.max_batch_size": "max_batch_size",
        "solvers.catalogue": "methods",
        "solvers.frontier": "Frontier frontier",
        "solvers.search.min_budget": "MinBudget min_budget",
        "solvers.solve": "solve",
        "tags": "tag",
        "tracing": "explain trace",
        "training": "TrainingStep training_step",
        "verification.compare": "Certificate",
        "webpage.page": "report",
    }.items()
    for name in names.split()
}
__all__ = sorted({*_LAZY, *(name for name, it in vars().items() if getattr(it, "__module__", "").startswith(__name__))})


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
