"""Optimizers that update each parameter alone: known by a table, or promised by their author, and then tried.

**Known.** What these compute of a parameter depends on nothing but its gradient, its state and its group's settings. A
class that is derived from one has its parent's bits where it changes nothing that the parent's `step` runs: it may have
its own ``__init__``, ``add_param_group``, and what saves and loads its state.

Of other libraries `NAMED` has those that tests have shown to do so.

**Promised.** Of any other optimizer only its author can know: what a `step` does for large parameters, or after a
thousand updates, no trial shows. So ``alone=True`` is asked for, and an optimizer without it is refused.

**Tried.** What is named or promised is tried as well. It runs its own `step`, as it is, for one parameter at a time, so
that no number in it is a constant of a plan. Whether that has the bits of one `step` for all is tried on copies of the
optimizer whose parameters and states are cut down to three elements a dimension. One copy steps at once, the other for
one parameter after the other, from the last to the first. What a `step` does once for all, as to count in a group or to
set a rate, is done by one more run, in which no parameter has a gradient. Behind each of eight steps both must have the
same bits in parameters, states, settings and attributes: with gradients of several sizes, none for some parameters, and
after 10^9 updates. While it steps at once, no op may read what belongs to two parameters, draw random numbers, or speak
with other ranks, whatever comes of it.

What the trial cannot see is a `step` that does something else for parameters of more elements, or at other steps than
these. ``verify=True`` compares a first step of the parameters themselves.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn, optim

from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import storage
from checkmate.errors import Unsupported
from checkmate.torch_internals.dispatcher import TorchDispatchMode, outside_tracing
from checkmate.torch_internals.trees import tree_leaves, tree_map_only

# What they compute of a parameter depends on nothing but its gradient, its state and its group's settings.
SUPPORTED = (
    *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.Muon),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
NAMED = {"transformers.optimization.Adafactor"}  # of other libraries, as tests have shown
LATE = 10**9  # updates, after which an optimizer does nothing more for the first time
_BESIDE_STEP = {  # what a class may have of its own beside what its parent's step runs
    *("__init__", "add_param_group", "state_dict", "load_state_dict", "zero_grad", "__getstate__", "__setstate__"),
    *("__repr__", "__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__"),
    *("__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__orig_bases__"),
}
_AROUND = optim.Optimizer.profile_hook_step(len).__code__  # of each step
_SCALES = (1.0, 1e-3, 1e3, 0.0, 1.0, 1.0, 1e-3, 1e3)  # of the gradients of each step
_LATE_FROM = 5  # the step before which so many updates are counted
_lift = torch.ops.aten.lift_fresh.default  # of a tensor that Python's numbers have just become
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_APART = ("param_groups", "state", "step")  # attributes of an optimizer that are looked at by themselves, or not
Place = tuple[Any, ...]  # where something is in an optimizer


@dataclass(frozen=True)
class Trial:
    """What was found of an optimizer that updates each parameter alone."""

    version: int  # tells its code and what it is made with from others
    sets: frozenset[str]  # the settings of groups that its step sets itself
    writes: bool  # over the gradient


_tried: WeakKeyDictionary[optim.Optimizer, Trial] = WeakKeyDictionary()


def known(optimizer: optim.Optimizer) -> Any:
    """The class of `torch.optim` whose step an optimizer runs as it is; None: there is none that is known.

    >>> renamed = type("Renamed", (optim.AdamW,), {})
    >>> known(renamed([torch.ones(1)])).__name__
    'AdamW'
    """
    kind: Any = type(optimizer)
    return _known(kind)


@cache
def _known(kind: Any) -> Any:
    for n, base in enumerate(kind.__mro__):
        if base in SUPPORTED and not _is_wrapper(kind):
            own = {name for one in kind.__mro__[:n] for name in vars(one) if hasattr(base, name)}
            changed = own - _BESIDE_STEP - ({"step"} if _as_written(kind.step) is _as_written(base.step) else set())
            return None if changed else base
    return None


def _as_written(step: Any) -> Any:
    """A step without what PyTorch puts around that of each class when it makes the first optimizer of it."""
    return step.__wrapped__ if getattr(step, "__code__", None) is _AROUND else step


def trial_of(optimizer: optim.Optimizer) -> Trial:
    """What `try_alone` found."""
    return _tried[optimizer]


def update_alone(
    optimizer: optim.Optimizer, group: dict[str, Any], parameter: Any, gradient: torch.Tensor | None, states: Any
) -> None:
    """Run an optimizer's own step for one parameter, by a view of it that has this group only.

    Args:
        optimizer: stays as it is, but for what its attributes hold.
        group: of this one parameter; its settings are as the step leaves them, then.
        parameter: is updated.
        gradient: of it.
        states: where its state is found, or made.
    """
    kind = type(optimizer)
    one: Any = object.__new__(kind)
    one.__dict__.update(optimizer.__dict__)
    one.__dict__.pop("step", None)  # in which a scheduler counts
    one.param_groups, one.state = [group], states
    before, parameter.grad = parameter.grad, gradient
    try:
        with torch.no_grad():
            step: Any = kind.step  # of what is known without what a profiler and hooks are told of a whole step
            (step if known(optimizer) is None else inspect.unwrap(step))(one)
    finally:
        parameter.grad = before


def update_once(optimizer: optim.Optimizer) -> None:
    """What an optimizer's own step does once, and not for each parameter: its step, where there is no gradient."""
    if known(optimizer) is not None:
        return
    parameters = _parameters(optimizer)
    gradients = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        type(optimizer).step(optimizer)
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def make_late(counted: Any) -> None:
    """Have so many updates counted in a state or in a group's settings, if they are counted there."""
    step = counted.get("step")
    if isinstance(step, torch.Tensor):
        step.fill_(LATE)
    elif step is not None:
        counted["step"] = LATE


