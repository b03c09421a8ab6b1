"""A model and its optimizers on the CPU whose step runs on another device: where a parameter is, there is its home.

Within a call each parameter and buffer is a tensor on the device, under the same object, as of a model that is there.
Small ones are copied there, and back at the end. A large parameter is pinned once, in place of the memory that it had,
and has a stand-in without memory in a call; the step's plan fetches it, its large states, and the sum of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn, optim

from checkmate.errors import Unsupported
from checkmate.host import home_of
from checkmate.host.homes import LEAST, within
from checkmate.host.pinned import Pinned, pin_storage
from checkmate.memory import CPU
from checkmate.torch_internals.running import tree_map_only
from checkmate.updates.gradients import Sums
from checkmate.updates.optimizers import parameters_of

T = TypeVar("T")


def checked_device(device: torch.device | str) -> torch.device:
    """The accelerator that is named, with its number.

    Raises:
        ValueError: if it is none, or there is none here.
    """
    kind = torch.accelerator.current_accelerator()
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        target = CPU
    count = torch.accelerator.device_count() if kind is not None and torch.accelerator.is_available() else 0
    if target.type in ("cpu", "meta") or kind is None or target.type != kind.type or (target.index or 0) >= count:
        devices = f"There are {count} of {kind.type} here" if kind is not None and count else "There is none here"
        raise ValueError(f'device={device!r} is no accelerator of this machine, as "cuda" and "cuda:0" are. {devices}.')
    return torch.device(target.type, torch.accelerator.current_device_index() if target.index is None else target.index)


@dataclass(eq=False)
class Placement:
    """The place of a model's tensors, and of its optimizers' states, within calls and between them."""

    device: torch.device  # on which steps run
    modules: Callable[[], Sequence[nn.Module]]
    optimizers: Sequence[optim.Optimizer]
    sums: Sums | None  # of gradients
    _homes: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict, init=False)  # of parameters with stand-ins
    _aside: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict, init=False)  # gradients not on it now

    def __post_init__(self) -> None:
        self._aside = self._aside if self.sums is None else self.sums.aside

    def batch(self, arguments: T) -> T:
        """A batch on the device. Tensors of no dimension stay on the CPU, where PyTorch takes them for numbers."""

        def there(t: torch.Tensor) -> torch.Tensor:
            return t.to(self.device) if t.device == CPU and t.ndim else t

        return tree_map_only(torch.Tensor, there, arguments)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within the block, have all of the model on the device; large parameters by their stand-ins.

        Raises:
            Unsupported: for a tensor that cannot be moved.
            HostError: if the host does not give the memory, or it cannot be pinned.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "A CUDA graph is being captured, and a step with device= has the host wait for copies: call it outside."
            )
        with ExitStack() as stack:  # ends in the reverse order, and goes on where one of its calls fails
            self._begin(stack)
            yield

    @contextmanager
    def at_hand(self, parameter: torch.Tensor) -> Iterator[None]:
        """Within the block, have a parameter whose sum is at home on the device, with all that belongs to it."""
        if parameter not in self._aside:
            yield
            return
        state, stand_in = self._state(parameter), parameter.data
        homes = {name: part for name, part in state.items() if _is_large(part) and part.device == CPU}
        gradient = self._aside.pop(parameter)
        parameter.data, parameter.grad = self._homes[parameter].to(self.device), gradient.to(self.device)
        state.update({name: part.to(self.device) for name, part in homes.items()})
        try:
            yield
        finally:
            self._homes[parameter].copy_(parameter.data)
            if parameter.grad is not None:
                self._aside[parameter] = gradient.copy_(parameter.grad)
            parameter.grad = None
            parameter.data = stand_in
            state = self._state(parameter)
            for name, part in state.items():
                if _is_large(part):
                    state[name] = homes[name].copy_(part) if name in homes else self._pinned(part.to(CPU))

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        return next((o.state[parameter] for o in self.optimizers if parameter in o.state), {})

    def _begin(self, stack: ExitStack) -> None:
        """Bring all to the device, and have the stack bring it back."""
        modules = self.modules()
        named = [pair for m in modules for pair in (*m.named_parameters(), *m.named_buffers())]
        names = {t: name for name, t in reversed(named)}
        tensors = [*{t: None for t in (*names, *parameters_of(self.optimizers)) if not nn.parameter.is_lazy(t)}]
        groups: dict[int, list[torch.Tensor]] = {}
        for t in tensors:
            if t.device == self.device:
                continue
            label = f"{names.get(t, 'A parameter')}, a {type(t).__name__} of {t.dtype} and {t.layout} on {t.device},"
            if t.device != CPU or t.layout is not torch.strided or type(t.data) is not torch.Tensor or t.is_quantized:
                raise Unsupported(
                    f"{label} cannot be moved to {self.device} and back. device= is for plain tensors on the CPU; what "
                    "is on that device already stays there."
                )
            if (home := home_of(t)) is not None and not isinstance(home, Pinned):
                raise Unsupported(
                    f"{label} is in a file, and a step on {self.device} has homes in pinned memory only. Leave out "
                    "checkmate.in_file, or device=."
                )
            groups.setdefault(t.untyped_storage()._cdata, []).append(t)
        settings = {p: group for o in self.optimizers for group in o.param_groups for p in group["params"]}
        moved = [t for group in groups.values() for t in group]
        # Gradients stand aside while their parameters move.
        parameters = {t: None for t in moved if isinstance(t, nn.Parameter) or t in settings}
        stack.callback(self._bring_gradients_back, parameters)
        for p in parameters:
            if p.grad is not None:
                self._aside[p], p.grad = p.grad, None
        # Buffers that a step makes come back, too.
        stay = {t for t in tensors if t.device == self.device}
        stack.callback(self._bring_buffers_back, modules, stay)
        for group in groups.values():
            storage = group[0].untyped_storage()
            if storage.nbytes() >= LEAST and parameters.keys() >= {*group}:
                self._have_stand_ins(stack, group)
            else:
                self._copy(stack, group)
        stack.callback(self._homes.clear)
        # States, and gradients that are no sums at home.
        stack.callback(self._bring_states_back, parameters)
        for p in parameters:
            own, state = settings.get(p, {}), self._state(p)
            for name, part in state.items():
                if p in self._homes and _is_large(part):
                    state[name] = self._pinned(part)
                elif name != "step" or own.get("capturable") or own.get("fused"):
                    state[name] = tree_map_only(torch.Tensor, lambda t: t.to(self.device), part)
            gradient = self._aside.get(p)
            if gradient is not None and self.sums and p in settings and p in self._homes and _is_large(gradient):
                self._aside[p] = self._pinned(gradient)
            elif gradient is not None:
                p.grad = self._aside.pop(p).to(self.device)

    def _pinned(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor itself, if it is at home in pinned memory, or a copy that is."""
        home = home_of(t)
        if isinstance(home, Pinned) and home.device == self.device:
            return t
        t = t.detach() if t.nbytes == t.untyped_storage().nbytes() else t.detach().clone()
        storage = pin_storage(t.nbytes, self.device)
        storage.copy_(t.untyped_storage())
        return within(storage, t)

    def _have_stand_ins(self, stack: ExitStack, group: Sequence[torch.Tensor]) -> None:
        """Pin a storage for good, and put stand-ins in the place of its parameters."""
        home = home_of(group[0])
        if not isinstance(home, Pinned) or home.device != self.device:
            before = group[0].untyped_storage()
            storage = pin_storage(before.nbytes(), self.device)
            storage.copy_(before)
            for t in group:
                t.data = within(storage, t)
            home = home_of(group[0])
        assert isinstance(home, Pinned)
        for t, stand_in in zip(group, home.stand_ins(group), strict=True):
            self._homes[t] = t.data
            stack.callback(setattr, t, "data", t.data)
            t.data = stand_in

    def _copy(self, stack: ExitStack, group: Sequence[torch.Tensor]) -> None:
        """Copy a storage to the device, and back in the end."""
        host_storage = group[0].untyped_storage()
        device_storage = torch.empty(host_storage.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()
        device_storage.copy_(host_storage)
        for t in group:
            stack.callback(_bring_back, t, t.data, device_storage)
            t.data = within(device_storage, t)
        stack.callback(host_storage.copy_, device_storage)

    def _bring_gradients_back(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            gradient = self._aside.pop(p, None)
            if gradient is None and p.grad is not None:
                gradient = p.grad.to(CPU)
            p.grad = None
            p.grad = gradient

    def _bring_buffers_back(self, modules: Sequence[nn.Module], stay: set[torch.Tensor]) -> None:
        for module in (part for m in modules for part in m.modules()):
            for name, t in module.named_buffers(recurse=False):
                if t.device == self.device and t not in stay:
                    setattr(module, name, t.to(CPU))

    def _bring_states_back(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            state = self._state(p)
            for name, part in state.items():
                state[name] = tree_map_only(torch.Tensor, lambda t: t.to(CPU), part)


def _bring_back(t: torch.Tensor, home: torch.Tensor, device_storage: torch.UntypedStorage) -> None:
    # Its optimizer may have put another tensor in the place of its data.
    if t.untyped_storage()._cdata != device_storage._cdata:
        home.copy_(t.data)
    t.data = home


def _is_large(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.nbytes >= LEAST
