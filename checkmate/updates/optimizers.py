"""The update of one parameter by its own optimizer: the same object, state and present settings.

The optimizer's own `step` runs, on a view of the optimizer that has this parameter only. So a learning rate that is set
by hand or by a scheduler holds from the next update on, and states are where `state_dict` finds them. PyTorch's
optimizers compute each element of a parameter from its own gradient and state, whichever others are updated with it.

A large parameter is updated slice by slice, so that what an optimizer makes on its way is small: the single-tensor Adam
makes two or three temporaries of the parameter's size. A slice is a view of the parameter, of its gradient and of its
state, and has the bits of the whole where an optimizer computes each element on its own, and kernels round an element
alike wherever in a tensor it stands. In float32 and float64 they do; in float16 and bfloat16 the last elements of each
thread's share are rounded otherwise. Fused kernels make no temporaries.

Optimizers are supported that update one parameter at a time with the bits that they have for all at once.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn, optim

from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import Held
from checkmate.capture.provenance import source_name
from checkmate.capture.sharded.shards import Layout, is_shard, local
from checkmate.errors import Unsupported
from checkmate.host import home_of
from checkmate.memory import CPU, aside, measure_peak
from checkmate.torch_internals.running import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    outside_tracing,
    tree_leaves,
)
from checkmate.updates.per_parameter import is_named, known, name_of, refuse_wrappers, step_one

_INSTEAD = (
    "Update outside of the plan: checkmate.compile(loss_fn, budget=..., reserve=...), with the bytes of its state and "
    "of the gradients as the reserve."
)

META = torch.device("meta")
SLICE = 2**18  # elements: 1 MB of float32
_WHOLE = (optim.Adafactor, optim.Muon)  # these read rows, columns or norms of a parameter
_ROUNDED_ALIKE = (torch.float32, torch.float64)
_ALL_AT_ONCE = ("foreach", "fused")  # settings that choose among kernels with the same states
_CHANGES = {"params", "lr", "initial_lr", "max_lr", "min_lr"}  # settings that may be others in each step
LATE = 10**9  # updates, after which an optimizer does nothing more for the first time

Parts = tuple[dict[str, int], str]  # of a state: bytes by name, and the name of one that cannot be elsewhere alone
_first_states: WeakKeyDictionary[optim.Optimizer, dict[Any, Parts]] = WeakKeyDictionary()  # by what is alike


def parameters_of(optimizers: Iterable[optim.Optimizer]) -> list[torch.Tensor]:
    """The present parameters of optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


