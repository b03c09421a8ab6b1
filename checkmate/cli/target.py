"""Find the user's function that a command line names: ``module:function``, from the current folder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from checkmate.errors import CheckmateError


class UsageError(Exception):
    """The command line names something that is not there, or is no such thing."""


def maker(
    target: str, function: Callable[..., Any], *, on_meta: bool, debug: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """The function, checked: it gives (step, batch), and its errors are one line that names the target.

    Args:
        on_meta: make its tensors on the meta device, where they take no memory.
        debug: leave its errors as they are.
    """
    import torch

    def make(*size: int) -> tuple[Any, Any]:
        try:
            with torch.device("meta") if on_meta else nullcontext():
                made = function(*size)
        except CheckmateError:
            raise
        except Exception as error:  # the user's own, whatever it is
            if debug:
                raise
            called = f"{target} called with ({', '.join(map(str, size))})"
            raise CheckmateError(f"{called} failed: {type(error).__name__}: {error}. See --debug.") from error
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise UsageError(f"{target} is to return (step, batch), not {type(made).__name__}")
        return made

    return make


def find_function(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names, seen from the current folder.

    Raises:
        UsageError: if there is none.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"TARGET is module:function or file.py:function, not {target!r}")
    module = _module_of(where)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return function


def _module_of(where: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"there is no file {where} in {Path.cwd()}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {where} in {Path.cwd()} or among those installed") from None
        raise CheckmateError(f"{where} cannot be imported: {error}") from error
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:  # the user's own, at the top of the module
        raise CheckmateError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
