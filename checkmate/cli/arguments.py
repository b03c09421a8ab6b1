"""The options of all commands, each defined once, and parsers for their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from checkmate import batch
from checkmate.cli.target import UsageError
from checkmate.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from checkmate.core.host import Host


def size(text: str) -> int:
    """A batch size, or another count: a whole number of at least 1.

    >>> size("12")
    12
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def overhead(text: str) -> float | str | None:
    """A cap on recomputation, as `checkmate.max_batch_size` takes it.

    >>> overhead("none"), overhead("one-forward"), overhead("0.3")
    (None, 'one-forward', 0.3)
    """
    if text in ("none", "one-forward"):
        return None if text == "none" else text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither one-forward, none nor a share such as 0.3") from None


def option(metavar: str | None = None, says: str | None = None, **more: Any) -> dict[str, Any]:
    """An option with a value, for argparse."""
    return {"metavar": metavar, "help": says, **more}


def flag(says: str) -> dict[str, Any]:
    """An option without a value, for argparse."""
    return {"action": "store_true", "help": says}


def seconds(limit: float) -> dict[str, Any]:
    """A limit of time, with its default."""
    return option("S", f"by default {limit:g} s", type=float, default=limit)


OPTIONS: dict[str, dict[str, Any]] = {
    "--json": flag("answer as JSON"),
    "--quiet": flag("show no progress"),
    "--verbose": flag("show all that is logged, on standard error"),
    "--debug": flag("end errors with a traceback"),
    "target": option("TARGET", "module:function"),
    "problem": option("PROBLEM.json"),
    "--device": option("NAME", "estimate for a device such as h100; nothing is allocated here or runs"),
    "--profile": option("OPS.json", "costs that were measured elsewhere"),
    "--size": option("N", "call the function with this size", type=size),
    "--save-problem": option("FILE", "write what was traced, as for checkmate solve"),
    "--budget": option("BYTES", "such as 8GB or 512MiB; where --device names one, also fit or 70%%", required=True),
    "--method": option(says="see checkmate methods", default="auto"),
    "--save-plan": option("FILE", "write the plan, step by step, as JSON"),
    "--report": option("FILE", "write the same plan as one HTML page, too"),
    "-o": option("FILE", "by default the problem's name with .html, in the current folder", dest="out"),
    "--open": flag("show it in the browser"),
    "--everything": flag("all ways and the largest batch, also where something fits"),
    "--frontier": flag("with the cost of other budgets, which takes as many solves"),
    "--prices": flag("with what a little less or more memory would change, which takes two solves"),
    "--rule": option("PATTERN=RULE", "such as 'blocks.3=keep', again for more; see the guide", action="append"),
    "--host-budget": option("BYTES", "of a second memory, in which values may wait"),
    "--host-rate": option("RATE[,RATE]", "of the link there, and back if that differs, such as 55GB/s,50GB/s"),
    "--host-one-link": flag("both directions wait for each other"),
    "--time-limit": seconds(60.0),
    "--gap": option(says="stop at this gap, by default 0.0001", type=float, default=1e-4),
    "--only": option("NAME", "a check by its name, again for more", action="append"),
    "--quick": flag("small networks"),
    "--steps": option("N", "to train in each run, by default 25", type=size, default=25),
    "--methods": option("A,B", "by default auto", default="auto"),
    "--jobs": option("N", "processes at a time", type=size),
    "--max-overhead": option(
        "CAP", "one-forward (default), none, or a share of the step such as 0.3", type=overhead, default="one-forward"
    ),
    "--baselines": flag("find the largest sizes of other methods, too"),
    "--measure": flag("run the step at the answer and measure its peak"),
    "--optimizer": option("CLASS", "of torch.optim, by default AdamW"),
    "--smallest": option("N", type=size, default=1),
    "--largest": option("N", type=size, default=batch.LARGEST),
}


def add_to(parser: argparse.ArgumentParser, names: Iterable[str], changed: Mapping[str, dict[str, Any]]) -> None:
    """Add options to the parser of a command, some changed as the command asks."""
    costs: Any = parser
    for name in names:
        if name == "--device":
            costs = parser.add_mutually_exclusive_group()
        (costs if name in ("--device", "--profile") else parser).add_argument(name, **changed.get(name, OPTIONS[name]))


def host_of(args: argparse.Namespace, known: Host | None = None) -> Host | None:
    """Read the second memory from options; the known one gives figures that they leave out.

    Raises:
        UsageError: if there are not one or two rates, or nothing names a budget or a rate.
        BudgetError, ValueError: if a number is none.

    >>> asked = argparse.Namespace(host_budget="1 GB", host_rate="2 GB/s,1 GB/s", host_one_link=False)
    >>> print(host_of(asked))
    1.00 GB (1_000_000_000 bytes), 2 GB/s there, 1 back, a link each way
    """
    said: dict[str, Any] = {"one_link": True} if args.host_one_link else {}
    if args.host_budget is not None:
        said["budget"] = parse_bytes(args.host_budget)
    if args.host_rate is not None:
        there, *back = map(parse_rate, args.host_rate.split(","))
        if len(back) > 1:
            raise UsageError(f"--host-rate takes one rate, or one there and one back, not {args.host_rate!r}")
        said |= {"send": there, "fetch": back[0] if back else there}
    if known is not None or not said:
        return replace(known, **said) if known is not None and said else known
    from checkmate.core.host import Host

    for name, asked in (("budget", "--host-budget"), ("send", "--host-rate")):
        if name not in said:
            raise UsageError(f"a second memory needs {asked}, too: none is known")
    return Host(**said)