@dataclass(eq=False)
class Update:
    """The update of one parameter."""

    optimizer: optim.Optimizer
    group: int  # the position of its group in the optimizer
    parameter: torch.Tensor

    @property
    def settings(self) -> dict[str, Any]:
        """The present settings of its group."""
        return self.optimizer.param_groups[self.group]

    @property
    def about(self) -> str:
        """The key of a late update's cost, beside the parameter: the optimizer's class and switches."""
        late = f"late {about(self.optimizer, self.settings)}"
        # For an optimizer not of `torch.optim` also its code, and its present numbers and the group's.
        return late if known(self.optimizer) else f"{late} {_version(self.optimizer, self.settings)}"

    def __call__(self, gradient: torch.Tensor, device_copy: torch.Tensor | None = None) -> None:
        """Update the parameter, or a copy of it that is here; for a `DTensor`, this rank's shard by its gradient's."""
        state = self.optimizer.state
        if not is_shard(self.parameter):
            if device_copy is None or device_copy.data_ptr() == self.parameter.data_ptr():
                self._update(self.parameter, gradient, state)
                return
            of_copy: dict[torch.Tensor, Any] = defaultdict(dict)
            if self.parameter in state:
                of_copy[device_copy] = state[self.parameter]
            self._update(device_copy, gradient, of_copy)
            if device_copy in of_copy:
                state[self.parameter] = of_copy[device_copy]
            return
        # States that lie as the parameter does become each a `DTensor`, as plainly.
        shard, layout = local(self.parameter).detach(), Layout.of(self.parameter)
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        if held := state.get(self.parameter):
            states[shard] = {name: local(part) for name, part in held.items()}
        self._update(shard, local(gradient), states)
        for name, part in states[shard].items():
            if held is None or part is not local(held.get(name)):
                state[self.parameter][name] = layout.whole(part) if _is_by_element(part, shard) else part

    def rehearsal(self) -> Callable[..., None]:
        """Make a function that updates another parameter, with its own state, as a late update does this one.

        The plan holds for all updates, and late ones take most: RAdam rectifies from its sixth on, ASGD averages from
        the one in its settings. For optimizers that are not of `torch.optim` the second call also makes a first update
        once more: that may take more beside the state that it makes.
        """
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        settings, firsts = dict(self.settings), 1 if known(self.optimizer) else 2

        def rehearse(gradient: torch.Tensor, parameter: torch.Tensor, cost_key: str) -> None:
            # Begin with a copy of this parameter's state, or once more without one.
            nonlocal firsts
            if parameter not in states:
                states[parameter].update(
                    {n: _copied(part, parameter) for n, part in self.optimizer.state.get(self.parameter, {}).items()}
                )
            elif firsts:
                states[parameter].clear()
                settings.clear()
                settings.update(self.settings)
            # Make the state by a first update, and set its counts late.
            if firsts:
                firsts -= 1
                self._update(parameter, gradient, states, settings)
                _make_late(states[parameter])
                _make_late(settings)
            self._update(parameter, gradient, states, settings)

        return rehearse

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on its device, from the first update on."""
        return sum(self.states.values())

    def held(self, name: str, nbytes: int) -> Held:
        """A part of its state of so many bytes, in whose place another tensor may be put."""

        def get() -> torch.Tensor | None:
            part = self.optimizer.state.get(self.parameter, {}).get(name)
            return part if isinstance(part, torch.Tensor) else None

        def put(part: torch.Tensor) -> None:
            self.optimizer.state[self.parameter][name] = part

        return Held(name, nbytes, self.parameter, get, put)

    @property
    def states(self) -> dict[str, int]:
        """Bytes of each part of its state on its device, from the first update on, by name."""
        return self._parts[0]

    @property
    def inseparable(self) -> str:
        """The name of a part of its state that is no tensor with bytes of its own; empty: there is none."""
        return self._parts[1]

    @property
    def _parts(self) -> Parts:
        if state := self.optimizer.state.get(self.parameter):
            return self._bytes_here(state), _inseparable(state, self.parameter, is_first=False)
        shard, parts_by_key = local(self.parameter), _first_states.setdefault(self.optimizer, {})
        alike = self.group, self.about, shard.shape, shard.stride(), shard.dtype, shard.device
        if alike not in parts_by_key:
            # Its state as the first update makes it: without data, where that can be had.
            states: dict[torch.Tensor, Any] = defaultdict(dict)
            is_known = known(self.optimizer) is not None
            plain = {**self.settings, **{name: False for name in _ALL_AT_ONCE if is_known and name in self.settings}}
            fails = RuntimeError if is_known else Exception  # of an optimizer that reads numbers of its state
            with outside_tracing():
                for device, settings in ((META, plain), (self.parameter.device, dict(self.settings))):
                    like = nn.Parameter(torch.zeros_like(shard, device=device))
                    try:
                        self._step(like, torch.zeros_like(like), states, settings)
                    except fails:
                        if device != META:
                            raise
                    else:
                        break
            parts_by_key[alike] = self._bytes_here(states[like]), _inseparable(states[like], like, is_first=True)
        return parts_by_key[alike]

    def _bytes_here(self, state: dict[str, Any]) -> dict[str, int]:
        here, sizes = self.parameter.device, dict[str, int]()
        for name, part in state.items():
            tensors = [local(t) for t in tree_leaves(part) if isinstance(t, torch.Tensor)]
            counted = [t for t in tensors if t.device in (here, META) or here in (CPU, META) or home_of(t) is not None]
            sizes[str(name)] = sum(t.nbytes for t in counted)
        return sizes

    def workspace_bytes(self) -> int:
        """Temporary bytes of a late update, if none is measured: a small one's, in proportion."""
        if known(self.optimizer) is not None:  # these are in slices, and are not counted
            return 0
        whole = local(self.parameter)
        with outside_tracing(), torch.no_grad():
            shape = [min(64, n) for n in whole.shape]
            cut = whole[tuple(map(slice, shape))]
            has_data = not is_fake(whole) and home_of(whole) is None
            device = CPU if is_fake(whole) else whole.device
            data = cut.clone() if has_data else torch.full(shape, 0.5, dtype=whole.dtype, device=device)
            small = nn.Parameter(data, requires_grad=False)
            run = partial(Update(self.optimizer, self.group, small).rehearsal(), torch.zeros_like(small), small, "")
            run()
            run()
            peak = aside(lambda: measure_peak(run)).peak
        return math.ceil(peak * whole.numel() / max(1, small.numel()))

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, states: Any, settings: Any = None) -> None:
        """Update a parameter; a large one in slices, which takes less memory."""
        step, kind, own = partial(self._step, settings=settings), known(self.optimizer), self.settings
        saves = parameter.numel() > SLICE and not own.get("fused") and kind is not None and kind not in _WHOLE
        if saves and kind is optim.SGD:  # which makes no temporaries without these
            saves = any(own[name] for name in ("weight_decay", "nesterov", "maximize"))
        # All slices have to be laid out alike.
        of_elements = (t for t in states.get(parameter, {}).values() if _is_by_element(t, parameter))
        if (
            saves
            and parameter.dtype in _ROUNDED_ALIKE
            and torch.ops.aten.is_non_overlapping_and_dense(parameter)
            and all(t.layout == parameter.layout and t.stride() == parameter.stride() for t in (gradient, *of_elements))
        ):
            _step_in_slices(step, parameter, gradient, states)
        else:
            step(parameter, gradient, states)

    def _step(self, parameter: Any, gradient: torch.Tensor, states: Any, settings: Any = None) -> None:
        """Update a parameter and given settings as the optimizer does; its state is found or made."""
        group = {**(self.settings if settings is None else settings), "params": [parameter]}
        kind = known(self.optimizer)
        by_nesterov = kind is optim.SGD and group["nesterov"] and group["foreach"] is not False
        if by_nesterov or (kind is None and not is_named(self.optimizer)):  # it writes, or may write, over the gradient
            gradient = gradient.clone()  # others may read it
        step_one(self.optimizer, group, parameter, gradient, states)
        if settings is not None:
            settings.update({name: value for name, value in group.items() if name != "params"})


