"""The command line: ``checkmate`` or ``python -m checkmate``.

Answers go to standard output, as text or with ``--json`` as JSON; progress and errors to standard error. It ends with

    0    done
    1    refused: nothing fits, or the step or the file is not one that can be planned
    2    asked wrongly
    130  Ctrl-C; where a best plan so far was printed, it is a valid one

A command is a function: its docstring is the help, its decorator lists its options, which go by name to the function of
the library that it calls. PyTorch is imported by those that trace a step only; ``doctor`` looks for it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from inspect import getdoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate import sizes
from checkmate.cli.arguments import Arguments, UsageError, add_option, host_of, maker
from checkmate.cli.json_output import finite, solution_record, steps_of
from checkmate.core.solution import Query
from checkmate.errors import BudgetError, CheckmateError, RuleError
from checkmate.statusline import hidden, showing
from checkmate.units import format_bytes, parse_budget, parse_bytes, parse_share
from checkmate.version import __version__

if TYPE_CHECKING:
    from checkmate.core.problem import Problem

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
Run = Callable[[Arguments], int]
COMMANDS: dict[Run, tuple[str, ...]] = {}  # by the function that runs it: its options, as `add_option` takes them
COMMON = "--quiet --verbose --debug"
COSTS = ("--device", "--profile")  # at most one of them
HOST = "--host-budget --host-rate --host-one-link"
LIMITS = f"{HOST} --time-limit --gap"
SOLVING = f"--budget --method --save-plan --report --rule {LIMITS}"
TARGET = """\
TARGET is module:function or file.py:function, found from the current folder.
The function returns (step, batch): a module or function as checkmate.compile
takes it, and an example batch for it: a tuple of arguments, a dict of named
ones, or one tensor. """


def command(*options: str, json: str = "--json") -> Callable[[Run], Run]:
    """Make a command of a function, with options that are names, or a line as `add_option` takes it."""

    def add(run: Run) -> Run:
        names = [[text] if "  " in text else text.split() for text in (json, COMMON, *options)]
        COMMANDS[run] = tuple(name for part in names for name in part)
        return run

    return add


def _parser() -> argparse.ArgumentParser:
    about = "Plan training steps within a budget of bytes."
    parser = argparse.ArgumentParser(prog="checkmate", description=about, epilog="checkmate COMMAND --help")
    parser.add_argument("--version", action="version", version=f"checkmate {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    as_written: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "argument_default": argparse.SUPPRESS}
    for run, options in COMMANDS.items():
        summary, _, more = (getdoc(run) or "").partition("\n\n")
        name, says = run.__name__[1:].replace("_", "-"), f"{summary[:1].lower()}{summary[1:-1]}"
        about = f"{summary}\n\n{TARGET if 'TARGET' in options else ''}{more}".strip()
        subparser = commands.add_parser(name, help=says, description=about, **as_written)
        subparser.set_defaults(run=run)
        costs = subparser.add_mutually_exclusive_group() if {*COSTS} <= {*options} else subparser
        for line in options:
            add_option(costs if line in COSTS else subparser, line)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give the exit code. Errors are one message on standard error; ``--debug`` adds the traceback.

    >>> main(["solve", "no-such-file.json", "--budget", "1 GB"])
    2
    """
    try:
        args = _parser().parse_args(argv, Arguments())
    except SystemExit as end:  # argparse has said why, or has shown the help
        return int(end.code or 0)
    if args.verbose:  # log everything on standard error; otherwise a line shows what goes on, on a terminal
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log = logging.getLogger("checkmate")
        log.setLevel(logging.INFO)
        log.handlers, log.propagate = [handler], False
    try:
        with hidden() if args.quiet or args.verbose else nullcontext():
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever reads has enough; what is left must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except (UsageError, BudgetError, ValueError, OSError, CheckmateError) as error:
        if args.debug:
            raise
        is_refusal = isinstance(error, CheckmateError) and not isinstance(error, (BudgetError, RuleError))
        if args.json:
            _show(args, {"error": str(error), "min_budget": getattr(error, "min_budget", None)}, "")
        return _say(str(error), REFUSED if is_refusal else USAGE)


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"checkmate: {message}\n")
    return code


def _show(args: Arguments, document: Any, text: str, code: int = DONE) -> int:
    sys.stdout.write(f"{_json_of(document, indent=2) if args.json else text}\n")
    return code


def _json_of(document: Any, indent: int | None = None) -> str:
    return json.dumps(finite(document), indent=indent, allow_nan=False)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  # a device such as /dev/stdout will do, too
        file.write(text)


