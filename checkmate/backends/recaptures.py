"""The kind of a call, its tensors' shapes and types, and the reason why a step is captured again."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkmate.torch_internals.capturing import _debug_get_cache_entry_list, maybe_mark_dynamic

_EQUALS = re.compile(r"^(?P<source>[LG]\[[^#]+?) == (?P<value>[^#]+?)\s*(?:#\s*(?P<line>.+?)\s*(?:\(HINT.*)?)?$")
_OF_SHAPE = re.compile(r"\.(size|stride|storage_offset)\(\)")
_SPELLINGS = (
    (re.compile(r"^G\['(\w+)'\]"), r"\1"),
    (re.compile(r"^L\['kwargs'\]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\.__dict__\['_modules'\]"), "._modules"),
    (re.compile(r"\._modules\['(\d+)'\]"), r"[\1]"),
    (re.compile(r"\._modules\['(\w+)'\]"), r".\1"),
    (re.compile(r"\.__dict__\['(\w+)'\]"), r".\1"),
)
Constant = int | float | bool | str


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    >>> short, long = (Kind.of((torch.ones(4, length), True), {}) for length in (7, 9))
    >>> short.opened(long).includes(Kind.of((torch.ones(4, 300), True), {}))
    True
    >>> short.opened(long).includes(Kind.of((torch.ones(5, 7), True), {}))
    False
    """

    types: Any  # of all that is given, down to the leaves of containers; numbers are left to guards
    sizes: tuple[int | None, ...]  # of all tensors, one after another; None: any size of two or more

    @classmethod
    def of(cls, args: Any, kwargs: Any, beside: Any = None) -> Kind:
        """The kind of a call with these arguments; calls of one kind have equal ``beside``."""
        tensors: list[torch.Tensor] = []
        types = beside, _types((args, kwargs), tensors)
        return cls(types, tuple(size for tensor in tensors for size in tensor.shape))

    def includes(self, call: Kind) -> bool:
        """Tell whether a call of another kind is of this one too."""
        if self.types != call.types:
            return False
        pairs = zip(self.sizes, call.sizes, strict=True)
        return all(n == m or (n is None and m is not None and m > 1) for n, m in pairs)

    def opened(self, call: Kind) -> Kind | None:
        """The kind with all sizes open that differ in a call; None if more differs, or none, or a size is 0 or 1.

        Such sizes are captured by themselves: they decide what is broadcast, and what is computed at all.
        """
        if self.types != call.types or self.sizes == call.sizes:
            return None
        pairs = [*zip(self.sizes, call.sizes, strict=True)]
        if any(n != m and min(n or 2, m or 2) < 2 for n, m in pairs):
            return None
        return replace(self, sizes=tuple(n if n == m else None for n, m in pairs))

    @contextmanager
    def marked(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Have Dynamo take open sizes of these arguments for inputs within the block, unless the step fixes them."""
        tensors: list[torch.Tensor] = []
        _types((args, kwargs), tensors)
        sizes = iter(self.sizes)
        before: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}  # what the user has marked
        try:
            for tensor in tensors:
                for dim in [dim for dim, size in enumerate([next(sizes) for _ in tensor.shape]) if size is None]:
                    for marked, d in _same(tensor, dim):
                        before.setdefault(id(marked), (marked, deepcopy(_marks(marked))))
                        maybe_mark_dynamic(marked, d)
            yield
        finally:
            for marked, marks in before.values():
                for name in _marks(marked):
                    delattr(marked, name)
                vars(marked).update(marks)


def _marks(tensor: torch.Tensor) -> dict[str, Any]:
    """Dynamo's notes on a tensor, such as its marked sizes."""
    return {name: value for name, value in vars(tensor).items() if "_dynamo" in name}


def _same(tensor: torch.Tensor, dim: int) -> Iterator[tuple[torch.Tensor, int]]:
    """A dimension of a tensor, and the same one of its base."""
    yield tensor, dim
    base = tensor._base
    if base is not None:
        pairs = zip(base.shape, base.stride(), strict=True)
        yield from ((base, d) for d, pair in enumerate(pairs) if pair == (tensor.shape[dim], tensor.stride(dim)))


def _types(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """The types of a call, without sizes; append its tensors."""
    if isinstance(tree, torch.Tensor) and not tree.is_nested:
        tensors.append(tree)
        return tree.dim(), tree.dtype, tree.device, tree.requires_grad, tree.is_leaf
    kind = type(tree)
    if kind in (tuple, list):
        return kind, *(_types(item, tensors) for item in tree)
    if kind is dict:
        return kind, *((name, _types(value, tensors)) for name, value in tree.items())
    return tree if kind in (bool, str) else kind


@dataclass(frozen=True)
class Reason:
    """A number or text that differs from its value at an earlier capture."""

    source: str  # as Dynamo names it
    value: Constant  # at the earlier capture
    now: Constant
    line: str = ""  # of the user's code, where it is used, if known
    advice: str = ""  # the way out, if it is not to make it a tensor


def constants(own: types.FunctionType) -> dict[str, Constant]:
    """The values, by source, that are constants in Dynamo's capture of a function."""
    return {source: value for source, value, _ in _compared(own)}


def why_not(own: types.FunctionType, arguments: dict[str, Any]) -> list[Reason]:
    """The values that differ between a call and the capture of ``own``, a function of any arguments.

    None, if it is something else, such as a shape or a mode, or if Dynamo does not say. ``arguments``: the call's
    "args" and "kwargs", and the "fn" that was captured.
    """
    try:
        failed = [
            part for entry in _entries(own) for part in entry.guard_manager.check_verbose(arguments).verbose_code_parts
        ]
    except (AttributeError, TypeError, RuntimeError):  # none of this is a public interface
        return []
    return changed(own, arguments) if any(map(read, failed)) else []


def changed(own: types.FunctionType, arguments: dict[str, Any]) -> list[Reason]:
    """Compare the values of a call with those of the capture of ``own``, whatever else differs."""
    reasons = []
    for source, value, line in _compared(own):
        now = value_now(source, own, arguments)
        if now is not None and (type(now) is not type(value) or now != value):
            reasons.append(Reason(source, value, now, line))
    return reasons


def _compared(own: types.FunctionType) -> list[tuple[str, Constant, str]]:
    try:
        roots = [entry.guard_manager.root for entry in _entries(own)]
        guards = [guard for root in roots for guard in (*_leaves(root), *root.get_epilogue_lambda_guards())]
        return [comparison for guard in guards for part in guard.verbose_code_parts() if (comparison := read(part))]
    except (AttributeError, TypeError):
        return []


def _leaves(manager: Any) -> Iterator[Any]:
    yield from manager.get_leaf_guards()
    children = list(manager.get_child_managers())
    if hasattr(manager, "get_key_value_managers"):  # of a dict
        children += [child for pair in manager.get_key_value_managers().values() for child in pair if child is not None]
    for child in children:
        yield from _leaves(child)


def value_now(source: str, own: types.FunctionType, arguments: dict[str, Any]) -> Constant | None:
    """The value of a source in a call, as guards evaluate it; None if it is no number or text."""
    try:
        value = eval(source, {"L": arguments, "G": _entries(own)[0].guard_manager.global_scope})
    except (AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError):
        return None  # it is gone, or needs a function of Dynamo's
    return value if type(value) in (int, float, bool, str) else None


def _entries(own: types.FunctionType) -> list[Any]:
    return _debug_get_cache_entry_list(own.__code__)


def read(guard: str) -> tuple[str, Constant, str] | None:
    """Source, value and line of a guard, from its text; None if it compares with no value, or a tensor's shape.

    >>> read("L['args'][0].beta == 0.5     # x * self.beta  # vae.py:12 in forward")
    ("L['args'][0].beta", 0.5, 'x * self.beta  # vae.py:12 in forward')
    """
    match = _EQUALS.match(guard.strip())
    if match is None or _OF_SHAPE.search(match["source"]):
        return None
    try:
        value = ast.literal_eval(match["value"])
    except (SyntaxError, ValueError):
        return None
    return (match["source"], value, match["line"] or "") if isinstance(value, (int, float, bool, str)) else None


def spelled(source: str, fn: Callable[..., Any]) -> str:
    """A source of Dynamo's as the user's code writes it.

    >>> class Net:
    ...     def forward(self, x, beta): pass
    >>> spelled("L['args'][0].__dict__['_modules']['head']._modules['2'].beta", Net.forward)
    'self.head[2].beta'
    >>> spelled("L['args'][2]", Net.forward)
    'beta'
    """
    if positional := re.match(r"L\['args'\]\[(\d+)\]", source):
        names: list[str] = []
        with suppress(TypeError, ValueError):  # a builtin may have no signature
            names = [*inspect.signature(fn).parameters]
        place = int(positional.group(1))
        name = names[place] if place < len(names) else f"argument {place + 1}"
        source = name + source[positional.end() :]
    if match := re.match(r"L\['fn'\]\.__closure__\[(\d+)\]\.cell_contents", source):
        names = [*getattr(getattr(fn, "__code__", None), "co_freevars", ())]
        place = int(match.group(1))
        source = (names[place] if place < len(names) else "a closure") + source[match.end() :]
    source = re.sub(r"^L\['fn'\](\.__self__)?", "self", source)
    for pattern, spelling in _SPELLINGS:
        source = pattern.sub(spelling, source)
    return source


def too_many(fn: Callable[..., Any], name: str, reasons: Sequence[Reason], most: int) -> str:
    """The message for a value that changes between calls until all captures are used up.

    ``reasons``: of the last captures, oldest first.
    """
    last = reasons[-1]
    changed = spelled(last.source, fn)
    values = ", ".join(repr(value) for value in (*(reason.value for reason in reasons[-3:]), last.now))
    line = f"\n  {last.line}" if last.line else ""
    # The way out: the reason's own advice, else by the type of the value.
    advice = last.advice
    if not advice and isinstance(last.now, (bool, str)):
        advice = "Compile one function for each value, or raise max_plans."
    elif not advice:
        statement = f"{changed} = torch.tensor({last.now!r})"
        if re.fullmatch(r"self(\.\w+|\[\d+\])*\.\w+", changed):
            owner, _, attribute = changed.rpartition(".")
            statement = f"{owner}.register_buffer({attribute!r}, torch.tensor({last.now!r}))"
        advice = (
            f"Make it a tensor: {statement} once, and {changed}.fill_(...) to change it. Where it is a size, let it "
            "take fewer values, or raise max_plans."
        )
    return (
        f"{changed} changes from call to call of {name}, and each value is captured and planned anew. Of the {most} "
        f"captures that are kept (max_plans={most}) half or more are for values of it. The last ones: {values}.{line}\n"
        f"{advice}"
    )
