"""checkmate: train within a byte budget, at the least recomputation that can be proven.

The data types and the solvers work without PyTorch; it is imported by `compile` and `trace`, when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkmate import errors as errors
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
from checkmate.units import parse_bytes as parse_bytes
from checkmate.version import __version__ as __version__

if TYPE_CHECKING:
    from checkmate import memory as memory
    from checkmate import plot as plot
    from checkmate.compiler import compile as compile
    from checkmate.compiler import verify as verify
    from checkmate.host.homes import in_file as in_file
    from checkmate.look.addresses import addresses as addresses
    from checkmate.look.difference import diff as diff
    from checkmate.look.page import report as report
    from checkmate.look.peak import explain_peak as explain_peak
    from checkmate.sizes.fits import fits as fits
    from checkmate.sizes.max_batch_size import max_batch_size as max_batch_size
    from checkmate.solvers.catalogue import methods as methods
    from checkmate.solvers.frontier import frontier as frontier
    from checkmate.solvers.search.min_budget import min_budget as min_budget
    from checkmate.solvers.solve import solve as solve
    from checkmate.step_costs import costs as costs
    from checkmate.tags import tag as tag
    from checkmate.tracing import explain as explain
    from checkmate.tracing import trace as trace
    from checkmate.training import TrainingStep as TrainingStep
    from checkmate.training import training_step as training_step

_LAZY = {  # names that need PyTorch or a solver, by module
    name: f"checkmate.{module}"
    for module, names in {
        "compiler": "compile verify",
        "host.homes": "in_file",
        "look.addresses": "addresses",
        "look.difference": "diff",
        "look.peak": "explain_peak",
        "sizes.fits": "fits",
        "sizes.max_batch_size": "max_batch_size",
        "solvers.catalogue": "methods",
        "solvers.frontier": "frontier",
        "solvers.search.min_budget": "min_budget",
        "solvers.solve": "solve",
        "step_costs": "costs",
        "tags": "tag",
        "tracing": "explain trace",
        "training": "TrainingStep training_step",
        "look.page": "report",
    }.items()
    for name in names.split()
}
_MOVED = {  # names of before, which the error of whoever still writes them tells the place of
    "profile": "costs",
    **{error.__name__: f"errors.{error.__name__}" for error in errors.CheckmateError.__subclasses__()},
    "CheckmateError": "errors.CheckmateError",
    **{
        name: f"{module}.{name}"
        for module, names in {
            "look.addresses": "Addresses",
            "look.difference": "Difference",
            "look.costs": "Costs Explanation",
            "look.peak": "PeakExplanation",
            "sizes.fits_page": "Fits",
            "sizes.largest_batch": "LargestBatch",
            "solvers.frontier": "Frontier",
            "solvers.search.min_budget": "MinBudget",
            "verification.compare": "Certificate",
        }.items()
        for name in names.split()
    },
}
__all__ = sorted({*_LAZY, *(name for name, it in vars().items() if getattr(it, "__module__", "").startswith(__name__))})


def __getattr__(name: str) -> Any:
    """Import what needs PyTorch or a solver when it is first asked for (PEP 562)."""
    if name in ("memory", "plot"):
        return import_module(f"checkmate.{name}")
    if name not in _LAZY:
        module, _, attribute = f"{__name__}.{_MOVED.get(name, '')}".rpartition(".")
        advice = f"; write from {module} import {attribute}" if attribute else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
    globals()[name] = attribute = getattr(import_module(_LAZY[name]), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
