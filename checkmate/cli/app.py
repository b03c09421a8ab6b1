"""The command line: ``checkmate`` or ``python -m checkmate``.

Answers go to standard output, as text or with ``--json`` as JSON; progress and errors to standard error. It ends with

    0    done
    1    refused: nothing fits, or the step or the file is not one that can be planned
    2    asked wrongly
    130  Ctrl-C; where a best plan so far was printed, it is a valid one

PyTorch is imported only by the commands that trace a step: ``plan``, ``max-batch``, ``fits``, ``demo``, ``selftest``;
``doctor`` looks for it.
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
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate import sizes
from checkmate.cli.arguments import UsageError, add_to, flag, host_of, maker, option, seconds
from checkmate.cli.json_output import finite, solution_record, steps_of
from checkmate.errors import BudgetError, CheckmateError, RuleError
from checkmate.statusline import hidden, showing
from checkmate.units import format_bytes, parse_budget, parse_bytes, parse_share
from checkmate.version import __version__

if TYPE_CHECKING:
    from checkmate.core.problem import Problem
    from checkmate.core.solution import Solution

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130
Run = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give the exit code. Errors are one message on standard error; ``--debug`` adds the traceback.

    >>> main(["solve", "no-such-file.json", "--budget", "1 GB"])
    2
    """
    try:
        args = _parser().parse_args(argv)
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
            _out_json({"error": str(error), "min_budget": getattr(error, "min_budget", None)})
        return _say(str(error), REFUSED if is_refusal else USAGE)


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"checkmate: {message}\n")
    return code


def _plan(args: argparse.Namespace) -> int:
    args.budget = _bytes_of(args)
    _check(args)  # before anything that takes time
    host, profile = host_of(args), _profile(args)
    from checkmate.tracing import trace

    step, positional, named = _example(args)
    with _on_its_batch(args):
        problem = trace(step, *positional, profile=profile, kernels=args.kernels, **named)
    if args.save_problem:
        problem.to_json(args.save_problem)
    return _answer(args, problem if host is None else problem.with_host(host))


def _solve(args: argparse.Namespace) -> int:
    _check(args)
    return _answer(args, _read(args))


def _check(args: argparse.Namespace) -> None:
    """Read the rules, and refuse an invalid budget, rule or method."""
    parse_bytes(args.budget)
    from checkmate.core.rules import read_rules
    from checkmate.solvers.catalogue import METHODS

    args.rules = read_rules(args.rule) if args.rule else None  # None: those of the problem's file
    if args.method not in METHODS:
        raise UsageError(f"there is no method {args.method!r}; the methods are {', '.join(METHODS)}")


def _read(args: argparse.Namespace) -> Problem:
    """Read a problem from a file, with the second memory that the options ask for."""
    from checkmate.core.problem import Problem

    try:
        problem = Problem.from_json(args.problem)
    except OSError as error:
        raise UsageError(f"cannot read {args.problem}: {error.strerror or error}") from None
    host = host_of(args, problem.host)
    return problem if host is problem.host else problem.with_host(host)


def _solution(args: argparse.Namespace, problem: Problem) -> Solution:
    from checkmate.solvers.solve import solve

    return solve(**_options(solve, args, problem=problem))


def _options(call: Callable[..., Any], args: argparse.Namespace, **own: Any) -> dict[str, Any]:
    """Pick a function's arguments among those of the command line, and those made from it."""
    return {name: value for name, value in {**vars(args), **own}.items() if name in signature(call).parameters}


def _answer(args: argparse.Namespace, problem: Problem) -> int:
    solution = _solution(args, problem)
    if args.save_plan and solution.plan is not None:
        _write_json(args.save_plan, {**solution_record(solution), "steps": steps_of(solution)})
    if args.report and solution.plan is not None:
        from checkmate.look.page import report

        report(solution, args.report)
    if args.json or solution.plan is not None:
        _show(args, solution_record(solution), str(solution))
    return _ended(solution)


def _ended(solution: Solution) -> int:
    if solution.plan is None:
        return _say(solution.message or solution.status.meaning, REFUSED)
    return INTERRUPTED if solution.interrupted else DONE


