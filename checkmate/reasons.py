"""Why a captured graph is not for a call: what Dynamo's guards say, in the names of the user's code."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo import eval_frame

_EQUALS = re.compile(r"^(?P<source>[LG]\[.+?) == (?P<value>[^#]+?)\s*(?:#\s*(?P<line>.+?)\s*(?:\(HINT.*)?)?$")
_SPELLINGS = (
    (re.compile(r"^G\['(\w+)'\]"), r"\1"),
    (re.compile(r"^L\['kwargs'\]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\.__dict__\['_modules'\]"), "._modules"),
    (re.compile(r"\._modules\['(\d+)'\]"), r"[\1]"),
    (re.compile(r"\._modules\['(\w+)'\]"), r".\1"),
    (re.compile(r"\.__dict__\['(\w+)'\]"), r".\1"),
)


@dataclass(frozen=True)
class Reason:
    """A guard that fails: something that had a value, a number or a text, and has another now."""

    source: str  # as Dynamo names it
    value: int | float | bool | str | None  # what it was
    line: str  # of the user's code, where it is used; empty if not known
    advice: str = ""  # what to do about it, if that is not to make it a tensor


def why_not(own: types.FunctionType, fn: Callable[..., Any], args: Any, kwargs: Any) -> Reason | None:
    """The value that keeps what Dynamo captured of a function from being for a call.

    None if it is something else, such as a shape or a mode, or if Dynamo does not say.

    Args:
        own: what was captured, a function of any arguments which calls ``fn``.
        fn: the user's; args, kwargs: of the call.
    """
    try:
        entries = eval_frame._debug_get_cache_entry_list(own.__code__)
        given = {"args": args, "kwargs": kwargs, "fn": fn}
        said = [entry.guard_manager.check_verbose(given).verbose_code_parts for entry in entries]
    except (AttributeError, TypeError, RuntimeError):  # none of this is a public interface
        return None
    return next((reason for parts in said for part in parts if (reason := read(part))), None)


def asked(where: str, value: bool | int) -> Reason:
    """A value of a tensor that the step asks for, in a place of the user's code, and that is another one now."""
    advice = "Compute without asking: torch.where(condition, a, b), or x[:, index] with a tensor as index."
    return Reason(f"the value of a tensor that the step asks for ({where})", value, "", advice)


def read(guard: str) -> Reason | None:
    """A guard's text as a reason, if it compares with a value.

    >>> read("L['args'][0].beta == 0.5     # x * self.beta  # vae.py:12 in forward")
    Reason(source="L['args'][0].beta", value=0.5, line='x * self.beta  # vae.py:12 in forward')
    """
    found = _EQUALS.match(guard.strip())
    if found is None:
        return None
    try:
        value = ast.literal_eval(found["value"])
    except (SyntaxError, ValueError):
        return None
    if not isinstance(value, (int, float, bool, str)):
        return None
    return Reason(found["source"], value, found["line"] or "")


def spelled(source: str, fn: Callable[..., Any]) -> str:
    """A source of Dynamo's as it stands in the user's code.

    >>> class Net:
    ...     def forward(self, x, beta): pass
    >>> spelled("L['args'][0].__dict__['_modules']['head']._modules['2'].beta", Net.forward)
    'self.head[2].beta'
    >>> spelled("L['args'][2]", Net.forward)
    'beta'
    """
    if positional := re.match(r"L\['args'\]\[(\d+)\]", source):
        names = [*_parameters(fn)]
        place = int(positional.group(1))
        name = names[place] if place < len(names) else f"argument {place + 1}"
        source = name + source[positional.end() :]
    if held := re.match(r"L\['fn'\]\.__closure__\[(\d+)\]\.cell_contents", source):
        names = [*getattr(getattr(fn, "__code__", None), "co_freevars", ())]
        place = int(held.group(1))
        source = (names[place] if place < len(names) else "a closure") + source[held.end() :]
    source = re.sub(r"^L\['fn'\](\.__self__)?", "self", source)
    for pattern, spelling in _SPELLINGS:
        source = pattern.sub(spelling, source)
    return source


def _parameters(fn: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return ()


def too_many(fn: Callable[..., Any], name: str, reasons: Sequence[Reason], most: int) -> str:
    """What to tell the user of a value that changes from call to call, as often as captures are kept.

    Args:
        fn: the step; name: of the step.
        reasons: of the last captures, oldest first, each with the value that another capture is for.
        most: how many captures are kept.
    """
    changed = spelled(reasons[-1].source, fn)
    values = ", ".join(repr(reason.value) for reason in reasons[-3:])
    line = f"\n  {reasons[-1].line}" if reasons[-1].line else ""
    return (
        f"{changed} changes from call to call of {name}, and each value is captured and planned anew: {most} captures "
        f"are kept (max_plans={most}), and they are used up. Its last values: {values}.{line}\n"
        f"{_advice(changed, reasons[-1])}"
    )


def _advice(changed: str, reason: Reason) -> str:
    if reason.advice:
        return reason.advice
    if isinstance(reason.value, (bool, str)):
        return "Compile one function for each value, or raise max_plans."
    if re.fullmatch(r"self(\.\w+)+", changed):
        owner, _, attribute = changed.rpartition(".")
        return (
            f"Make it a tensor: {owner}.register_buffer({attribute!r}, torch.tensor({reason.value!r})), and write to "
            f"it with {changed}.fill_(...)."
        )
    return f"Make it a tensor: pass torch.tensor({reason.value!r}) for it, and write to it with fill_(...)."
