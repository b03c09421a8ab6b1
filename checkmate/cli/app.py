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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate.cli.arguments import asked_host, host_of, parser_of, with_host
from checkmate.cli.json_output import finite, solution_record, steps_of
from checkmate.cli.target import UsageError, find_function, maker
from checkmate.errors import BudgetError, CheckmateError, RuleError
from checkmate.statusline import hidden, showing
from checkmate.units import format_bytes, parse_bytes, parse_share

if TYPE_CHECKING:
    from checkmate.core.problem import Problem
    from checkmate.profiling.data_sheets import Device

DONE, REFUSED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Errors are one message on standard error, without traceback unless ``--debug``.

    >>> main(["solve", "no-such-file.json", "--budget", "1 GB"])
    2
    """
    try:
        args = parser_of(_COMMANDS).parse_args(argv)
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
        refused = isinstance(error, CheckmateError) and not isinstance(error, (BudgetError, RuleError))
        if args.json:
            _out_json({"error": str(error), "min_budget": getattr(error, "min_budget", None)})
        return _say(str(error), REFUSED if refused else USAGE)


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"checkmate: {message}\n")
    return code


def _plan(args: argparse.Namespace) -> int:
    args.budget = _bytes_of(args)
    _check(args)  # before anything that takes time
    from checkmate.batch.sized_steps import arguments_of
    from checkmate.tracing import trace

    profile, make = _profile(args), _target(args)
    step, batch = make(args.size) if args.size else make()
    positional, named = arguments_of(batch)
    try:
        problem = trace(step, *positional, profile=profile, **named)
    except (RuntimeError, TypeError) as error:  # plain PyTorch fails as well
        if args.debug:
            raise
        raise CheckmateError(f"The step of {args.target} fails on its batch: {error}") from error
    if args.save_problem:
        problem.to_json(args.save_problem)
    return _answer(args, with_host(args, problem))


def _solve(args: argparse.Namespace) -> int:
    _check(args)
    return _answer(args, with_host(args, _read(args.problem)))


def _check(args: argparse.Namespace) -> None:
    """Refuse a budget, a rule, a second memory or a method that is none."""
    parse_bytes(args.budget)
    host_of(args)
    from checkmate.core.rules import read_rules
    from checkmate.solvers.catalogue import METHODS

    read_rules(args.rule or ())
    if args.method not in METHODS:
        raise UsageError(f"there is no method {args.method!r}; the methods are {', '.join(METHODS)}")


def _read(path: str) -> Problem:
    from checkmate.core.problem import Problem

    try:
        return Problem.from_json(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _answer(args: argparse.Namespace, problem: Problem) -> int:
    """Solve, and show what was found."""
    from checkmate.core.rules import read_rules
    from checkmate.solvers.solve import solve

    limits = {"time_limit": args.time_limit, "gap": args.gap}
    rules = read_rules(args.rule) if args.rule else None  # those of the problem's file
    solution = solve(problem, args.budget, method=args.method, rules=rules, **limits)
    if args.save_plan and solution.plan is not None:
        _write_json(args.save_plan, {**solution_record(solution), "steps": steps_of(solution)})
    if args.report and solution.plan is not None:
        from checkmate.webpage.page import report

        report(solution, args.report)
    if args.json:
        _out_json(solution_record(solution))
    elif solution.plan is not None:
        _out(str(solution))
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
    from checkmate.core.rules import read_rules
    from checkmate.solvers.frontier import frontier
    from checkmate.solvers.solve import solve
    from checkmate.webpage.page import report

    problem, rules = with_host(args, _read(args.problem)), read_rules(args.rule) if args.rule else None
    limits = {"time_limit": args.time_limit, "gap": args.gap}
    solution = solve(problem, args.budget, method=args.method, rules=rules, **limits)
    if solution.plan is None:
        return _say(solution.message or solution.status.meaning, REFUSED)
    out = args.out or Path(args.problem).name.removesuffix(".gz").removesuffix(".json") + ".html"
    rows = frontier(solution.problem, methods=[args.method], **limits) if args.frontier else None
    page = report(solution, out, frontier=rows, prices=args.prices).resolve()
    _show(args, {**solution_record(solution), "page": str(page)}, str(page))
    if args.open and not webbrowser.open(page.as_uri()):
        return _say(f"no browser was found here; open {page}", DONE)
    return INTERRUPTED if solution.interrupted else DONE


def _frontier(args: argparse.Namespace) -> int:
    from checkmate.solvers.frontier import frontier

    methods = [name.strip() for name in args.methods.split(",")]
    limits = {"time_limit": args.time_limit, "gap": args.gap, "jobs": args.jobs}
    rows = frontier(with_host(args, _read(args.problem)), args.budget, methods=methods, **limits)
    _show(args, rows.records(), repr(rows))
    return DONE if any(row.peak is not None for row in rows) else _say("no budget fits any plan", REFUSED)


def _max_batch(args: argparse.Namespace) -> int:
    args.budget = _bytes_of(args)
    parse_bytes(args.budget)
    host = asked_host(args)
    from checkmate.batch.max_batch_size import max_batch_size

    profile, make = _profile(args), _target(args)
    last: dict[int, tuple[Any, Any]] = {}

    def both(size: int) -> tuple[Any, Any]:
        if size not in last:
            last.clear()
            last[size] = make(size)
        return last[size]

    both(args.smallest)  # what is wrong with the function is said before anything else
    if not (args.quiet or args.verbose or sys.stderr.isatty()):
        _say(f"looking for the largest size, for {args.time_limit:g} s at most (--verbose: each size)", DONE)
    found = max_batch_size(
        lambda size: both(size)[0],
        lambda size: both(size)[1],
        budget=args.budget,
        max_overhead=args.max_overhead,
        baselines=args.baselines,
        measure=args.measure,
        profile=profile,
        smallest=args.smallest,
        largest=args.largest,
        time_limit=args.time_limit,
        host=host,
    )
    _show(args, found.summary(), repr(found))
    return INTERRUPTED if found.ended == "interrupted" else DONE


def _fits(args: argparse.Namespace) -> int:
    if args.budget is not None:
        parse_bytes(args.budget)
    host = asked_host(args)
    if args.device:
        _known_device(args.device)
    from torch import optim

    from checkmate.batch.sized_steps import arguments_of
    from checkmate.fitting.fits import fits
    from checkmate.fitting.stand_ins import trained

    chosen = None if args.optimizer is None else getattr(optim, args.optimizer, None)
    if args.optimizer is not None and not (isinstance(chosen, type) and issubclass(chosen, optim.Optimizer)):
        raise UsageError(f"torch.optim has no optimizer {args.optimizer!r}")
    make = _target(args)
    step, batch = make(args.size) if args.size else make()
    positional, named = arguments_of(batch)
    optimizer = None if chosen is None else chosen(trained((step, positional, named)))
    about: dict[str, Any] = {"device": args.device, "budget": args.budget, "host": host, "time_limit": args.time_limit}
    try:
        found = fits(step, *positional, optimizer=optimizer, everything=args.everything, **about, **named)
    except (RuntimeError, TypeError) as error:  # plain PyTorch fails as well
        if args.debug:
            raise
        raise CheckmateError(f"The step of {args.target} fails on its batch: {error}") from error
    _show(args, found.summary(), repr(found))
    return DONE if found.fits else REFUSED


def _demo(args: argparse.Namespace) -> int:
    import torch

    from checkmate.demo.tasks import digits_task, text_task
    from checkmate.demo.training import FULL, LEGEND, QUICK, train_within_budgets

    def say(text: str) -> None:
        if not args.json:
            _out(text)
            sys.stdout.flush()

    torch.set_num_threads(1)  # where bytes and numbers repeat exactly
    began = time.perf_counter()
    say(LEGEND.strip())
    effort = QUICK if args.quick else FULL
    rows = [row for make in (text_task, digits_task) for row in train_within_budgets(make(args.steps), effort, say)]
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
    known = {name: {"summary": m.summary, "source": m.source, "options": m.options} for name, m in table.items()}
    _show(args, known, repr(table))
    return DONE


def _doctor(args: argparse.Namespace) -> int:
    from checkmate.cli.doctor import examine

    found = examine()
    width = max(map(len, found.facts)) + 2
    listed = ((name, fact if isinstance(fact, (list, tuple)) else [fact]) for name, fact in found.facts.items())
    lines = [f"{name:<{width}}{', '.join(str(f) for f in facts if f is not None) or 'none'}" for name, facts in listed]
    _show(args, {"ok": not found.wrong, "wrong": found.wrong, **found.facts}, "\n".join(lines))
    for wrong in found.wrong:
        _say(wrong, REFUSED)
    return REFUSED if found.wrong else DONE


def _selftest(args: argparse.Namespace) -> int:
    import torch

    from checkmate.selftest.checks import CHECKS
    from checkmate.selftest.run import Result, Setting, run_all

    names = [check.name for check in CHECKS]
    if unknown := [name for name in args.only or () if name not in names]:
        raise UsageError(f"there is no check {unknown[0]!r}; the checks are {', '.join(names)}")
    if args.device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device is cpu, cuda or cuda:1, not {args.device!r}")
    if args.device != "cpu" and not torch.cuda.is_available():
        raise CheckmateError("There is no CUDA device here. --device cpu checks what can be checked without one.")
    checks = [check for check in CHECKS if check.name in (args.only or names)]
    results: list[Result] = []

    def failed() -> list[str]:
        return [result.name for result in results if result.verdict == "failed"]

    def keep() -> None:  # before all, since it may not be possible, and after each: what was found is not lost
        if args.json:
            about = {"format": "checkmate-selftest", "version": 1, "device": args.device, "quick": args.quick}
            _write_json(args.json, {**about, "failed": failed(), "checks": [asdict(result) for result in results]})

    keep()
    with showing(lambda: f"{len(results)} of {len(checks)} checks", share=lambda: len(results) / len(checks)):
        for result in run_all(checks, Setting(args.device, args.quick), args.time_limit):
            _out(str(result))
            sys.stdout.flush()
            results.append(result)
            keep()
    counts = Counter(result.verdict for result in results)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    _out(f"{'FAILED' if failed() else 'passed'} on {args.device}: {counted}")
    return _say(f"failed: {', '.join(failed())}", REFUSED) if failed() else DONE


def _bytes_of(args: argparse.Namespace) -> int | str:
    """The budget, or the bytes that a share of the device's room is.

    Raises:
        UsageError: if no device is named whose memory is known.
    """
    if (share := parse_share(args.budget)) is None:
        return str(args.budget)
    from checkmate.profiling.roofline import DEVICES

    if not (device := DEVICES.get(args.device)) or not device.room:
        known = ", ".join(name for name, one in DEVICES.items() if one.room)
        raise UsageError(f"--budget {args.budget} is of the memory of a device: --device names one of {known}")
    return int(share * device.room)


def _profile(args: argparse.Namespace) -> str:
    """The source of costs, as `checkmate.trace` takes it.

    Raises:
        UsageError: if there is no such device.
    """
    if args.profile:
        if not args.profile.endswith(".json"):
            raise UsageError(f"--profile takes a file of measured ops whose name ends in .json, not {args.profile}")
        return str(args.profile)
    if not args.device:
        return "measure"
    device = _known_device(args.device)
    if device.room and parse_bytes(args.budget) > device.room:
        room, all_of_it = format_bytes(device.room), format_bytes(device.memory_bytes)
        _say(
            f"{args.budget} leaves too little of the {all_of_it} of {device.name} to CUDA, cuDNN and cuBLAS, whose "
            f"memory is not in estimates; plan for {room} at most",
            DONE,
        )
    return f"roofline:{args.device}"


def _known_device(name: str) -> Device:
    """The device of a data sheet; a UsageError where there is none."""
    from checkmate.profiling.roofline import DEVICES

    if name not in DEVICES:
        raise UsageError(f"there is no device {name!r}; there are {', '.join(DEVICES)}")
    return DEVICES[name]


def _target(args: argparse.Namespace) -> Callable[..., tuple[Any, Any]]:
    """The user's function; where costs are estimated, all that it makes is on the meta device."""
    return maker(args.target, find_function(args.target), on_meta=bool(args.device), debug=args.debug)


def _show(args: argparse.Namespace, document: Any, text: str) -> None:
    """The answer, as it was asked for."""
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


_COMMANDS = {
    "plan": _plan,
    "solve": _solve,
    "report": _report,
    "frontier": _frontier,
    "max-batch": _max_batch,
    "fits": _fits,
    "demo": _demo,
    "methods": _methods,
    "doctor": _doctor,
    "selftest": _selftest,
}