def _options(call: Callable[..., Any], args: Arguments, **own: Any) -> dict[str, Any]:
    """Pick a function's arguments among those that the command line names, and those made from it."""
    return {name: value for name, value in {**vars(args), **own}.items() if name in signature(call).parameters}


@command("TARGET", *COSTS, "--kernels --size --save-problem", SOLVING)
def _plan(args: Arguments) -> int:
    """Trace a step and plan it.

    With --size N it is called with N.
    """
    args.budget = _bytes_of(args)
    _check(args)  # before anything that takes time
    host, profile = host_of(args), _profile(args)
    from checkmate.tracing import trace

    with _example(args) as (step, positional, named):
        problem = trace(step, *positional, profile=profile, kernels=args.kernels or "eager", **named)
    if args.save_problem:
        problem.to_json(args.save_problem)
    return _answer(args, problem if host is None else problem.with_host(host))


@command("PROBLEM.json", SOLVING)
def _solve(args: Arguments) -> int:
    """Plan a step from a problem file (Problem.to_json)."""
    _check(args)
    return _answer(args, _read(args))


@command("PROBLEM.json --budget -o --open --frontier --prices --method --rule", LIMITS)
def _report(args: Arguments) -> int:
    """A plan as one HTML page to look at, from a problem file and a budget.

    It prints the path of the page, which needs no network. Of a step that is not in a
    file yet, checkmate plan TARGET --budget BYTES --report FILE writes the same page,
    and --save-problem FILE what this command reads.
    """
    if not args.problem.endswith((".json", ".json.gz")):
        raise UsageError(
            f"{args.problem} is no problem file (.json or .json.gz). Of a step, this writes the page: "
            f"checkmate plan {args.problem} --budget {args.budget} --report plan.html"
        )
    _check(args)
    args.report = args.o or Path(args.problem).name.removesuffix(".gz").removesuffix(".json") + ".html"
    return _answer(args, _read(args), shows_page=True)


def _check(args: Arguments) -> None:
    """Read the rules, and refuse an invalid budget, rule or method."""
    parse_bytes(args.budget)
    from checkmate.core.rules import read_rules
    from checkmate.solvers.catalogue import METHODS

    args.rules = read_rules(args.rule) if args.rule else None  # None: those of the problem's file
    if (args.method or Query.method) not in METHODS:
        raise UsageError(f"there is no method {args.method!r}; the methods are {', '.join(METHODS)}")


def _read(args: Arguments) -> Problem:
    """Read a problem from a file, with the second memory that the options ask for."""
    from checkmate.core.problem import Problem

    try:
        problem = Problem.from_json(args.problem)
    except OSError as error:
        raise UsageError(f"cannot read {args.problem}: {error.strerror or error}") from None
    return problem if (host := host_of(args, problem.host)) is problem.host else problem.with_host(host)


def _answer(args: Arguments, problem: Problem, *, shows_page: bool = False) -> int:
    """Solve, write the files that are asked for, and show the plan, or the path of its page."""
    from checkmate.solvers.solve import solve

    solution = solve(**_options(solve, args, problem=problem))
    record, text, page = solution_record(solution), str(solution), Path()
    if solution.plan is not None and args.save_plan:
        _write(args.save_plan, _json_of({**record, "steps": steps_of(solution)}))
    if solution.plan is not None and args.report:
        from checkmate.look.page import report
        from checkmate.solvers.frontier import frontier

        methods = [args.method or Query.method]
        own = {"problem": solution.problem, "methods": methods, "rules": None}  # which the problem has
        rows = frontier(**_options(frontier, args, **own)) if args.frontier else None
        page = report(solution, args.report, frontier=rows, prices=bool(args.prices)).resolve()
        record, text = ({**record, "page": str(page)}, str(page)) if shows_page else (record, text)
    if solution.plan is not None or (args.json and not shows_page):
        _show(args, record, text)
    if solution.plan is None:
        return _say(solution.message or solution.status.meaning, REFUSED)
    if args.open and not webbrowser.open(page.as_uri()):
        return _say(f"no browser was found here; open {page}", DONE)
    return INTERRUPTED if solution.interrupted else DONE


@command("PROBLEM.json", "--budget BYTES+  by default from the smallest to keeping all", f"--methods --jobs {LIMITS}")
def _frontier(args: Arguments) -> int:
    """Cost against peak of a problem file, for many budgets."""
    from checkmate.solvers.frontier import frontier

    methods = [name.strip() for name in (args.methods or Query.method).split(",")]
    rows = frontier(**_options(frontier, args, problem=_read(args), budgets=args.budget, methods=methods))
    _show(args, rows.records(), repr(rows))
    return DONE if any(row.peak is not None for row in rows) else _say("no budget fits any plan", REFUSED)


