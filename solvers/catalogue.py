"""The table of methods that `solve` knows by name, one line each."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checkmate.core.answer import Table
from checkmate.solvers.auto import auto
from checkmate.solvers.baselines.checkpointing import checkpoint_all, greedy, last_node, sqrt
from checkmate.solvers.baselines.dtr import dtr
from checkmate.solvers.baselines.griewank import griewank
from checkmate.solvers.baselines.min_cut import min_cut
from checkmate.solvers.baselines.rotor import rotor
from checkmate.solvers.common.incumbent import Remarks
from checkmate.solvers.host.exact import exact, poet
from checkmate.solvers.host.policies import capuchin, offload_all
from checkmate.solvers.linear.milp import lp_rounding
from checkmate.solvers.search.greedy import next_use

JAIN = "Jain et al., MLSys 2020"
CHEN = "Chen et al., 2016"
BELADY = "Belady 1966, offline"
KIRISAME = "Kirisame et al., ICLR 2021"
GRIEWANK = "Griewank and Walther, 2000"
HOOKS = "what hooks on saved tensors do"
PENG = "Peng et al., ASPLOS 2020"
PATIL = "Patil et al., ICML 2022"
WIDTH = 110  # characters of a line
COMMON: dict[str, object] = {"time_limit": 60.0, "gap": 1e-4, "threads": 1, "seed": 0}  # options, with their defaults
ALL = tuple(COMMON)
TIMED, SEEDED = ("time_limit",), ("time_limit", "seed")
BESIDE: dict[str, Any] = {"sends": True, "needs_host": True}
SOLVER, RELAXED = ("time_limit", "gap", "threads"), ("time_limit", "threads")


@dataclass(frozen=True)
class Method:
    """A way to solve a problem."""

    name: str
    summary: str
    source: str
    run: Callable[..., Remarks] = field(repr=False)  # of a task, the incumbent to offer plans to, and its own options
    heeds: tuple[str, ...] = ()  # the common options that it follows
    sends: bool = False  # it knows of a second memory; what others prove does not hold with one
    needs_host: bool = False  # it is for problems with a second memory only
    homes: bool = False  # it knows of values that are at home there

    @property
    def defaults(self) -> dict[str, object]:
        """The options that the method takes, with their defaults."""
        parameters = inspect.signature(self.run).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return {**{name: COMMON[name] for name in self.heeds}, **own}

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that the method takes."""
        return tuple(self.defaults)


_TABLE = (
    Method(
        "auto",
        "several methods in turn: a plan, a bound, then closing the gap",
        JAIN,
        auto,
        ALL,
        sends=True,
        homes=True,
    ),
    Method("checkpoint-all", "keep everything, run nothing twice", "what PyTorch does", checkpoint_all),
    Method("last-node", "keep only what the op before made: the most recomputation", JAIN, last_node),
    Method("chen-sqrt", "on a chain of n ops, a checkpoint at every √n-th", CHEN, sqrt("chain")),
    Method("chen-greedy", "on a chain, one wherever the bytes since the last exceed b", CHEN, greedy("chain"), TIMED),
    Method("ap-sqrt", "of n articulation points, a checkpoint at every √n-th", JAIN, sqrt("ap")),
    Method("ap-greedy", "the same where the bytes since the last exceed b", JAIN, greedy("ap"), TIMED),
    Method("linearized-sqrt", "of n forward ops, a checkpoint at every √n-th", JAIN, sqrt("linearized")),
    Method("linearized-greedy", "the same where the bytes since the last exceed b", JAIN, greedy("linearized"), TIMED),
    Method("griewank", "on a chain, binomial checkpoints in as many slots as fit", GRIEWANK, griewank, TIMED),
    Method("next-use", "evict what is cheap to bring back and far from its next use", BELADY, next_use, SEEDED),
    Method("dtr", "evict at run time by one of six scores, and plan what that would run", KIRISAME, dtr, TIMED),
    Method("rotor", "the optimal persistent checkpoints of a chain of segments", "Beaumont et al., 2019", rotor, TIMED),
    Method("min-cut", "save a minimum cut between forward and backward", "He, AOTAutograd, 2022", min_cut, TIMED),
    Method("milp", "the integer program over R, S, U and FREE, exactly", JAIN, exact, SOLVER, sends=True, homes=True),
    Method("lp-rounding", "its linear relaxation, rounded in two phases", f"{JAIN}, Section 5", lp_rounding, RELAXED),
    Method("offload-all", "send all that the backward reads to a second memory", HOOKS, offload_all, **BESIDE),
    Method("capuchin", "swap what is unused for long, recompute what is cheap", PENG, capuchin, TIMED, **BESIDE),
    Method("poet", "recompute and page in one integer program, on one device", PATIL, poet, SOLVER, **BESIDE),
)
METHODS = {method.name: method for method in _TABLE}


class Catalogue(dict[str, Method]):
    """The methods by name; prints as a list, and is a table in a notebook."""

    def __repr__(self) -> str:
        column = max(map(len, self), default=0) + 2
        lines = []
        for name, method in self.items():
            lines += _wrapped(f"{name:<{column}}{method.summary}", column)
            lines += _wrapped(" " * column + f"source:  {method.source}", column + 9)
            lines += _wrapped(" " * column + f"options: {_options(method)}", column + 9)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(name, method.summary, method.source, _options(method)) for name, method in self.items()]
        return Table(("method", "what it does", "source", "options"), rows).html()


def methods() -> Catalogue:
    """List the methods of `checkmate.solve`, each with its summary, source and options.

    >>> "milp" in methods(), methods()["milp"].source
    (True, 'Jain et al., MLSys 2020')
    """
    return Catalogue(METHODS)


def _options(method: Method) -> str:
    return ", ".join(f"{name}={default!r}" for name, default in method.defaults.items()) or "none"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True, replace_whitespace=False)
