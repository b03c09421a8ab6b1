"""The words of a command line: options, each defined once, with parsers for their values, and TARGET's function.

A target names the user's function as ``module:function``, from the current folder.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkmate import sizes
from checkmate.errors import CheckmateError
from checkmate.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from checkmate.core.host import Host


_NO_DATA = "With --device tensors are made without data: leave out .cuda() and what reads numbers from them."
_LINES = """\
TARGET is a function that returns (step, batch), and trains nothing itself. In {where} write, for example,

    def example(n=8):
        model, x, y = Model(), torch.ones(n, 3), torch.ones(n, dtype=torch.long)
        return lambda x, y: loss_fn(model(x), y), (x, y)

and name {where}:example."""


class UsageError(Exception):
    """Raised if the command line names something that does not exist or does not fit."""


def maker(target: str, *, on_meta: bool, debug: bool) -> Callable[..., tuple[Any, Any]]:
    """The function that a target names, from the current folder; it is checked to give (step, batch).

    Its errors are one line that names the target; a UsageError says that there is none. ``on_meta``: its tensors are
    made on the meta device, where they take no memory; ``debug``: its errors stay.
    """
    # Import the module or file, and find the function in it.
    where, colon, name = target.rpartition(":")
    if target.endswith(".py") and Path(target).is_file():
        names = re.findall(r"^def ([a-z]\w*)", Path(target).read_text(errors="replace"), re.MULTILINE)
        has = f"{target} has {', '.join(names) or 'no function'}"
        raise UsageError(f"TARGET is {target}:function; {has}. {_LINES.format(where=target)}")
    if not colon or not where or not name:
        raise UsageError(f"TARGET is module:function or file.py:function, not {target!r}")
    import torch  # before the user's folder, where a torch.py may be, is looked through

    from checkmate.capture.provenance import is_users

    module, lines = _module_of(where), _LINES.format(where=where)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no function {name!r}; it has {', '.join(names) or 'none'}. {lines}")
    # A model alone has no batch.
    if isinstance(function, torch.nn.Module) or (inspect.isclass(function) and issubclass(function, torch.nn.Module)):
        raise UsageError(f"{target} is a module. {lines}")

    def make(*size: int) -> tuple[Any, Any]:
        call = f"{target} called with ({', '.join(map(str, size))})"
        # Refuse a function that does not take the size.
        try:
            inspect.signature(function).bind(*size)
        except TypeError as error:
            hint = "" if size else " (--size N gives it N)"
            raise UsageError(f"{call} fails: {error}{hint}. {lines}") from None
        try:
            with torch.device("meta") if on_meta else nullcontext():
                pair = function(*size)
        except CheckmateError:
            raise
        # Name the user's own line that failed.
        except (Exception, SystemExit) as error:  # the user's own, whatever it is
            if debug:
                raise
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
            place = "".join(f"\n  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames[-1:])
            advice = f"\n{lines}" if isinstance(error, SystemExit) else ""
            if on_meta and re.search(r"\bmeta\b|NVIDIA|CUDA", str(error)):
                advice = f"\n{_NO_DATA} {lines}"
            message = f"{type(error).__name__}: {error}. See --debug.{place}{advice}"
            raise CheckmateError(f"{call} failed: {message}") from error
        # Refuse results other than (step, batch).
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[0]):
            kinds = ", ".join(type(part).__name__ for part in pair) if isinstance(pair, tuple) else type(pair).__name__
            raise UsageError(f"{target} returns {f'({kinds})' if isinstance(pair, tuple) else kinds}. {lines}")
        return pair

    return make


def _module_of(where: str) -> Any:
    path = Path(where).resolve()
    for folder in (Path.cwd(), path.parent) if where.endswith(".py") else (Path.cwd(),):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not path.is_file():
            raise UsageError(f"there is no file {where} in {Path.cwd()}")
        # Another module may have this name, such as types: it stays.
        namesake = sys.modules.get(path.stem)
        is_free = namesake is None or getattr(namesake, "__file__", None) == str(path)
        name = path.stem if is_free else f"checkmate_target_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    # The missing module may be the target itself, or one that it imports.
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {where} in {Path.cwd()} or among those installed") from None
        raise CheckmateError(f"{where} cannot be imported: {error}") from error
    except (UsageError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise CheckmateError(
            f"{where} ends the process when it is imported (SystemExit: {error}). Put what it does as a script, such "
            f'as to read its options, under if __name__ == "__main__". {_LINES.format(where=where)}'
        ) from error
    except Exception as error:  # the user's own, at the top of the module
        raise CheckmateError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


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
    "--kernels": option(says="groups of ops by Inductor", choices=("eager", "same-bits", "fused"), default="eager"),
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
    "--largest": option("N", type=size, default=sizes.LARGEST),
}


def add_to(parser: argparse.ArgumentParser, names: Iterable[str], changed: Mapping[str, dict[str, Any]]) -> None:
    """Add options to the parser of a command, some changed as the command asks."""
    costs: Any = parser
    for name in names:
        if name == "--device":
            costs = parser.add_mutually_exclusive_group()
        (costs if name in ("--device", "--profile") else parser).add_argument(name, **changed.get(name, OPTIONS[name]))


def host_of(args: argparse.Namespace, host: Host | None = None) -> Host | None:
    """Read the second memory from options; ``host`` gives the figures that they leave out.

    Raises:
        UsageError: if there are not one or two rates, or nothing names a budget or a rate.
        BudgetError, ValueError: if a number is none.

    >>> asked = argparse.Namespace(host_budget="1 GB", host_rate="2 GB/s,1 GB/s", host_one_link=False)
    >>> print(host_of(asked))
    1.00 GB (1_000_000_000 bytes), 2 GB/s there, 1 back, a link each way
    """
    figures: dict[str, Any] = {"one_link": True} if args.host_one_link else {}
    if args.host_budget is not None:
        figures["budget"] = parse_bytes(args.host_budget)
    if args.host_rate is not None:
        send, *fetch = map(parse_rate, args.host_rate.split(","))
        if len(fetch) > 1:
            raise UsageError(f"--host-rate takes one rate, or one there and one back, not {args.host_rate!r}")
        figures |= {"send": send, "fetch": fetch[0] if fetch else send}
    if host is not None or not figures:
        return replace(host, **figures) if host is not None and figures else host
    from checkmate.core.host import Host

    for name, option_name in (("budget", "--host-budget"), ("send", "--host-rate")):
        if name not in figures:
            raise UsageError(f"a second memory needs {option_name}, too: none is known")
    return Host(**figures)