def about(optimizer: optim.Optimizer, settings: dict[str, Any]) -> str:
    """The class of an optimizer and a group's switches, without rates, which change between steps.

    >>> about(sgd := optim.SGD([torch.ones(1)], lr=0.1, momentum=0.9), sgd.param_groups[0])
    'SGD momentum'
    """
    kind = known(optimizer)
    names = [name for name in settings if name not in _CHANGES]
    if kind is None:  # its step may set more
        names = [name for name in names if name in optimizer.defaults and name != "step"]
    on = []
    for name in names:
        value = settings[name]
        if bool(value) if isinstance(value, (bool, int, float, str)) else value is not None:
            on.append(name)
    return " ".join(((kind or type(optimizer)).__name__, *on))


def _version(optimizer: optim.Optimizer, settings: dict[str, Any]) -> str:
    """Hash the code of an optimizer, and its numbers."""
    sources = []
    for kind in type(optimizer).__mro__:
        if not kind.__module__.startswith(("torch.", "builtins")):
            try:
                sources.append(inspect.getsource(sys.modules[kind.__module__]))
            except (OSError, TypeError, KeyError):  # it is of no file: what its functions do
                codes = [function.__code__ for function in vars(kind).values() if inspect.isfunction(function)]
                sources.append(repr([(code.co_name, code.co_code, code.co_names) for code in codes]))
    has = {**vars(optimizer), **{f"group {n}": x for n, x in settings.items() if n in optimizer.defaults}}
    changes = {"group step", *(f"group {name}" for name in _CHANGES)}
    numbers = [(name, x) for name, x in has.items() if isinstance(x, (bool, int, str)) and name not in changes]
    return f"{zlib.crc32(repr((sources, sorted(numbers))).encode()):08x}"


def _make_late(counted: Any) -> None:
    """Set the step count in a state or in a group's settings to `LATE`, if there is one."""
    step = counted.get("step")
    if isinstance(step, torch.Tensor):
        step.fill_(LATE)
    elif step is not None:
        counted["step"] = LATE