def _report(args: argparse.Namespace) -> int:
    if not args.problem.endswith((".json", ".json.gz")):
        raise UsageError(
            f"{args.problem} is no problem file (.json or .json.gz). Of a step, this writes the page: "
            f"checkmate plan {args.problem} --budget {args.budget} --report plan.html"
        )
    _check(args)
    from checkmate.look.page import report
    from checkmate.solvers.frontier import frontier

    solution = _solution(args, _read(args))
    if solution.plan is None:
        return _ended(solution)
    own = {"problem": solution.problem, "methods": [args.method], "rules": None}  # which the problem has
    rows = frontier(**_options(frontier, args, **own)) if args.frontier else None
    out = args.out or Path(args.problem).name.removesuffix(".gz").removesuffix(".json") + ".html"
    page = report(solution, out, frontier=rows, prices=args.prices).resolve()
    _show(args, {**solution_record(solution), "page": str(page)}, str(page))
    if args.open and not webbrowser.open(page.as_uri()):
        return _say(f"no browser was found here; open {page}", DONE)
    return _ended(solution)


def _frontier(args: argparse.Namespace) -> int:
    from checkmate.solvers.frontier import frontier

    methods = [name.strip() for name in args.methods.split(",")]
    rows = frontier(**_options(frontier, args, problem=_read(args), budgets=args.budget, methods=methods))
    _show(args, rows.records(), repr(rows))
    return DONE if any(row.peak is not None for row in rows) else _say("no budget fits any plan", REFUSED)


def _max_batch(args: argparse.Namespace) -> int:
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
    both(args.smallest)
    if not (args.quiet or args.verbose or sys.stderr.isatty()):
        _say(f"looking for the largest size, for {args.time_limit:g} s at most (--verbose: each size)", DONE)
    own = {"profile": profile, "host": host, "host_budget": None}  # which the host has
    options = _options(max_batch_size, args, **own)
    answer = max_batch_size(lambda n: both(n)[0], lambda n: both(n)[1], **options)
    _show(args, answer.summary(), repr(answer))
    return INTERRUPTED if answer.ended == "interrupted" else DONE


