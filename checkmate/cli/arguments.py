"""The words of a command line: options, each a line as the help shows it, and the user's function that TARGET names."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkmate.core.host import Host
from checkmate.core.solution import Query
from checkmate.errors import CheckmateError
from checkmate.units import parse_bytes, parse_rate

# An option a line: its name, its value if it has one, and its help. VALUE! must be named, VALUE+ is one or more, VALUE*
# is named again for more. An option that is not named has the default of the function that takes it.
OPTIONS = f"""\
--json                             answer as JSON
--quiet                            show no progress
--verbose                          show all that is logged, on standard error
--debug                            end errors with a traceback
TARGET                             module:function
PROBLEM.json
--device NAME                      estimate for a device such as h100; nothing is allocated here or runs
--profile OPS.json                 costs that were measured elsewhere
--kernels {{eager,same-bits,fused}}  groups of ops by Inductor
--size N                           call the function with this size
--save-problem FILE                write what was traced, as for checkmate solve
--budget BYTES!                    such as 8GB or 512MiB; where --device names one, also fit or 70%
--method METHOD                    see checkmate methods
--save-plan FILE                   write the plan, step by step, as JSON
--report FILE                      write the same plan as one HTML page, too
-o FILE                            by default the problem's name with .html, in the current folder
--open                             show it in the browser
--everything                       all ways and the largest batch, also where something fits
--frontier                         with the cost of other budgets, which takes as many solves
--prices                           with what a little less or more memory would change, which takes two solves
--rule PATTERN=RULE*               such as 'blocks.3=keep', again for more; see the guide
--host-budget BYTES                of a second memory, in which values may wait
--host-rate RATE[,RATE]            of the link there, and back if that differs, such as 55GB/s,50GB/s
--host-one-link                    both directions wait for each other
--time-limit S                     by default {Query.seconds:g} s
--gap GAP                          stop at this gap, by default {Query.gap:g}
--only NAME*                       a check by its name, again for more
--quick                            small networks
--steps N                          to train in each run, by default 25
--methods A,B                      by default {Query.method}
--jobs N                           processes at a time
--max-overhead CAP                 one-forward (default), none, or a share of the step such as 0.3
--baselines                        find the largest sizes of other methods, too
--measure                          run the step at the answer and measure its peak
--optimizer CLASS                  of torch.optim, by default AdamW
--smallest N
--largest N
"""
LINES = {line.split()[0]: line for line in OPTIONS.splitlines()}


class UsageError(Exception):
    """Raised if the command line names something that does not exist or does not fit."""


class Arguments(argparse.Namespace):
    """The arguments that were named; others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of argparse's own
            raise AttributeError(name)
        return None


def add_option(parser: Any, line: str) -> None:
    """Add an option to the parser of a command, by its name or by a line as in `OPTIONS`."""
    parts = re.fullmatch(r"(\S+)(?: (\S+?)([!+*]?))??(?:  +(.*))?", LINES.get(line, line))
    assert parts is not None, line
    name, value, sign, says = parts.groups()
    more: dict[str, Any] = {"help": says and says.replace("%", "%%")}
    if not name.startswith("-"):
        more["metavar"], name = name, name.split(".")[0].lower()
    elif value is None:
        more["action"] = "store_true"
    else:
        types = {"N": size, "S": float, "GAP": float, "CAP": overhead}
        more |= {"metavar": value, "type": types.get(value), "required": sign == "!"}
        more |= {"+": {"nargs": "+"}, "*": {"action": "append"}}.get(sign, {})
        more |= {"choices": value[1:-1].split(",")} if value.startswith("{") else {}
    parser.add_argument(name, **more)


def size(text: str) -> int:
    """A batch size, or another count: a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def overhead(text: str) -> float | str | None:
    """A cap on recomputation, as `checkmate.max_batch_size` takes it: one-forward, none or a share."""
    try:
        return None if text == "none" else text if text == "one-forward" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither one-forward, none nor a share such as 0.3") from None


def host_of(args: Arguments, host: Host | None = None) -> Host | None:
    """Read the second memory from options; ``host`` gives the figures that they leave out.

    Raises:
        UsageError: if there are not one or two rates, or nothing names a budget or a rate.
        BudgetError, ValueError: if a number is none.

    >>> print(host_of(Arguments(host_budget="1 GB", host_rate="2 GB/s,1 GB/s")))
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
    for name, option in (("budget", "--host-budget"), ("send", "--host-rate")):
        if name not in figures:
            raise UsageError(f"a second memory needs {option}, too: none is known")
    return Host(**figures)


_NO_DATA = "With --device tensors are made without data: leave out .cuda() and what reads numbers from them."
_LINES = """\
TARGET is a function that returns (step, batch), and trains nothing itself. In {where} write, for example,

    def example(n=8):
        model, x, y = Model(), torch.ones(n, 3), torch.ones(n, dtype=torch.long)
        return lambda x, y: loss_fn(model(x), y), (x, y)

and name {where}:example."""


def maker(target: str, *, on_meta: bool, debug: bool) -> Callable[..., tuple[Any, Any]]:
    """The function that a target names, ``module:function``, from the current folder; it gives (step, batch).

    Its errors are one line that names the target; a UsageError says that there is none. ``on_meta``: its tensors are
    made on the meta device, where they take no memory; ``debug``: its errors stay.
    """
    # Import the module or file, and find the function in it.
    where, _, name = target.rpartition(":")
    if target.endswith(".py") and Path(target).is_file():
        names = re.findall(r"^def ([a-z]\w*)", Path(target).read_text(errors="replace"), re.MULTILINE)
        has = f"{target} has {', '.join(names) or 'no function'}"
        raise UsageError(f"TARGET is {target}:function; {has}. {_LINES.format(where=target)}")
    if not where or not name:
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
        kinds = [type(part).__name__ for part in (pair if isinstance(pair, tuple) else [pair])]
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[0]):
            given = f"({', '.join(kinds)})" if isinstance(pair, tuple) else kinds[0]
            raise UsageError(f"{target} returns {given}. {lines}")
        return pair

    return make


def _module_of(where: str) -> Any:
    path = Path(where).resolve()
    for folder in (Path.cwd(), path.parent) if where.endswith(".py") else (Path.cwd(),):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    if where.endswith(".py") and not path.is_file():
        raise UsageError(f"there is no file {where} in {Path.cwd()}")
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        # Another module may have this name, such as types: it stays.
        namesake = sys.modules.get(path.stem)
        is_free = namesake is None or getattr(namesake, "__file__", None) == str(path)
        name = path.stem if is_free else f"checkmate_target_{path.stem}"
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:  # the user's own, at the top of the module
        # The missing module may be the target itself, or one that it imports.
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{where}.".startswith(f"{missing}."):
            raise UsageError(f"there is no module {where} in {Path.cwd()} or among those installed") from None
        advice = 'Put what it does as a script, such as to read its options, under if __name__ == "__main__".'
        if isinstance(error, SystemExit):
            ends = f"{where} ends the process when it is imported (SystemExit: {error}). {advice}"
            raise CheckmateError(f"{ends} {_LINES.format(where=where)}") from error
        kind = "" if missing else f"{type(error).__name__}: "
        raise CheckmateError(f"{where} cannot be imported: {kind}{error}") from error
