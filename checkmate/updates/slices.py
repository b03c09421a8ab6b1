"""An update of a large parameter slice by slice, so that what an optimizer makes on its way is small.

The single-tensor Adam makes two or three temporaries of the parameter's size; of a slice they are a few MB. A slice is
a view of the parameter, of its gradient and of its state, and has the bits of the whole wherever an optimizer computes
each element on its own, and PyTorch's kernels round an element alike wherever in a tensor it stands. In float32 and
float64 they do; in float16 and bfloat16 the last elements of each thread's share are rounded otherwise. Fused kernels
make no temporaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import optim

SLICE = 2**18  # elements: 1 MB of float32
_WHOLE = ("Adafactor", "Muon")  # these read rows, columns or norms of a parameter
_ROUNDED_ALIKE = (torch.float32, torch.float64)

Step = Callable[[torch.Tensor, torch.Tensor, Any], None]  # of a parameter, its gradient, and the states


def in_slices(
    optimizer: optim.Optimizer,
    settings: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> bool:
    """Whether to update a parameter in slices: it is large, saves memory, and all that is sliced lies alike."""
    if parameter.numel() <= SLICE or settings.get("fused") or type(optimizer).__name__ in _WHOLE:
        return False
    if type(optimizer) is optim.SGD and not any(settings[name] for name in ("weight_decay", "nesterov", "maximize")):
        return False  # it makes no temporaries
    alike = [gradient, *(t for t in state.values() if _is_by_element(t, parameter))]
    return (
        parameter.dtype in _ROUNDED_ALIKE
        and torch.ops.aten.is_non_overlapping_and_dense(parameter)
        and all(t.layout == parameter.layout and t.stride() == parameter.stride() for t in alike)
    )


def step_in_slices(step: Step, parameter: torch.Tensor, gradient: torch.Tensor, states: Any) -> None:
    """Update a parameter slice by slice.

    A state that is not there yet is made by the optimizer for each slice, of slices so small that these and what else
    it makes take less than later updates do; the whole state is put together of them.
    """
    before = dict(states.get(parameter, {}))
    by_element = {name: _flat(t) for name, t in before.items() if _is_by_element(t, parameter)}
    first = not by_element
    flat = _flat(parameter.detach()), _flat(gradient)
    for part, is_last in _slices(parameter.numel(), SLICE // 4 if first else SLICE):
        one, views = flat[0][part], {name: t[part] for name, t in by_element.items()}
        # what is one for the whole parameter, such as the number of steps, goes on once
        given = {n: views[n] if n in views else what if is_last else _copied(what) for n, what in before.items()}
        found = {one: given} if before else _States()
        step(one, flat[1][part], found)
        if one in found:
            _keep(found[one], views, states[parameter], part, one, parameter, is_last=is_last)


class _States(dict[torch.Tensor, Any]):
    """States by their parameter, as an optimizer has them: a new one is empty."""

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self[parameter] = {}
        return self[parameter]


def _keep(
    found: dict[str, Any],
    views: dict[str, torch.Tensor],
    state: dict[str, Any],
    part: slice,
    one: torch.Tensor,
    parameter: torch.Tensor,
    *,
    is_last: bool,
) -> None:
    """Put the state of a slice into that of the parameter."""
    for name, what in found.items():
        if what is views.get(name):
            continue
        if not _is_by_element(what, one):
            if is_last or name not in state:
                state[name] = what
            continue
        if part.start == 0:
            state[name] = torch.empty_like(parameter, dtype=what.dtype, requires_grad=False)
        _flat(state[name])[part] = what


def _slices(size: int, most: int) -> Iterator[tuple[slice, bool]]:
    for begin in range(0, size, most):
        yield slice(begin, min(begin + most, size)), begin + most >= size


def _is_by_element(what: Any, parameter: torch.Tensor) -> bool:
    return isinstance(what, torch.Tensor) and what.shape == parameter.shape


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) the elements of a dense tensor, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _copied(what: Any) -> Any:
    return what.clone() if isinstance(what, torch.Tensor) else what