def try_alone(optimizer: optim.Optimizer, instead: str, *, promised: bool) -> None:
    """Find out what is to be known of an optimizer that is said to update each parameter alone.

    Raises:
        Unsupported: if nobody says so, if it does not, or cannot be tried, naming why, and what to do ``instead``.
    """
    name = _name_of(optimizer)
    if not promised and name not in NAMED:
        raise Unsupported(
            f"{name} is not known to update each parameter alone. If its step computes of a parameter nothing but from "
            "its own gradient, its own state and the settings of its group, and draws no random numbers, say so: "
            f"training_step(..., alone=True). {instead}"
        )
    drawn = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002  # from which it might draw
    try:
        with outside_tracing(), torch.enable_grad():
            found = _try(optimizer)
        if repr(drawn) != repr((random.getstate(), np.random.get_state(legacy=False))):  # noqa: NPY002
            raise _NotAloneError("it draws random numbers")
        _tried[optimizer] = found
    except _NotAloneError as error:
        raise Unsupported(
            f"{name} does not update each parameter alone: a trial on small copies of its parameters shows that they "
            f"cannot be updated one after the other: {error}. {instead}"
        ) from None
    except Exception as error:  # of code of the user's
        raise Unsupported(
            f"{name} cannot be tried: its step failed on small copies of its parameters, without a closure: "
            f"{type(error).__name__}: {error}. {instead}"
        ) from error
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002


def refuse_wrappers(optimizer: optim.Optimizer, instead: str) -> None:
    """Refuse what steps by another optimizer.

    Raises:
        Unsupported: naming it, and what to do ``instead``.
    """
    held = tree_leaves([what for name, what in vars(optimizer).items() if name not in _APART])
    inner = [type(one).__name__ for one in held if isinstance(one, optim.Optimizer)]
    if inner or _is_wrapper(type(optimizer)):
        which = f", {inner[0]}," if inner else ""
        raise Unsupported(
            f"{_name_of(optimizer)} steps by another optimizer{which} for all parameters at once. Give that one, if "
            f"nothing else is to be done. {instead}"
        )


