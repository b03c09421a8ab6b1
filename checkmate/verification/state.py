"""The state around a step: find and name tensors, copy them for a comparison, restore them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import optim

from checkmate.backends.tensor_state import names_of, restored, tensors_within
from checkmate.capture.device import main_device, random_states
from checkmate.memory import CPU, MemoryUse, measure_peak
from checkmate.torch_internals.trees import tree_leaves
from checkmate.updates.optimizers import parameters_of

TORCH, PYTHON, NUMPY = "torch", "Python's random", "NumPy's global generator"


@dataclass(frozen=True)
class StepState:
    """Tensors and random states after a step, copied to the CPU so that the next run has the device to itself."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # and the norm of all, where the step computes it
    state: dict[str, torch.Tensor]  # parameters, buffers, inputs and the states of optimizers
    random: dict[str, Any]  # by the generator's name
    use: MemoryUse

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {**self.outputs, **self.gradients, **self.state}


class Reach:
    """The tensors within reach of a step, and the states of its optimizers.

    Args:
        things: the step and its arguments, and what else it reads.
        optimizers: those that the step calls.
    """

    def __init__(self, things: Any, optimizers: Sequence[optim.Optimizer] = ()) -> None:
        parameters = parameters_of(optimizers)
        self.tensors = list({id(t): t for t in (*tensors_within(things), *parameters)}.values())
        self.device = main_device(self.tensors)
        self._names, self._optimizers = names_of(self.tensors, (things, parameters)), optimizers

    def name(self, tensor: torch.Tensor) -> str:
        """A tensor's name in errors."""
        return f"{self._names.get(id(tensor), f'tensor {id(tensor):#x}')} of shape {tuple(tensor.shape)}"

    def run(self, step: Callable[[], tuple[Any, dict[str, torch.Tensor | None]]]) -> StepState:
        """Run and measure a step that gives outputs and gradients by name; copy its state, restore the one before."""
        with self.put_back():
            use = measure_peak(step, self.device)
            made, gradients = use.result
            outputs = {f"output {i}": t for i, t in enumerate(tree_leaves(made)) if isinstance(t, torch.Tensor)}
            state = {self.name(t): t for t in self.tensors}
            for optimizer in self._optimizers:
                for p, values in optimizer.state.items():
                    of = f"of {type(optimizer).__name__} for {self._names[id(p)]}"
                    numbers = {name: torch.tensor(n) for name, n in values.items() if isinstance(n, (int, float))}
                    kept = {name: t for name, t in values.items() if isinstance(t, torch.Tensor)} | numbers
                    state |= {f"{name} {of}": t for name, t in kept.items()}
            there = {name: t for name, t in gradients.items() if t is not None}
            numpy_state = np.random.get_state()  # noqa: NPY002  # the user's generator
            drawn = {TORCH: random_states(self.device), PYTHON: random.getstate(), NUMPY: numpy_state}
            return StepState(_copied(outputs), _copied(there), _copied(state), drawn, replace(use, result=None))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore tensors, their gradients, the optimizers and the random states after the block."""
        gradients = [(t, t.grad) for t in self.tensors if t.is_leaf]
        states = [{p: dict(values) for p, values in o.state.items()} for o in self._optimizers]
        copies = [copy.deepcopy([*of.values()]) for of in states]
        settings = [(one, dict(one)) for o in self._optimizers for one in (vars(o), *o.param_groups)]
        try:
            with restored(self.tensors):
                yield
        finally:
            for one, before in settings:
                one.clear()
                one.update(before)
            for optimizer, of, values in zip(self._optimizers, states, copies, strict=True):
                optimizer.state.clear()
                for (parameter, held), before in zip(of.items(), values, strict=True):
                    # A tensor gets its values back: others may hold it too.
                    with torch.no_grad():
                        optimizer.state[parameter] = {
                            name: held[name].copy_(was) if isinstance(held[name], torch.Tensor) else was
                            for name, was in before.items()
                        }
            for tensor, gradient in gradients:
                if tensor.grad is not gradient:
                    tensor.grad = gradient


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach().to(CPU, copy=True) for name, t in tensors.items()}