@command(
    *("TARGET", *COSTS, "--kernels --budget --max-overhead --baselines --measure", HOST, "--smallest --largest"),
    f"--time-limit S  by default {sizes.TIME_LIMIT:g} s",
)
def _max_batch(args: Arguments) -> int:
    """Find the largest batch that fits.

    It is called with the size: an integer that may mean anything.
    """
    args.budget = _bytes_of(args)
    host = host_of(args)
    from checkmate.sizes.max_batch_size import max_batch_size

    profile, make = _profile(args), _target(args)
    last: dict[int, tuple[Any, Any]] = {}

    def both(size: int) -> tuple[Any, Any]:
        if size not in last:
            last.clear()
            last[size] = make(size)
        return last[size]

    # Make the smallest step once, so that errors in the user's function come first.
    both(args.smallest or 1)
    if not (args.quiet or args.verbose or sys.stderr.isatty()):
        limit = args.time_limit or sizes.TIME_LIMIT
        _say(f"looking for the largest size, for {limit:g} s at most (--verbose: each size)", DONE)
    options = _options(max_batch_size, args, profile=profile, host=host, host_budget=None)  # which the host has
    answer = max_batch_size(lambda n: both(n)[0], lambda n: both(n)[1], **options)
    return _show(args, answer.summary(), repr(answer), INTERRUPTED if answer.ended == "interrupted" else DONE)