def _copied(part: Any, like: torch.Tensor | None = None) -> Any:
    """A copy of a part of a state; of one at home elsewhere, on the device of a tensor ``like`` its parameter."""
    part = local(part)
    if not isinstance(part, torch.Tensor):
        return copy.deepcopy(part)
    return part.clone() if like is None or home_of(part) is None else part.to(like.device, copy=True)


def _inseparable(state: dict[str, Any], parameter: torch.Tensor, *, is_first: bool) -> str:
    # In a first state storages are compared. Later ones may be loaded, as views that do not overlap.
    places = {_place(local(parameter), is_first)}
    for name, part in state.items():
        tensors = [local(t) for t in tree_leaves(part) if isinstance(t, torch.Tensor)]
        for t in tensors:
            has_own = not is_first or t.untyped_storage().nbytes() == t.nbytes
            if not isinstance(part, torch.Tensor) or not has_own or _place(t, is_first) in places:
                return str(name)
            places.add(_place(t, is_first))
    return ""


def _place(t: torch.Tensor, is_first: bool) -> tuple[int, int]:
    return t.untyped_storage()._cdata, 0 if is_first else int(t.storage_offset())


def _step_in_slices(step: Callable[..., None], parameter: torch.Tensor, gradient: torch.Tensor, states: Any) -> None:
    # A state that is not there yet is made by the optimizer for each slice, of slices so small that these and what else
    # it makes take less than later updates do; the whole state is put together of them.
    before = dict(states.get(parameter, {}))
    by_element = {name: _flat(t) for name, t in before.items() if _is_by_element(t, parameter)}
    flat = _flat(parameter.detach()), _flat(gradient)
    size, most = parameter.numel(), SLICE if by_element else SLICE // 4
    for part in (slice(begin, min(begin + most, size)) for begin in range(0, size, most)):
        is_last = part.stop == size
        piece, views = flat[0][part], {name: t[part] for name, t in by_element.items()}
        # state of the whole parameter, such as the step count, advances once
        start = {n: views[n] if n in views else value if is_last else _copied(value) for n, value in before.items()}
        slice_states: dict[torch.Tensor, Any] = {piece: start} if before else defaultdict(dict)
        step(piece, flat[1][part], slice_states)
        if piece not in slice_states:
            continue
        state = states[parameter]
        for name, value in slice_states[piece].items():
            if value is views.get(name):
                continue
            if _is_by_element(value, piece):
                if part.start == 0:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                _flat(state[name])[part] = value
            elif is_last or name not in state:
                state[name] = value


def _is_by_element(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) the elements of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def checked(
    optimizers: optim.Optimizer | Iterable[optim.Optimizer], *, keep: bool = False, alone: bool = False
) -> tuple[optim.Optimizer, ...]:
    """Check the optimizers of a step: no two share a parameter.

    Args:
        keep: gradients are results of the step as well.
        alone: it is promised that those which are not known update each parameter alone.

    Raises:
        TypeError: if something else is given.
        Unsupported: if one cannot update one parameter at a time, or has hooks, or two update the same parameter.
    """
    # Each is an optimizer that is supported.
    listed: tuple[Any, ...] = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for optimizer in listed:
        if not isinstance(optimizer, optim.Optimizer):
            words = type(optimizer).__name__
            if isinstance(optimizer, type):
                words = f"the class {optimizer.__name__}: make one of it, {optimizer.__name__}(model.parameters())"
            elif isinstance(optimizer, optim.lr_scheduler.LRScheduler):
                words = f"a {words}: give its optimizer, and call scheduler.step() after the training step"
            raise TypeError(f"optimizer is a torch.optim.Optimizer or several, not {words}.")
        _refuse(optimizer, keep, alone)
    if not listed:
        raise TypeError("optimizer is a torch.optim.Optimizer or several, not none.")
    # No two have a parameter in common.
    seen: set[torch.Tensor] = set()
    for parameter in parameters_of(listed):
        if parameter in seen:
            raise Unsupported(
                f"Two updates of a parameter of shape {tuple(parameter.shape)} would follow each other in one step: it "
                f"is in two optimizers, or twice in one. {_INSTEAD}"
            )
        seen.add(parameter)
    return listed


