"""The methods and their options, to read at a prompt or in a notebook."""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Iterator, Mapping

from checkmate.solvers.methods import METHODS, Method

__all__ = ["Catalogue", "methods"]

WIDTH = 110  # characters of a line


class Catalogue(Mapping[str, Method]):
    """The methods by name; prints as a list, and is a table in a notebook."""

    def __init__(self, table: Mapping[str, Method]) -> None:
        self._table = dict(table)

    def __getitem__(self, name: str) -> Method:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        column = max(map(len, self), default=0) + 2
        lines = []
        for name, method in self._table.items():
            lines += _wrapped(f"{name:<{column}}{method.summary}", column)
            lines += _wrapped(" " * column + f"source:  {method.source}", column + 9)
            lines += _wrapped(" " * column + f"options: {_options(method)}", column + 9)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{html.escape(name)}</code></td>"
            f"<td style='text-align: left'>{html.escape(method.summary)}</td>"
            f"<td style='text-align: left'>{html.escape(method.source)}</td>"
            f"<td style='text-align: left'><code>{html.escape(_options(method))}</code></td></tr>"
            for name, method in self._table.items()
        )
        heads = "".join(f"<th>{head}</th>" for head in ("method", "what it does", "source", "options"))
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def methods() -> Catalogue:
    """What `checkmate.solve` can be asked for: each method with what it does, its source and its options.

    >>> "milp" in methods(), methods()["milp"].source
    (True, 'Jain et al., MLSys 2020')
    """
    return Catalogue(METHODS)


def _options(method: Method) -> str:
    """``time_limit=60.0, seed=0``: the options with their defaults."""
    parameters = inspect.signature(method.run).parameters
    defaults = ((name, parameters[name].default if name in parameters else None) for name in method.options)
    return ", ".join(f"{name}={default!r}" for name, default in defaults) or "none"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True, replace_whitespace=False)
