"""How patches are put in place: around a function under the name that it has in the running version of PyTorch.

None of these names is public, and some have moved from one version to the next. Where the running version has none of
those that are known, the patch is left out: what it makes possible is refused then, as Dynamo refuses it, or described
as PyTorch describes it. `LEFT_OUT` names them, ``checkmate doctor`` shows them, and a warning says so once.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("checkmate.capture.patches")
LEFT_OUT: list[str] = []  # what the running version of PyTorch has not, by the names that were looked for


def wrap(holder: Any, names: str | tuple[str, ...], around: Callable[[Any], Any]) -> None:
    """Put a function of PyTorch's within another, for the process.

    Args:
        holder: a class or module.
        names: of the function, the latest first, where it has had several.
        around: gives the other one, from the function.
    """
    known = (names,) if isinstance(names, str) else names
    name = next((name for name in known if hasattr(holder, name)), None)
    if name is None:
        leave_out(f"{holder.__name__}.{known[0]}")
    else:
        setattr(holder, name, around(getattr(holder, name)))


def leave_out(name: str) -> None:
    """Note that a patch does not fit."""
    LEFT_OUT.append(name)
    log.warning("PyTorch %s has no %s: what needs it is refused, or not as in eager PyTorch.", torch.__version__, name)


def moved(name: str, *modules: str) -> Any:
    """What has had its place in several modules, the latest first.

    Raises:
        ImportError: if it is in none of them.
    """
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"PyTorch {torch.__version__} has no {name} in {' or '.join(modules)}.")