def _fits(args: argparse.Namespace) -> int:
    if args.budget is not None:
        parse_budget(args.budget)
    own = {"host": host_of(args), "host_budget": None} if args.host_rate or args.host_one_link else {"host": None}
    from torch import optim

    from checkmate.profiling.data_sheets import device_named
    from checkmate.sizes.batches import trained
    from checkmate.sizes.fits import fits

    if args.device:
        device_named(args.device)  # before anything that takes time
    chosen = None if args.optimizer is None else getattr(optim, args.optimizer, None)
    if args.optimizer is not None and not (isinstance(chosen, type) and issubclass(chosen, optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {args.optimizer!r}")

    step, positional, named = _example(args)
    optimizer = None if chosen is None else chosen(trained((step, positional, named)))
    with _on_its_batch(args):
        answer = fits(step, *positional, **_options(fits, args, optimizer=optimizer, **own), **named)
    _show(args, answer.summary(), repr(answer))
    return DONE if answer.fits else REFUSED


def _example(args: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The user's step, with its batch as arguments."""
    from checkmate.sizes.sized_steps import arguments_of

    step, batch = _target(args)(*([args.size] if args.size else []))
    return step, *arguments_of(batch)


@contextmanager
def _on_its_batch(args: argparse.Namespace) -> Iterator[None]:
    """Name the step if it fails, as it does in plain PyTorch too."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if args.debug:
            raise
        raise CheckmateError(f"The step of {args.target} fails on its batch: {error}") from error


def _demo(args: argparse.Namespace) -> int:
    import torch

    from checkmate.demo.training import LEGEND, Effort, patterns_task, text_task, train_within_budgets

    def say(text: str) -> None:
        if not args.json:
            _out(text)
            sys.stdout.flush()

    torch.set_num_threads(1)  # where bytes and numbers repeat exactly
    began = time.perf_counter()
    say(LEGEND.strip())
    effort = Effort(lowest=2.0, plan=1.0, pairs=1) if args.quick else Effort()
    rows = [row for make in (text_task, patterns_task) for row in train_within_budgets(make(args.steps), effort, say)]
    say(f"\nAll of it took {time.perf_counter() - began:.0f} seconds on one thread.")
    broken = [promise for row in rows for promise in row.broken()]
    if args.json:
        _out_json({"broken": broken, "rows": [asdict(row) for row in rows]})
    if broken:
        return _say("\n".join(broken), REFUSED)
    say("Every measured peak is the predicted one and within its budget; every number is plain PyTorch's, bitwise.")
    return DONE


def _methods(args: argparse.Namespace) -> int:
    from checkmate.solvers.catalogue import methods

    table = methods()
    records = {name: {"summary": m.summary, "source": m.source, "options": m.options} for name, m in table.items()}
    _show(args, records, repr(table))
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    from checkmate.cli.doctor import examine

    facts, obstacles = examine()
    width = max(map(len, facts)) + 2
    rows = ((name, fact if isinstance(fact, (list, tuple)) else [fact]) for name, fact in facts.items())
    lines = [f"{name:<{width}}{', '.join(str(f) for f in values if f is not None) or 'none'}" for name, values in rows]
    _show(args, {"ok": not obstacles, "wrong": obstacles, **facts}, "\n".join(lines))
    for obstacle in obstacles:
        _say(obstacle, REFUSED)
    return REFUSED if obstacles else DONE


def _selftest(args: argparse.Namespace) -> int:
    import torch

    from checkmate.selftest.checks import CHECKS, Finding, Setting, run_all

    if unknown := [name for name in args.only or () if name not in CHECKS]:
        raise UsageError(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device is cpu, cuda or cuda:1, not {args.device!r}")
    if args.device != "cpu" and not torch.cuda.is_available():
        raise CheckmateError("There is no CUDA device here. --device cpu checks what can be checked without one.")
    checks = {name: check for name, check in CHECKS.items() if name in (args.only or CHECKS)}
    findings, failed = list[Finding](), list[str]()

    def keep() -> None:  # before all, since it may not be possible, and after each: what was found is not lost
        if args.json:
            header = {"format": "checkmate-selftest", "version": 2, "device": args.device, "quick": args.quick}
            rows = [{**asdict(finding), "verdict": finding.verdict} for finding in findings]
            _write_json(args.json, {**header, "failed": failed, "checks": rows})

    keep()
    with showing(lambda: f"{len(findings)} of {len(checks)} checks", share=lambda: len(findings) / len(checks)):
        for finding in run_all(checks, Setting(args.device, args.quick), args.time_limit):
            _out(str(finding))
            sys.stdout.flush()
            findings.append(finding)
            failed += [finding.name] * (finding.verdict == "failed")
            keep()
    counts = Counter(finding.verdict for finding in findings)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    _out(f"{'FAILED' if failed else 'passed'} on {args.device}: {counted}")
    return _say(f"failed: {', '.join(failed)}", REFUSED) if failed else DONE


def _bytes_of(args: argparse.Namespace) -> int:
    """The budget in bytes; a share is of the named device's room."""
    if (share := parse_share(args.budget)) is None:
        return parse_budget(args.budget)
    from checkmate.profiling.data_sheets import DEVICES, device_named

    if args.device is None or not (device := device_named(args.device)).room:
        names = ", ".join(name for name, sheet in DEVICES.items() if sheet.room)
        raise UsageError(f"--budget {args.budget} is of the memory of a device: --device names one of {names}")
    return int(share * device.room)


def _profile(args: argparse.Namespace) -> str:
    """The source of costs, as `checkmate.trace` takes it."""
    if args.profile:
        if not args.profile.endswith(".json"):
            raise UsageError(f"--profile takes a file of measured ops whose name ends in .json, not {args.profile}")
        return str(args.profile)
    if not args.device:
        return "measure"
    from checkmate.profiling.data_sheets import device_named

    device = device_named(args.device)
    if device.room and args.budget > device.room:
        budget, room, all_of_it = map(format_bytes, (args.budget, device.room, device.memory_bytes))
        _say(
            f"{budget} leaves too little of the {all_of_it} of {device.name} to CUDA, cuDNN and cuBLAS, whose memory "
            f"is not in estimates; plan for {room} at most",
            DONE,
        )
    return f"roofline:{args.device}"


def _target(args: argparse.Namespace) -> Callable[..., tuple[Any, Any]]:
    """The user's function; if costs are estimated, all tensors it makes are on the meta device."""
    return maker(args.target, on_meta=bool(args.device), debug=args.debug)


def _show(args: argparse.Namespace, document: Any, text: str) -> None:
    if args.json:
        _out_json(document)
    else:
        _out(text)


def _out(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _out_json(document: Any) -> None:
    _out(json.dumps(finite(document), indent=2, allow_nan=False))


def _write_json(path: str, document: Any) -> None:
    with open(path, "w") as file:  # noqa: PTH123  # a device such as /dev/stdout will do, too
        json.dump(finite(document), file, allow_nan=False)


_HOST = ("--host-budget", "--host-rate", "--host-one-link")
_LIMITS = ("--time-limit", "--gap")
_SOLVING = ("--budget", "--method", "--save-plan", "--report", "--rule", *_HOST, *_LIMITS)
_TARGET = """\
TARGET is module:function or file.py:function, found from the current folder.
The function returns (step, batch): a module or function as checkmate.compile
takes it, and an example batch for it: a tuple of arguments, a dict of named
ones, or one tensor. """
_WITH_SIZE = "With --size N it is called with N.\n"
_PAGE = """\
It prints the path of the page, which needs no network. Of a step that is not in a
file yet, checkmate plan TARGET --budget BYTES --report FILE writes the same page,
and --save-problem FILE what this command reads.
"""
_OF_FITS = """\
The step gives the loss. The optimizer's update, of all parameters that have
gradients, is part of what is looked at.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkmate", description="Plan training steps within a budget of bytes.", epilog="checkmate COMMAND --help"
    )
    parser.add_argument("--version", action="version", version=f"checkmate {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Run, summary: str, *options: str, about: str = "", **changed: dict[str, Any]) -> None:
        name, description = run.__name__[1:].replace("_", "-"), f"{summary[0].upper()}{summary[1:]}.\n\n{about}".strip()
        as_written = argparse.RawDescriptionHelpFormatter
        subparser = commands.add_parser(name, help=summary, description=description, formatter_class=as_written)
        subparser.set_defaults(run=run)
        replacements = {f"--{name.replace('_', '-')}": settings for name, settings in changed.items()}
        add_to(subparser, ("--json", "--quiet", "--verbose", "--debug", *options), replacements)

    target = ("target", "--device", "--profile", "--kernels")
    about = f"{_TARGET}{_WITH_SIZE}"
    command(_plan, "trace a step and plan it", *target, "--size", "--save-problem", *_SOLVING, about=about)
    command(_solve, "plan a step from a problem file (Problem.to_json)", "problem", *_SOLVING)
    command(
        _report,
        "a plan as one HTML page to look at, from a problem file and a budget",
        *("problem", "--budget", "-o", "--open", "--frontier", "--prices", "--method", "--rule", *_HOST, *_LIMITS),
        about=_PAGE,
    )
    command(
        _frontier,
        "cost against peak of a problem file, for many budgets",
        *("problem", "--budget", "--methods", "--jobs", *_HOST, *_LIMITS),
        budget=option("BYTES", "by default from the smallest to keeping all", nargs="+"),
    )
    command(
        _max_batch,
        "find the largest batch that fits",
        *(*target, "--budget", "--max-overhead", "--baselines", "--measure", *_HOST),
        *("--smallest", "--largest", "--time-limit"),
        about=f"{_TARGET}It is called with the size: an integer that may mean anything.\n",
        time_limit=seconds(sizes.TIME_LIMIT),
    )
    command(
        _fits,
        "say whether a training step fits a device, and what would make it fit",
        *(
            "target",
            "--device",
            "--size",
            "--optimizer",
            "--budget",
            "--kernels",
            *_HOST,
            "--everything",
            "--time-limit",
        ),
        about=f"{about}{_OF_FITS}",
        device=option("NAME", "such as rtx4090; by default the one here, whose ops are measured"),
        budget=option("BYTES", "such as 16GB, in place of the device's room"),
        time_limit=seconds(sizes.FITS_TIME_LIMIT),
    )
    command(
        _demo,
        "train two small networks within budgets of bytes, and compare with plain PyTorch; about 90 s",
        *("--steps", "--quick"),
        quick=flag("a second for each plan, and each step timed once"),
    )
    command(_methods, "list the methods with their options")
    command(_doctor, "versions, device, solver and cache of this installation")
    command(
        _selftest,
        "whether steps keep bits and budgets on a device: a list of checks, each in a process of its own",
        *("--device", "--quick", "--only", "--time-limit"),
        json=option("FILE", "write all that was found, for a report"),
        device=option("NAME", "cuda (default), cuda:1 or cpu", default="cuda"),
        time_limit=seconds(180.0),
    )
    return parser
