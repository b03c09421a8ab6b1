"""The second memory that a shell asks for: ``--host-budget 10GB --host-rate 55GB/s``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from checkmate.cli.target import UsageError
from checkmate.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from checkmate.core.host import Host
    from checkmate.core.problem import Problem


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Options by which values may wait elsewhere."""
    parser.add_argument("--host-budget", metavar="BYTES", help="of a second memory, in which values may wait")
    parser.add_argument(
        "--host-rate", metavar="RATE[,RATE]", help="of the link there, and back if that differs, such as 55GB/s,50GB/s"
    )
    parser.add_argument("--host-one-link", action="store_true", help="both directions wait for each other")


def host_of(args: argparse.Namespace) -> dict[str, Any]:
    """What is said of a second memory, by the names of `checkmate.core.host.Host`; empty where nothing is.

    Raises:
        UsageError: if there are not one or two rates.
        BudgetError, ValueError: if a number is none.

    >>> host_of(argparse.Namespace(host_budget="1 GB", host_rate="2 GB/s,1 GB/s", host_one_link=False))
    {'budget': 1000000000, 'send': 2000000000.0, 'fetch': 1000000000.0}
    """
    said: dict[str, Any] = {}
    if args.host_budget is not None:
        said["budget"] = parse_bytes(args.host_budget)
    if args.host_rate is not None:
        there, *back = map(parse_rate, args.host_rate.split(","))
        if len(back) > 1:
            raise UsageError(f"--host-rate takes one rate, or one there and one back, not {args.host_rate!r}")
        said.update(send=there, fetch=back[0] if back else there)
    if args.host_one_link:
        said["one_link"] = True
    return said


def asked_host(args: argparse.Namespace, known: Host | None = None) -> Host | None:
    """The second memory asked for; what is not said of it stays as it is known.

    Raises:
        UsageError: if a budget or a rate is missing.
    """
    said = host_of(args)
    if not said:
        return known
    from checkmate.core.host import Host

    if known is not None:
        return replace(known, **said)
    for name, option in (("budget", "--host-budget"), ("send", "--host-rate")):
        if name not in said:
            raise UsageError(f"a second memory needs {option}, too: none is known")
    return Host(**said)


def with_host(args: argparse.Namespace, problem: Problem) -> Problem:
    """The problem with the second memory asked for; what is not said stays as the problem's file has it.

    Raises:
        UsageError: if a budget or a rate is missing.
    """
    host = asked_host(args, problem.host)
    return problem if host is problem.host else problem.with_host(host)
