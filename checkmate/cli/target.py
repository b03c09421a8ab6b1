"""Find the user's function that a command line names: ``module:function``, from the current folder."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from checkmate.errors import CheckmateError

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
        known = re.findall(r"^def ([a-z]\w*)", Path(target).read_text(errors="replace"), re.MULTILINE)
        has = f"{target} has {', '.join(known) or 'no function'}"
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
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no function {name!r}; it has {', '.join(known) or 'none'}. {lines}")
    # A model alone has no batch.
    if isinstance(function, torch.nn.Module) or (inspect.isclass(function) and issubclass(function, torch.nn.Module)):
        raise UsageError(f"{target} is a module. {lines}")

    def make(*size: int) -> tuple[Any, Any]:
        called = f"{target} called with ({', '.join(map(str, size))})"
        # Refuse a function that does not take the size.
        try:
            inspect.signature(function).bind(*size)
        except TypeError as error:
            hint = "" if size else " (--size N gives it N)"
            raise UsageError(f"{called} fails: {error}{hint}. {lines}") from None
        try:
            with torch.device("meta") if on_meta else nullcontext():
                made = function(*size)
        except CheckmateError:
            raise
        # Name the user's own line that failed.
        except (Exception, SystemExit) as error:  # the user's own, whatever it is
            if debug:
                raise
            frames = [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]
            place = "".join(f"\n  {one.filename}:{one.lineno} in {one.name}: {one.line}" for one in frames[-1:])
            advice = f"\n{lines}" if isinstance(error, SystemExit) else ""
            if on_meta and re.search(r"\bmeta\b|NVIDIA|CUDA", str(error)):
                advice = f"\n{_NO_DATA} {lines}"
            said = f"{type(error).__name__}: {error}. See --debug.{place}{advice}"
            raise CheckmateError(f"{called} failed: {said}") from error
        # Refuse results other than (step, batch).
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else type(made).__name__
            raise UsageError(f"{target} returns {f'({kinds})' if isinstance(made, tuple) else kinds}. {lines}")
        return made

    return make


def _module_of(where: str) -> Any:
    path = Path(where).resolve()
    for folder in (Path.cwd(), path.parent) if where.endswith(".py") else (Path.cwd(),):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    # By name, or from a file.
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        if not path.is_file():
            raise UsageError(f"there is no file {where} in {Path.cwd()}")
        # Another module may have this name, such as types: it stays.
        other = sys.modules.get(path.stem)
        is_free = other is None or getattr(other, "__file__", None) == str(path)
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
