"""The certificate: a compiled call against the plain one, on the caller's own batch, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from checkmate.backend import Backend
from checkmate.errors import VerificationError
from checkmate.memory import measure_peak


@dataclass(frozen=True)
class _Outcome:
    """What a step leaves behind."""

    results: dict[str, torch.Tensor]
    random_state: torch.Tensor
    peak: int


def compare_with_plain(
    plain: Callable[..., Any], compiled: Callable[..., Any], backend: Backend, args: Any, kwargs: Any
) -> None:
    """Run both on the same batch from the same state, and restore that state.

    Raises:
        VerificationError: naming the first result, gradient or buffer that differs, or the measured peak where it is
            above the budget.
    """
    state = list(_tensors_within((plain, args, kwargs)))
    with _restored(state):
        compiled(*args, **kwargs)  # plans, and measures for it: no meter may run yet
    with _restored(state):
        expected = _outcome(plain, args, kwargs, state)
    with _restored(state):
        found = _outcome(compiled, args, kwargs, state)
    for name in [*expected.results, *(found.results.keys() - expected.results.keys())]:
        if not _same_bits(expected.results.get(name), found.results.get(name)):
            raise VerificationError(f"{name} of the compiled step differs from plain PyTorch. Please report this.")
    if not torch.equal(expected.random_state, found.random_state):
        raise VerificationError("The compiled step draws other random numbers than plain PyTorch. Please report this.")
    if backend.plans and len(expected.results) and _is_loss(expected):
        plan = backend.plans[-1]
        if plan.problem.resident + found.peak > plan.budget:
            raise VerificationError(
                f"The measured peak of {plan.problem.resident + found.peak:_} bytes is above the budget of "
                f"{plan.budget:_} bytes. Please report this."
            )


def _is_loss(outcome: _Outcome) -> bool:
    """Whether the step returned one scalar: then nothing outside the plan allocates in between."""
    outputs = [tensor for name, tensor in outcome.results.items() if name.startswith("output")]
    return len(outputs) == 1 and outputs[0].ndim == 0


def _outcome(fn: Callable[..., Any], args: Any, kwargs: Any, state: list[torch.Tensor]) -> _Outcome:
    def step() -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        outputs = [t for t in tree_leaves(fn(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        roots = [t for t in outputs if t.requires_grad]
        leaves = list(dict.fromkeys(leaf for root in roots for leaf in _leaves(root)))
        grads = torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
        return outputs, leaves, grads

    use = measure_peak(step)
    outputs, leaves, grads = use.result
    position = {id(t): i for i, t in enumerate(state)}
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    results |= {
        f"the gradient of tensor {position.get(id(leaf), hex(id(leaf)))} of shape {tuple(leaf.shape)}": grad
        for leaf, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }
    results |= {f"tensor {i} of shape {tuple(t.shape)}": t.detach().clone() for i, t in enumerate(state)}
    return _Outcome(results, torch.get_rng_state(), use.peak)


def _leaves(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaf tensors that a result depends on."""
    seen, stack = set(), [root.grad_fn]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            yield function.variable
        stack += [following for following, _ in function.next_functions]


def _tensors_within(things: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Parameters, buffers and inputs that a call can reach: in its arguments, and in what a function closes over."""
    for leaf in tree_leaves(things):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
        elif depth and hasattr(leaf, "__code__"):
            cells = [cell.cell_contents for cell in leaf.__closure__ or ()]
            names = [leaf.__globals__[name] for name in leaf.__code__.co_names if name in leaf.__globals__]
            modules = [
                x for x in [*cells, *names] if isinstance(x, (nn.Module, torch.Tensor)) or hasattr(x, "__code__")
            ]
            yield from _tensors_within(modules, depth - 1)
        elif depth and hasattr(leaf, "__self__"):
            yield from _tensors_within(leaf.__self__, depth - 1)


@contextmanager
def _restored(state: list[torch.Tensor]) -> Iterator[None]:
    """Put tensors and the random state back as they were."""
    saved = [t.detach().clone() for t in state]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(state, saved, strict=True):
                if not _same_bits(tensor.detach(), value):
                    tensor.copy_(value)


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
