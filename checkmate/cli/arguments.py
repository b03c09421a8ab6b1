"""The commands with their options, and the meaning of their words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from checkmate import batch, fitting
from checkmate.cli.target import UsageError
from checkmate.units import parse_bytes, parse_rate
from checkmate.version import __version__

if TYPE_CHECKING:
    from checkmate.core.host import Host
    from checkmate.core.problem import Problem

TIME_LIMIT, GAP = 60.0, 1e-4

_TARGET = """\
TARGET is module:function or file.py:function, found from the current folder.
The function returns (step, batch): a module or function as checkmate.compile
takes it, and an example batch for it: a tuple of arguments, a dict of named
ones, or one tensor. {more}
"""
_OF_FITS = """\
The step gives the loss. The optimizer's update, of all parameters that have
gradients, is part of what is looked at.
"""

_PAGE = """\
It prints the path of the page, which needs no network. Of a step that is not in a
file yet, checkmate plan TARGET --budget BYTES --report FILE writes the same page,
and --save-problem FILE what this command reads.
"""


def size(text: str) -> int:
    """A size of a batch, or another count: a whole number of at least 1.

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


def _seconds(limit: float) -> dict[str, Any]:
    return {"type": float, "default": limit, "metavar": "S", "help": f"by default {limit:g} s"}


_FLAG: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"metavar": "FILE"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "--json": {**_FLAG, "help": "answer as JSON"},
    "--quiet": {**_FLAG, "help": "show no progress"},
    "--verbose": {**_FLAG, "help": "show all that is logged, on standard error"},
    "--debug": {**_FLAG, "help": "end errors with a traceback"},
    "target": {"metavar": "TARGET", "help": "module:function"},
    "problem": {"metavar": "PROBLEM.json"},
    "--device": {"metavar": "NAME", "help": "estimate for a device such as h100; nothing is allocated here or runs"},
    "--profile": {"metavar": "OPS.json", "help": "costs that were measured elsewhere"},
    "--size": {"type": size, "metavar": "N", "help": "call the function with this size"},
    "--save-problem": {**_FILE, "help": "write what was traced, as for checkmate solve"},
    "--budget": {
        "required": True,
        "metavar": "BYTES",
        "help": "such as 8GB or 512MiB; where --device names one, also fit or 70%%",
    },
    "--method": {"default": "auto", "help": "see checkmate methods"},
    "--save-plan": {**_FILE, "help": "write the plan, step by step, as JSON"},
    "--report": {**_FILE, "help": "write the same plan as one HTML page, too"},
    "-o": {**_FILE, "dest": "out", "help": "by default the problem's name with .html, in the current folder"},
    "--open": {**_FLAG, "help": "show it in the browser"},
    "--everything": {**_FLAG, "help": "all ways and the largest batch, also where something fits"},
    "--frontier": {**_FLAG, "help": "with the cost of other budgets, which takes as many solves"},
    "--prices": {**_FLAG, "help": "with what a little less or more memory would change, which takes two solves"},
    "--rule": {
        "action": "append",
        "metavar": "PATTERN=RULE",
        "help": "such as 'blocks.3=keep', again for more; see the guide",
    },
    "--host-budget": {"metavar": "BYTES", "help": "of a second memory, in which values may wait"},
    "--host-rate": {
        "metavar": "RATE[,RATE]",
        "help": "of the link there, and back if that differs, such as 55GB/s,50GB/s",
    },
    "--host-one-link": {**_FLAG, "help": "both directions wait for each other"},
    "--time-limit": _seconds(TIME_LIMIT),
    "--gap": {"type": float, "default": GAP, "help": f"stop at this gap, by default {GAP:g}"},
    "--only": {"action": "append", "metavar": "NAME", "help": "a check by its name, again for more"},
    "--quick": {**_FLAG, "help": "small networks"},
    "--steps": {"type": size, "default": 25, "metavar": "N", "help": "to train in each run, by default 25"},
    "--methods": {"default": "auto", "metavar": "A,B", "help": "by default auto"},
    "--jobs": {"type": size, "metavar": "N", "help": "processes at a time"},
    "--max-overhead": {
        "type": overhead,
        "default": "one-forward",
        "metavar": "CAP",
        "help": "one-forward (default), none, or a share of the step such as 0.3",
    },
    "--baselines": {**_FLAG, "help": "find the largest sizes of other methods, too"},
    "--measure": {**_FLAG, "help": "run the step at the answer and measure its peak"},
    "--optimizer": {"metavar": "CLASS", "help": "of torch.optim, by default AdamW"},
    "--smallest": {"type": size, "default": 1, "metavar": "N"},
    "--largest": {"type": size, "default": batch.LARGEST, "metavar": "N"},
}
_HOST = ("--host-budget", "--host-rate", "--host-one-link")
_SOLVING = ("--budget", "--method", "--save-plan", "--report", "--rule", *_HOST, "--time-limit", "--gap")


