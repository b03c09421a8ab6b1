"""Private names of PyTorch: their place in the running version, and the loss if they are missing.

A row of a table is a `Name`. A table hands out what a name stands for, looked up once: under the latest place that the
running version knows. Of a name that it has nowhere, a stand-in is handed out, which is no class of anything and
refuses to be called: importing a module that uses it does not fail, and the steps that come to need it are refused by
its name. What is put in place of a function of PyTorch's (`Table.wrap`) is left out then, or where that function is no
longer called as it was: `LEFT_OUT` says so, ``checkmate doctor`` shows it, and a warning says it once.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from checkmate.errors import Unsupported

log = logging.getLogger("checkmate.torch_internals")
LEFT_OUT: list[str] = []  # changes that were not put in place, by PyTorch's names
TABLES: list[Table] = []
NOTHING = "no step is captured"


class LacksError(Unsupported):
    """The running version of PyTorch lacks a name that a step needs."""


@dataclass(frozen=True)
class Name:
    """A private name of PyTorch."""

    name: str  # PyTorch's own, as it is imported from a table's module
    place: str  # the module that has it; or its whole path, with a colon after the module
    what: str  # its use
    without: str = NOTHING  # the loss in a version that lacks it
    since: str = ""  # the first version that has it, if older ones are supported: these need nothing for it
    formerly: tuple[str, ...] = ()  # paths of what had its part in older versions, the latest first

    def find(self) -> tuple[str, Any]:
        """Find the path under which the running version has it, and the object; a LacksError if it is nowhere."""
        paths = (self.place if ":" in self.place else f"{self.place}:{self.name}", *self.formerly)
        for path in paths:
            try:
                return path, pkgutil.resolve_name(path)
            except (ImportError, AttributeError):
                continue
        place = paths[0].replace(":", ".").rstrip(".")
        raise LacksError(
            f"PyTorch {torch.__version__} has no {place} ({self.what}). Without it, "
            f"{self.without}. Install a version that checkmate has been tried on, see `checkmate doctor`."
        )


def is_expected(name: Name) -> bool:
    """Tell whether the running version is one that should have a name."""
    major, minor, *_ = torch.__version__.split(".")
    return not name.since or (int(major), int(minor)) >= tuple(map(int, name.since.split(".")))


class _Lacking(type):
    error: LacksError

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise cls.error

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__") and not name.startswith("__torch"):  # Python asks for these
            raise AttributeError(name)
        raise cls.error


class Table:
    """The names of one part of PyTorch.

    >>> from checkmate.torch_internals.running import NAMES
    >>> NAMES.get("tree_leaves")([1, [2]])
    [1, 2]
    """

    def __init__(self, *names: Name) -> None:
        self.names = {name.name: name for name in names}
        TABLES.append(self)

    def get(self, name: str) -> Any:
        """The object of a name, or a stand-in; an AttributeError if the table does not have it."""
        if name not in self.names:
            raise AttributeError(f"no private name of PyTorch's is known as {name}")
        try:
            return self.names[name].find()[1]
        except LacksError as error:
            return _Lacking(name, (Exception,), {"error": error})  # which an except clause may name

    def has(self, name: str) -> bool:
        """Tell whether the running version has a name."""
        try:
            self.names[name].find()
        except LacksError:
            return False
        return True

    def wrap(self, name: str, around: Callable[[Any], Any]) -> None:
        """Put another function, which ``around`` makes, in place of a function or method, for the process."""
        try:
            path, function = self.names[name].find()
        except LacksError as error:
            if is_expected(self.names[name]):
                leave_out(name, str(error))
            return
        wrapper, signature = around(function), inspect.signature(function)
        # The wrapper takes as many arguments, or any after its first ones.
        kinds = [p.kind for p in inspect.signature(wrapper, follow_wrapped=False).parameters.values()]
        count, variadic = len(signature.parameters), inspect.Parameter.VAR_POSITIONAL
        if kinds.index(variadic) > count if variadic in kinds else len(kinds) != count:
            leave_out(name, f"PyTorch {torch.__version__} calls {path.replace(':', '.')} otherwise: {signature}")
            return
        place, _, attribute = path.replace(":", ".").rpartition(".")
        holder = pkgutil.resolve_name(place)
        is_bound = isinstance(inspect.getattr_static(holder, attribute), (classmethod, staticmethod))
        setattr(holder, attribute, staticmethod(wrapper) if is_bound else wrapper)


def put_in_place(change: str, install: Callable[[], None]) -> None:
    """Change PyTorch in one way, but where the running version lacks a name that this needs."""
    try:
        install()
    except (LacksError, AttributeError, KeyError, TypeError) as error:
        leave_out(change, f"{type(error).__name__}: {error}")


def leave_out(name: str, reason: str) -> None:
    """Note that something is not put in place."""
    LEFT_OUT.append(name)
    log.warning("%s is left out: %s What needs it is refused, or not as in eager PyTorch.", name, reason)
