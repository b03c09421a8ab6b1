"""The certificate: a compiled call against the plain one, on the caller's own batch, compared bit by bit.

On CUDA some kernels do not repeat their own numbers: they add in whatever order their threads come, atomically. Bits
cannot be promised there. If a result differs from plain PyTorch, plain PyTorch is run again, to see by how much its
runs differ among themselves; the compiled step must be as close to one of them as they are to each other. On the CPU,
and wherever PyTorch is told to use deterministic algorithms, nothing but the same bits passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from checkmate.backend import Backend
from checkmate.devices import random_states, same_random_state
from checkmate.errors import VerificationError
from checkmate.memory import CPU, measure_peak

log = logging.getLogger("checkmate.verification")

_SLACK = (
    " PyTorch's allocator may give each tensor above 1 MiB up to 1 MiB more than it asks for; set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, which gives it what it asks for."
)
PLAIN_RUNS = 5  # of a plain step that a compiled one differs from: ten distances between them


@dataclass(frozen=True)
class _Outcome:
    """What a step leaves behind."""

    results: dict[str, torch.Tensor]
    random_states: list[torch.Tensor]
    peak: int


def compare_with_plain(
    plain: Callable[..., Any], compiled: Callable[..., Any], backend: Backend, args: Any, kwargs: Any
) -> None:
    """Run both on the same batch from the same state, and restore that state.

    Where plain PyTorch does not repeat its own numbers, this is logged as a warning, with the spread of its runs.

    Raises:
        VerificationError: naming the first result, gradient or buffer that differs, by more than plain runs differ
            among themselves, or the measured peak where it is above the budget.
    """
    state = list(_tensors_within((plain, args, kwargs)))
    device = next((t.device for t in state if t.device != CPU), CPU)

    def run(step: Callable[..., Any]) -> _Outcome:
        with _restored(state, device):
            return _outcome(step, args, kwargs, state, device)

    with _restored(state, device):
        compiled(*args, **kwargs)  # plans, and measures for it: no meter may run yet
    expected, found = run(plain), run(compiled)
    different = _different(expected, found)
    if different:
        if not _may_waver(device):
            raise VerificationError(_differs(different[0]))
        _compare_with_spread(different, [expected, *(run(plain) for _ in range(PLAIN_RUNS - 1))], found)
    if not all(map(torch.equal, expected.random_states, found.random_states)):
        raise VerificationError("The compiled step draws other random numbers than plain PyTorch. Please report this.")
    if backend.plans and len(expected.results) and _is_loss(expected):
        plan = backend.plans[-1]
        if plan.problem.resident + found.peak > plan.budget:
            raise VerificationError(
                f"The measured peak of {plan.problem.resident + found.peak:_} bytes is above the budget of "
                f"{plan.budget:_} bytes.{_SLACK if device.type == 'cuda' else ''} Please report this."
            )


def _may_waver(device: torch.device) -> bool:
    """Whether plain PyTorch need not repeat its own numbers."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return device.type == "cuda" and not strict


def _differs(name: str) -> str:
    return (
        f"{name} of the compiled step differs from plain PyTorch. Does plain PyTorch give the same bits twice? If not, "
        "torch.use_deterministic_algorithms(True) may help; if so, please report this."
    )


def _different(expected: _Outcome, found: _Outcome) -> list[str]:
    """Names of the results that are not the same bits in both."""
    names = [*expected.results, *(found.results.keys() - expected.results.keys())]
    return [name for name in names if not _same_bits(expected.results.get(name), found.results.get(name))]


def _compare_with_spread(names: list[str], plain: list[_Outcome], found: _Outcome) -> None:
    """Hold what differs against what plain runs differ by among themselves, in each tensor by the largest element.

    min_i |found - plain_i|  <=  max_ij |plain_i - plain_j|
    """
    spreads: dict[str, float] = {}
    for name in names:
        runs, result = [outcome.results.get(name) for outcome in plain], found.results.get(name)
        spreads[name] = max(_distance(a, b) for i, a in enumerate(runs) for b in runs[:i])
        off = min(_distance(result, run) for run in runs)
        if spreads[name] == 0:
            raise VerificationError(_differs(name))
        if not off <= spreads[name]:
            raise VerificationError(
                f"{name} of the compiled step differs from plain PyTorch by {off:.3g} at least. Plain PyTorch does not "
                f"repeat its own numbers here, but its {len(plain)} runs differ by {spreads[name]:.3g} at most. "
                "torch.use_deterministic_algorithms(True) makes it repeat them. Please report this if it differs then."
            )
    largest = max(spreads, key=lambda name: spreads[name])
    log.warning(
        "Plain PyTorch does not repeat its own numbers here: %d of its results differ between %d runs, %s by %.3g. "
        "The compiled step is within that spread; bits could not be compared. "
        "torch.use_deterministic_algorithms(True) makes them repeat.",
        len(spreads),
        len(plain),
        largest,
        spreads[largest],
    )


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference of two elements; 0 for the same bits, infinite where they cannot be compared."""
    if _same_bits(a, b):
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities
    return float(apart.nan_to_num(nan=float("inf")).max())


def _is_loss(outcome: _Outcome) -> bool:
    """Whether the step returned one scalar: then nothing outside the plan allocates in between."""
    outputs = [tensor for name, tensor in outcome.results.items() if name.startswith("output")]
    return len(outputs) == 1 and outputs[0].ndim == 0


def _outcome(
    fn: Callable[..., Any], args: Any, kwargs: Any, state: list[torch.Tensor], device: torch.device
) -> _Outcome:
    """What a step leaves behind, held on the CPU: on the step's device it would stand in the way of the next."""

    def step() -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        outputs = [t for t in tree_leaves(fn(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        roots = [t for t in outputs if t.requires_grad]
        leaves = list(dict.fromkeys(leaf for root in roots for leaf in _leaves(root)))
        grads = torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
        return outputs, leaves, grads

    use = measure_peak(step, device)
    outputs, leaves, grads = use.result
    position = {id(t): i for i, t in enumerate(state)}
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    results |= {
        f"the gradient of tensor {position.get(id(leaf), hex(id(leaf)))} of shape {tuple(leaf.shape)}": grad
        for leaf, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }
    results |= {f"tensor {i} of shape {tuple(t.shape)}": t.detach().clone() for i, t in enumerate(state)}
    on_host = {name: tensor.to(CPU) for name, tensor in results.items()}
    return _Outcome(on_host, random_states(device), use.peak)


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
def _restored(state: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Put tensors and the random state back as they were. The copies are on the CPU, where no budget counts them."""
    saved = [t.detach().to(CPU, copy=True) for t in state]
    try:
        with same_random_state(device):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(state, saved, strict=True):
                if not _same_bits(tensor.detach().to(CPU), value):
                    tensor.copy_(value)


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