def parser_of(runs: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The parser of all commands, with what runs each of them by its name."""
    parser = argparse.ArgumentParser(
        prog="checkmate", description="Plan training steps within a budget of bytes.", epilog="checkmate COMMAND --help"
    )
    parser.add_argument("--version", action="version", version=f"checkmate {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, summary: str, *options: str, about: str = "", **changed: dict[str, Any]) -> None:
        description = f"{summary[0].upper()}{summary[1:]}.\n\n{about}".strip()
        as_written = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=summary, description=description, formatter_class=as_written)
        made.set_defaults(run=runs[name])
        for option in ("--json", "--quiet", "--verbose", "--debug", *options):
            if option == "--device":
                costs = made.add_mutually_exclusive_group()
            to = costs if option in ("--device", "--profile") else made
            to.add_argument(option, **(changed.get(option.strip("-").replace("-", "_")) or _OPTIONS[option]))

    target = ("target", "--device", "--profile")
    about = _TARGET.format(more="With --size N it is called with N.")
    command("plan", "trace a step and plan it", *target, "--size", "--save-problem", *_SOLVING, about=about)
    command("solve", "plan a step from a problem file (Problem.to_json)", "problem", *_SOLVING)
    command(
        "report",
        "a plan as one HTML page to look at, from a problem file and a budget",
        *("problem", "--budget", "-o", "--open", "--frontier", "--prices", "--method", "--rule", *_HOST),
        *("--time-limit", "--gap"),
        about=_PAGE,
    )
    command(
        "frontier",
        "cost against peak of a problem file, for many budgets",
        *("problem", "--budget", "--methods", "--jobs", *_HOST, "--time-limit", "--gap"),
        budget={"nargs": "+", "metavar": "BYTES", "help": "by default from the smallest to keeping all"},
    )
    command(
        "max-batch",
        "find the largest batch that fits",
        *(*target, "--budget", "--max-overhead", "--baselines", "--measure", *_HOST),
        *("--smallest", "--largest", "--time-limit"),
        about=_TARGET.format(more="It is called with the size: an integer that may mean anything."),
        time_limit=_seconds(batch.TIME_LIMIT),
    )
    command(
        "fits",
        "say whether a training step fits a device, and what would make it fit",
        *("target", "--device", "--size", "--optimizer", "--budget", *_HOST, "--everything", "--time-limit"),
        about=f"{_TARGET.format(more='With --size N it is called with N.')}{_OF_FITS}",
        device={"metavar": "NAME", "help": "such as rtx4090; by default the one here, whose ops are measured"},
        budget={"metavar": "BYTES", "help": "such as 16GB, in place of the device's room"},
        time_limit=_seconds(fitting.TIME_LIMIT),
    )
    command(
        "demo",
        "train two small networks within budgets of bytes, and compare with plain PyTorch; about 90 s",
        *("--steps", "--quick"),
        quick={**_FLAG, "help": "a second for each plan, and each step timed once"},
    )
    command("methods", "list the methods with their options")
    command("doctor", "versions, device, solver and cache of this installation")
    command(
        "selftest",
        "whether steps keep bits and budgets on a device: a list of checks, each in a process of its own",
        *("--device", "--quick", "--only", "--time-limit"),
        json={**_FILE, "help": "write all that was found, for a report"},
        device={"default": "cuda", "metavar": "NAME", "help": "cuda (default), cuda:1 or cpu"},
        time_limit={"type": float, "metavar": "S", "help": "for each check, by default 120 or 180 s"},
    )
    return parser


def host_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a second memory, by the names of `checkmate.core.host.Host`; empty if there are none.

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
    """The second memory asked for; unnamed properties stay as they are.

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
    """The problem with the second memory asked for; unnamed properties stay as in the problem's file.

    Raises:
        UsageError: if a budget or a rate is missing.
    """
    host = asked_host(args, problem.host)
    return problem if host is problem.host else problem.with_host(host)