def _name_of(optimizer: optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class _NotAloneError(Exception):
    """Why an optimizer is refused, in words."""


def _is_wrapper(kind: type) -> bool:
    """Whether it shows the groups or states of something else."""
    return any(name in vars(one) for one in kind.__mro__ for name in ("param_groups", "state"))


def _parameters(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _try(optimizer: optim.Optimizer) -> Trial:
    at_once, in_turn = _small(optimizer), _small(optimizer)
    started, draw, writes, watch = _facts(at_once), torch.Generator().manual_seed(0), False, _Watch()
    _refuse_uncounted(at_once, started)
    for n, scale in enumerate(_SCALES):
        for counted in (at_once, in_turn) if n == _LATE_FROM else ():
            for one in (*counted.state.values(), *counted.param_groups):
                make_late(one)
        parameters = _parameters(at_once)
        is_left_out = [not p.requires_grad or (n % 3 == 1 and i % 3 == 1) for i, p in enumerate(parameters)]
        gradients = [None if out else _drawn(p, scale, draw) for out, p in zip(is_left_out, parameters, strict=True)]
        writes |= _step_at_once(at_once, gradients, watch)
        _step_in_turn(in_turn, gradients)
        found, expected = _facts(in_turn), _facts(at_once)
        if differ := [place for place in {**expected, **found} if found.get(place) != expected.get(place)]:
            raise _NotAloneError(f"its {_words(differ[0])} is then another than by one step for all")
    _refuse_uncounted(at_once, expected)
    stays = {place: what for place, what in expected.items() if started.get(place) == what}
    sets = {place[1] for place in expected.keys() - stays.keys() if place[0] == "setting"}
    sources = [_source(one) for one in type(optimizer).__mro__ if not one.__module__.startswith(("torch.", "builtins"))]
    made_with = sorted(repr(fact) for fact in stays.items() if fact[0][0] == "attribute" and fact[0][1] != "defaults")
    return Trial(zlib.crc32(repr((sources, made_with)).encode()), frozenset(sets), writes)


def _small(optimizer: optim.Optimizer) -> Any:
    """A copy of an optimizer, of parameters and states that are cut down."""
    made: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    for p in _parameters(optimizer):
        memo[id(p)] = small = nn.Parameter(cut(p.detach()), requires_grad=p.requires_grad)
        vars(small).update(vars(p))
    for name, what in vars(optimizer).items():
        if name.startswith("_optimizer_"):  # hooks
            vars(made)[name] = what
        elif name not in _APART:
            vars(made)[name] = copy.deepcopy(what, memo)
    made.param_groups, made.state = copy.deepcopy(optimizer.param_groups, memo), defaultdict(dict)
    for n, group in enumerate(made.param_groups):  # no two of them alike, whose numbers may differ later
        group.update({name: what * (1 - n / 64) for name, what in group.items() if type(what) is float})
    for p, state in optimizer.state.items():
        if id(p) in memo and not any(map(is_fake, tree_leaves(state))):
            made.state[memo[id(p)]] = copy.deepcopy(tree_map_only(torch.Tensor, cut, state), memo)
    return made


def cut(tensor: torch.Tensor, size: int = 3) -> torch.Tensor:
    """A copy of so many elements of each dimension at most; of a tensor without data it has some, on the CPU."""
    shape = [min(size, of_all) for of_all in tensor.shape]
    if is_fake(tensor):
        return torch.full(shape, 0.5, dtype=tensor.dtype)
    return tensor[tuple(map(slice, shape))].clone()


def _drawn(parameter: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(parameter.shape, generator=generator) * scale
    return torch.empty_like(parameter, requires_grad=False).copy_(numbers)


def _step_at_once(optimizer: Any, gradients: list[torch.Tensor | None], watch: _Watch) -> bool:
    """A step as in plain PyTorch; whether it writes over gradients."""
    parameters = _parameters(optimizer)
    for i, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        p.grad = None if gradient is None else gradient.clone()
        watch.belong(i, (p, p.grad, optimizer.state.get(p)))
    with watch:
        type(optimizer).step(optimizer)
    left = [(p.grad, g) for p, g in zip(parameters, gradients, strict=True) if p.grad is not None and g is not None]
    writes = any(_bits(grad) != _bits(gradient) for grad, gradient in left)
    optimizer.zero_grad(set_to_none=True)
    return writes


def _step_in_turn(optimizer: Any, gradients: list[torch.Tensor | None]) -> None:
    """The same, for one parameter after the other, from the last, of which a backward has the gradient first."""
    settings = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for (p, group), gradient in reversed([*zip(settings, gradients, strict=True)]):
        if gradient is not None:
            update_alone(optimizer, {**group, "params": [p]}, p, gradient.clone(), optimizer.state)
    update_once(optimizer)


class _Watch(TorchDispatchMode):
    """Raises where an op reads what belongs to two parameters, draws, or speaks with other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, int] = {}  # of storages: the number of a parameter
        self._kept: dict[int, torch.Tensor] = {}  # all that was seen, so that no other storage takes its place

    def belong(self, owner: int | None, tensors: Any) -> None:
        """Tensors belong to a parameter: it, its gradient and its state, and what is computed of them."""
        for tensor in _tensors(tensors):
            self._kept.setdefault(storage(tensor), tensor)
            if owner is not None:
                self._owners[storage(tensor)] = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _NotAloneError(f"it exchanges data with other ranks, {func}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _NotAloneError(f"it draws random numbers, {func}")
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("_foreach_", "_fused_")):  # of many tensors, each by itself
            lists, rest = [one for one in given if _is_list(one)], [one for one in given if not _is_list(one)]
            makes = result if _is_list(result) else [None] * len(lists[0])
            groups = [((each, rest), (each, made)) for *each, made in zip(*lists, makes, strict=False)]
        else:
            groups = [(given, result)]
        for read, made in groups:
            owners = set()
            for tensor in _tensors(read):
                if tensor.numel() > 1 and storage(tensor) not in self._kept and func is not _lift:
                    raise _NotAloneError(
                        f"it reads a tensor that is none of its parameters, gradients and states, {func}"
                    )
                owners.add(self._owners.get(storage(tensor)))
            if len(owners := owners - {None}) > 1:
                raise _NotAloneError(f"it reads what belongs to several parameters in one op, {func}")
            self.belong(next(iter(owners), None), made)
        return result


def _is_list(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) > 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _facts(optimizer: Any) -> dict[Place, Any]:
    """All that an optimizer holds, by its place: numbers, and the bits of tensors."""
    numbers = {p: n for n, p in enumerate(_parameters(optimizer))}
    found: dict[Place, Any] = {("parameter", n): _bits(p) for p, n in numbers.items()}
    for p, state in optimizer.state.items():
        if not isinstance(p, torch.Tensor) or p not in numbers:
            raise _NotAloneError(f"it keeps a state that is of no parameter, {p!r}")
        found |= _facts_within(state, ("state of parameter", numbers[p]), numbers)
    for n, group in enumerate(optimizer.param_groups):
        for name, what in group.items():
            found |= _facts_within(what, ("setting", name, "of group", n), numbers)
    for name, what in vars(optimizer).items():
        if name not in _APART and not name.startswith("_optimizer_"):
            found |= _facts_within(what, ("attribute", name), numbers)
    return found


def _facts_within(what: Any, place: Place, numbers: Mapping[torch.Tensor, int], depth: int = 6) -> dict[Place, Any]:
    if isinstance(what, torch.Tensor):
        return {place: ("parameter", numbers[what]) if what in numbers else _bits(what)}
    if isinstance(what, _NUMBERS):
        return {place: repr(what)}
    if isinstance(what, Mapping):
        inner = [(numbers.get(key, key) if isinstance(key, torch.Tensor) else key, one) for key, one in what.items()]
    elif isinstance(what, Iterable) and hasattr(what, "__len__"):
        inner = [*enumerate(what)]
    else:
        inner = [] if callable(what) else [*getattr(what, "__dict__", {}).items()]
    found: dict[Place, Any] = {(*place, "kind"): type(what).__name__}
    for key, one in inner if depth else ():
        found |= _facts_within(one, (*place, key), numbers, depth - 1)
    return found


class _Bits(NamedTuple):
    """What a tensor is."""

    dtype: torch.dtype
    shape: torch.Size
    data: bytes


def _bits(tensor: torch.Tensor) -> _Bits:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _Bits(tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes())


def _refuse_uncounted(optimizer: Any, facts: Mapping[Place, Any]) -> None:
    """Refuse tensors outside of states, and in what is no list or dict there: no budget counts them."""
    held = [place for place, fact in facts.items() if isinstance(fact, _Bits)]
    leaves = _tensors([*optimizer.state.values()])
    if len([place for place in held if place[0] == "state of parameter"]) > len(leaves):
        raise _NotAloneError("states hold tensors in what is no list or dict, which no budget counts")
    for place in held:
        if place[0] in ("setting", "attribute") and math.prod(facts[place].shape) > 1:
            raise _NotAloneError(f"its {_words(place)} holds a tensor, which no budget counts")


def _words(place: Place) -> str:
    return " ".join(map(str, place))


def _source(kind: type) -> str:
    """The text of the file that a class is from; of one that has none, what its functions do."""
    with suppress(OSError, TypeError, KeyError):
        return inspect.getsource(sys.modules[kind.__module__])
    codes = [what.__code__ for what in vars(kind).values() if inspect.isfunction(what)]
    return repr([(code.co_name, code.co_code, code.co_names) for code in codes])