def _refuse(optimizer: optim.Optimizer, keep: bool, alone: bool) -> None:
    name, kind = type(optimizer).__name__, known(optimizer)
    # Refuse optimizers that do not update parameter by parameter.
    if isinstance(optimizer, optim.LBFGS):
        raise Unsupported(f"{name} runs the step several times for one update: there is no one plan. {_INSTEAD}")
    if kind is None:
        refuse_wrappers(optimizer, _INSTEAD)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"This {name} is differentiable: gradients would flow through its updates, and a step has none then. "
            "Make it with differentiable=False."
        )
    for group in optimizer.param_groups if kind is optim.Adafactor else ():
        types = {p.dtype for p in group["params"] if p.requires_grad}
        on_cpu = all(p.device.type == "cpu" for p in group["params"])
        at_once = group["foreach"] is True or (group["foreach"] is None and not on_cpu)
        if group["eps"][0] is None and at_once and len(types) > 1:
            raise Unsupported(
                "This Adafactor, with foreach, takes its smallest number from the type of one parameter for parameters "
                "of several types in a group. Make it with eps=(a number, 1e-3), or foreach=False."
            )
    if (kind is None or kind in _WHOLE) and any(map(is_shard, parameters_of([optimizer]))):
        raise Unsupported(
            f"{name} {'reads' if kind in _WHOLE else 'may read'} rows, columns or norms of a whole parameter, and each "
            f"rank has a shard of it only. {_INSTEAD}"
        )
    # Refuse hooks and replacements beside the class's own step.
    _refuse_replaced(optimizer)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise Unsupported(
            f"A hook on the step of this {name} is called when all gradients are there, and here they never are. "
            f"Call what it does before or after the training step. {_INSTEAD}"
        )
    # Refuse unknown optimizers.
    if kind is None and not is_named(optimizer):
        if not alone:
            raise Unsupported(
                f"{name_of(optimizer)} is not known to update each parameter alone. If its step computes of a "
                "parameter nothing but from its own gradient, its own state and the settings of its group, and draws "
                f"no random numbers, say so: training_step(..., alone=True). {_INSTEAD}"
            )
        if keep:
            raise Unsupported(
                f"{name} may write over gradients, and gradients=True would leave the ones that it got. Leave it out."
            )


def _refuse_replaced(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer whose `step` or `zero_grad` was replaced."""
    for name in ("step", "zero_grad"):
        layer, own = getattr(optimizer, name), getattr(type(optimizer), name)
        # Around its own there may be layers of PyTorch's, such as schedulers of learning rates put there to count.
        while layer is not None:
            layer = getattr(layer, "__func__", layer)
            if layer is own and known(optimizer) is None:
                break  # a class of the user's
            if not getattr(layer, "__globals__", {}).get("__name__", "").startswith("torch."):
                code = getattr(layer, "__code__", None)
                place = "" if code is None else f" ({source_name(code.co_filename)}:{code.co_firstlineno})"
                raise Unsupported(
                    f"{type(optimizer).__name__}.{name} was replaced{place}, and a training step does not call it: "
                    "each parameter is updated as soon as its gradient is there. Clip with clip_norm= or clip_value=, "
                    f"average with ema=, and do what else it does before or after the training step. {_INSTEAD}"
                )
            layer = getattr(layer, "__wrapped__", None)


def refuse_hooks(optimizers: Sequence[optim.Optimizer]) -> None:
    """Refuse, as `Unsupported`, replaced steps, and hooks on parameters."""
    for optimizer in optimizers:
        _refuse_replaced(optimizer)
    # Plain PyTorch calls hooks when a gradient is there.
    for parameter in parameters_of(optimizers):
        subject = f"A parameter of shape {tuple(parameter.shape)} has a hook"
        if parameter._backward_hooks:
            raise Unsupported(
                f"{subject} on its gradient, which no plan knows the memory of, and which would not be called. "
                "Register it on a view within the step, weight = self.weight.view_as(self.weight); "
                "weight.register_hook(...), or remove it; where it clamps, give clip_value=."
            )
        if parameter._post_accumulate_grad_hooks:
            raise Unsupported(
                f"{subject} after its gradient is accumulated, and here none is: its update takes the gradient. Remove "
                "the hook; if it runs the optimizer, the training step does that. Else call what it does after a step "
                "with gradients=True."
            )