@command(
    *("TARGET", "--device NAME  such as rtx4090; by default the one here, whose ops are measured"),
    *("--size --optimizer", "--budget BYTES  such as 16GB, in place of the device's room"),
    *(f"--kernels {HOST} --everything", f"--time-limit S  by default {sizes.FITS_TIME_LIMIT:g} s"),
)
def _fits(args: Arguments) -> int:
    """Say whether a training step fits a device, and what would make it fit.

    With --size N it is called with N.
    The step gives the loss. The optimizer's update, of all parameters that have
    gradients, is part of what is looked at.
    """
    if args.budget is not None:
        parse_budget(args.budget)
    own = {"host": host_of(args), "host_budget": None} if args.host_rate or args.host_one_link else {"host": None}
    from torch import optim

    from checkmate.profiling.data_sheets import device_named
    from checkmate.sizes.batches import trained
    from checkmate.sizes.fits import fits

    if args.device:
        device_named(args.device)  # before anything that takes time
    chosen = getattr(optim, args.optimizer or "", None)
    if args.optimizer and not (isinstance(chosen, type) and issubclass(chosen, optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {args.optimizer!r}")
    with _example(args) as (step, positional, named):
        own["optimizer"] = None if chosen is None else chosen(trained((step, positional, named)))
        answer = fits(step, *positional, **_options(fits, args, **own), **named)
    return _show(args, answer.summary(), repr(answer), DONE if answer.fits else REFUSED)


@contextmanager
def _example(args: Arguments) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The user's step, with its batch as arguments; the step is named if it fails within, as in plain PyTorch too."""
    from checkmate.sizes.sized_steps import arguments_of

    step, batch = _target(args)(*([args.size] if args.size else []))
    positional, named = arguments_of(batch)
    try:
        yield step, positional, named
    except (RuntimeError, TypeError) as error:
        if args.debug:
            raise
        raise CheckmateError(f"The step of {args.target} fails on its batch: {error}") from error


def _target(args: Arguments) -> Callable[..., tuple[Any, Any]]:
    """The user's function; if costs are estimated, all tensors it makes are on the meta device."""
    return maker(args.target, on_meta=bool(args.device), debug=bool(args.debug))


def _bytes_of(args: Arguments) -> int:
    """The budget in bytes; a share is of the named device's room."""
    if (share := parse_share(args.budget)) is None:
        return parse_budget(args.budget)
    from checkmate.profiling.data_sheets import DEVICES, device_named

    if args.device is None or not (device := device_named(args.device)).room:
        names = ", ".join(name for name, sheet in DEVICES.items() if sheet.room)
        raise UsageError(f"--budget {args.budget} is of the memory of a device: --device names one of {names}")
    return int(share * device.room)


def _profile(args: Arguments) -> str:
    """The source of costs, as `checkmate.trace` takes it."""
    if args.profile and not args.profile.endswith(".json"):
        raise UsageError(f"--profile takes a file of measured ops whose name ends in .json, not {args.profile}")
    if not args.device:
        return args.profile or "measure"
    from checkmate.profiling.data_sheets import device_named

    device = device_named(args.device)
    if device.room and args.budget > device.room:
        budget, room, all_of_it = map(format_bytes, (args.budget, device.room, device.memory_bytes))
        why = f"{budget} leaves too little of the {all_of_it} of {device.name} to CUDA, cuDNN and cuBLAS"
        _say(f"{why}, whose memory is not in estimates; plan for {room} at most", DONE)
    return f"roofline:{args.device}"


@command("--steps", "--quick  a second for each plan, and each step timed once")
def _demo(args: Arguments) -> int:
    """Train two small networks within budgets of bytes, and compare with plain PyTorch; about 90 s."""
    import torch

    from checkmate.demo.training import LEGEND, STEPS, Effort, patterns_task, text_task, train_within_budgets

    def say(text: str) -> None:
        if not args.json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    torch.set_num_threads(1)  # where bytes and numbers repeat exactly
    began = time.perf_counter()
    say(LEGEND.strip())
    effort = Effort(lowest=2.0, plan=1.0, pairs=1) if args.quick else Effort()
    tasks = (make(args.steps or STEPS) for make in (text_task, patterns_task))
    rows = [row for task in tasks for row in train_within_budgets(task, effort, say)]
    say(f"\nAll of it took {time.perf_counter() - began:.0f} seconds on one thread.")
    broken = [promise for row in rows for promise in row.broken()]
    if args.json:
        _show(args, {"broken": broken, "rows": [asdict(row) for row in rows]}, "")
    if broken:
        return _say("\n".join(broken), REFUSED)
    say("Every measured peak is the predicted one and within its budget; every number is plain PyTorch's, bitwise.")
    return DONE


@command()
def _methods(args: Arguments) -> int:
    """List the methods with their options."""
    from checkmate.solvers.catalogue import methods

    table = methods()
    records = {name: {"summary": m.summary, "source": m.source, "options": m.options} for name, m in table.items()}
    return _show(args, records, repr(table))


@command()
def _doctor(args: Arguments) -> int:
    """Versions, device, solver and cache of this installation."""
    from checkmate.cli.doctor import examine

    facts, obstacles = examine()
    width = max(map(len, facts)) + 2
    rows = ((name, fact if isinstance(fact, (list, tuple)) else [fact]) for name, fact in facts.items())
    lines = [f"{name:<{width}}{', '.join(str(f) for f in values if f is not None) or 'none'}" for name, values in rows]
    _show(args, {"ok": not obstacles, "wrong": obstacles, **facts}, "\n".join(lines))
    return max([DONE, *(_say(obstacle, REFUSED) for obstacle in obstacles)])


@command(
    *("--device NAME  cuda (default), cuda:1 or cpu", "--quick --only", "--time-limit S  by default 180 s"),
    json="--json FILE  write all that was found, for a report",
)
def _selftest(args: Arguments) -> int:
    """Check that steps keep bits and budgets on a device: a list of checks, each in a process of its own."""
    import torch

    from checkmate.demo.selftest import CHECKS, SECONDS, Finding, Setting, run_all

    setting, limit = Setting(args.device or "cuda", bool(args.quick)), args.time_limit or SECONDS
    if unknown := [name for name in args.only or () if name not in CHECKS]:
        raise UsageError(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    if setting.name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device is cpu, cuda or cuda:1, not {setting.name!r}")
    if setting.name != "cpu" and not torch.cuda.is_available():
        raise CheckmateError("There is no CUDA device here. --device cpu checks what can be checked without one.")
    checks = {name: check for name, check in CHECKS.items() if name in (args.only or CHECKS)}
    findings, failed = list[Finding](), list[str]()

    def keep() -> None:  # before all, since it may not be possible, and after each: what was found is not lost
        if args.json:
            header = {"format": "checkmate-selftest", "version": 2, "device": setting.name, "quick": setting.quick}
            rows = [{**asdict(finding), "verdict": finding.verdict} for finding in findings]
            _write(args.json, _json_of({**header, "failed": failed, "checks": rows}))

    keep()
    with showing(lambda: f"{len(findings)} of {len(checks)} checks", share=lambda: len(findings) / len(checks)):
        for finding in run_all(checks, setting, limit):
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()
            findings.append(finding)
            failed += [finding.name] * (finding.verdict == "failed")
            keep()
    counts = Counter(finding.verdict for finding in findings)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    sys.stdout.write(f"{'FAILED' if failed else 'passed'} on {setting.name}: {counted}\n")
    return _say(f"failed: {', '.join(failed)}", REFUSED) if failed else DONE
