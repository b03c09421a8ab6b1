"""A moving average of parameters like `torch.optim.swa_utils.AveragedModel`, one parameter after the other.

Each parameter is averaged right after its update, so that the copies that this takes are of one parameter only.
Buffers, and parameters that the step does not update, follow when all is done. PyTorch's own method does it, on a view
of the averaged model that has one tensor only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from checkmate.capture.meta_tensors import is_fake
from checkmate.errors import Unsupported
from checkmate.memory import aside, measure_peak
from checkmate.torch_internals.running import outside_tracing


class Average:
    """An averaged model, and the model that it follows."""

    def __init__(self, averaged: AveragedModel, model: nn.Module) -> None:
        self.averaged, self.model = averaged, model
        self._open: dict[torch.Tensor, torch.Tensor] = {}  # still to average in this update
        self.rest_bytes = 0  # temporaries of averaging tensors that the step does not update

    @property
    def pairs(self) -> dict[torch.Tensor, torch.Tensor]:
        """Pairs of each parameter and buffer of the model and its average."""
        tensors, averages = ((*module.parameters(), *module.buffers()) for module in (self.model, self.averaged.module))
        return dict(zip(tensors, averages, strict=True))

    @property
    def about(self) -> str:
        """The cost key of averaging, beside the tensor."""
        fn: Any = self.averaged.avg_fn or self.averaged.multi_avg_fn
        if fn is None:
            return "averaged"
        code = fn.__code__ if hasattr(fn, "__code__") else type(fn).__call__.__code__
        version = zlib.crc32(repr((code.co_code, code.co_names)).encode())
        return f"averaged by {getattr(fn, '__qualname__', type(fn).__qualname__)} {version:08x}"

    def expect(self, updated: Collection[torch.Tensor]) -> None:
        """Expect a step that updates these parameters, and measure the averaging of all further tensors."""
        pairs = [(p, q) for p, q in self.pairs.items() if p not in updated]
        largest = max(pairs, key=lambda pair: pair[0].nbytes, default=None)
        if largest is not None and is_fake(largest[0]):
            self.rest_bytes = 3 * largest[0].nbytes
        elif largest is not None:
            with outside_tracing():
                parameter, averaged = (_like(tensor) for tensor in largest)
                count = torch.ones((), dtype=torch.long)
                used = aside(lambda: measure_peak(lambda: _average(self.averaged, parameter, averaged, count)))
            self.rest_bytes = max(self.rest_bytes, used.peak)

    def begin(self) -> None:
        """Prepare for an update."""
        self._open = self.pairs

    def follow(self, parameter: torch.Tensor) -> None:
        """Average an updated parameter."""
        averaged = self._open.pop(parameter, None)
        if averaged is not None:
            _average(self.averaged, parameter, averaged, self.averaged.n_averaged.clone())

    def finish(self) -> None:
        """Average the remaining tensors."""
        while self._open:
            self.follow(next(iter(self._open)))
        self.averaged.n_averaged += 1

    def rehearsal(self) -> Callable[[torch.Tensor], None]:
        """A function that averages another parameter, to measure its cost."""
        like = cache(_like)
        return lambda parameter: _average(self.averaged, parameter, like(parameter), torch.ones((), dtype=torch.long))


def checked(ema: Any) -> Average:
    """Check an averaged model and its model, and make the step's averaging.

    Raises:
        TypeError: if something else is given.
        ValueError: if the two models do not have the same tensors.
        Unsupported: if a function of the user's averages all parameters at once.
    """
    if not isinstance(ema, (tuple, list)) or len(ema) != 2 or not isinstance(ema[0], AveragedModel):
        raise TypeError(
            "ema is a pair: a torch.optim.swa_utils.AveragedModel, and the model whose parameters it averages."
        )
    averaged, model = ema
    if not isinstance(model, nn.Module):
        raise TypeError(f"ema's second is the model that is averaged, not {type(model).__name__}.")
    multi_fn = averaged.multi_avg_fn
    if type(averaged).update_parameters is not AveragedModel.update_parameters or (
        multi_fn is not None and getattr(multi_fn, "__module__", None) != swa_utils.__name__
    ):
        raise Unsupported(
            "This AveragedModel averages all parameters at once by a function of its own. Give it as avg_fn=, which is "
            "for one parameter, or call averaged.update_parameters(model) after the step, whose copies its budget does "
            "not count."
        )
    shapes = [[t.shape for t in (*m.parameters(), *m.buffers())] for m in (model, averaged.module)]
    if shapes[0] != shapes[1]:
        raise ValueError("The AveragedModel is of another model: its parameters and buffers have other shapes.")
    return Average(averaged, model)


def _average(like: AveragedModel, tensor: torch.Tensor, averaged: torch.Tensor, count: torch.Tensor) -> None:
    """Move one tensor towards another, as an averaged model does after this many averages."""
    if not like.use_buffers and not isinstance(tensor, nn.Parameter):
        averaged.detach().copy_(tensor.detach().to(averaged.device))
        return
    # PyTorch's own method, on a view of the averaged model that has this tensor only.
    view: Any = object.__new__(AveragedModel)
    nn.Module.__init__(view)
    view.avg_fn, view.multi_avg_fn, view.use_buffers = like.avg_fn, like.multi_avg_fn, like.use_buffers
    view.module = _module_of(averaged)
    view.register_buffer("n_averaged", count)
    AveragedModel.update_parameters(view, _module_of(tensor))


def _module_of(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    register: Any = module.register_parameter if isinstance(tensor, nn.Parameter) else module.register_buffer
    register("only", tensor)
    return module


def _like(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(tensor, requires_grad=False)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros
