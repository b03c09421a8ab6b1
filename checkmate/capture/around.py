"""Parts around each call of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any


class Around:
    """A part that runs before and after each call of a compiled function."""

    def before(self, inputs: list[Any]) -> Any:
        """Replace inputs in their list, or raise; give a note for `after`."""

    def after(self, note: Any, args: Sequence[Any], results: Any) -> Any:
        """Give the results in their place; ``args`` are the inputs as the call had them, ``note`` is from `before`."""
        return results


def surrounded(run: Callable[..., Any], parts: Sequence[Around]) -> Callable[..., Any]:
    """Wrap a compiled function in parts: those before it run in this order, those after it in the reverse.

    >>> class Doubled(Around):
    ...     def before(self, inputs):
    ...         inputs[0] *= 2
    >>> surrounded(lambda x: [x], [Doubled()])(3)
    [6]
    """
    befores = [part.before for part in parts]
    afters = [(i, part.after) for i, part in enumerate(parts) if type(part).after is not Around.after][::-1]

    @wraps(run)
    def call(*args: Any) -> Any:
        inputs = [*args]
        notes = [before(inputs) for before in befores]
        results = run(*inputs)
        for i, after in afters:
            results = after(notes[i], args, results)
        return results

    return call
