"""Run a step plainly and compiled on the user's own batch, and compare all that it leaves behind, bit by bit.

On CUDA some kernels do not repeat their own numbers: they add in whatever order their threads come, atomically. Bits
cannot be promised there. If a result differs from plain PyTorch, plain PyTorch is run again, to see by how much its
runs differ among themselves; the compiled step must be as close to one of them as they are to each other. On the CPU,
and wherever PyTorch is told to use deterministic algorithms, nothing but the same bits passes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from checkmate.backends.compilation import Backend
from checkmate.backends.cuda_blocks import Replays
from checkmate.backends.tensor_state import differing, names_of, restored, tensors_within
from checkmate.capture.device import main_device, may_waver, random_states
from checkmate.codegen.arrival_order import reachable
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.errors import VerificationError
from checkmate.memory import CPU, MemoryUse, measure_peak
from checkmate.memory.cuda_allocator import EXPANDABLE, Used
from checkmate.torch_internals.trees import tree_leaves
from checkmate.units import exact_bytes, format_bytes
from checkmate.verification.first_difference import first_difference
from checkmate.verification.outcomes import (
    PLAIN_RUNS,
    Outcome,
    as_error,
    compare_with_spread,
    names_that_differ,
)

log = logging.getLogger("checkmate.verification.compare")

_OUTSIDE = " What hooks and code outside the compiled step allocate is in no plan."
TORCH, _PYTHON, _NUMPY = "torch", "Python's random", "NumPy's global generator"


@dataclass(frozen=True)
class Certificate:
    """What was compared between a compiled step and plain PyTorch, and found to be the same."""

    outputs: int  # tensors that the step returns
    gradients: int
    tensors: int  # parameters, buffers and inputs, as the step leaves them
    repeats: bool  # plain PyTorch gives the same bits twice; if not, `spread` was allowed
    spread: float  # the most that two plain runs differed by, in what the compiled step did not repeat bit for bit
    budget: int | None  # bytes; None where nothing was planned
    predicted_peak: int | None  # bytes
    measured_peak: int | None  # bytes; None where the step returns more than a loss, whose backward begins outside it
    plain_peak: int | None  # bytes of the plain step
    calls: int = 1  # of the step before the backward
    allocated_peak: int | None = None  # bytes of the blocks that PyTorch's allocator gave; None on the CPU
    reserved_peak: int | None = None  # bytes that it held of the device; None on the CPU
    foretold: Used | None = None  # the same two, replayed from where the step began; None where that cannot be

    def __str__(self) -> str:
        why = "the step returns more than one loss" if self.calls == 1 else "a plan is for one call"

        def shown(count: int | None) -> str:
            return f"not compared: {why}" if count is None else format_bytes(count)

        same = "the same bits as plain PyTorch"
        if self.spread:
            same = f"plain PyTorch within its spread, {self.spread:.3g}"
        counts = f"{self.outputs} outputs, {self.gradients} gradients, {self.tensors} tensors of state"
        facts = [
            ("compared", f"{counts}, random state" + (f", {self.calls} calls" if self.calls > 1 else "")),
            ("plain runs", "repeat their bits" if self.repeats else "differ among themselves"),
        ]
        if self.budget is not None:
            facts += [
                ("budget", shown(self.budget)),
                ("predicted", shown(self.predicted_peak)),
                ("measured", shown(self.measured_peak)),
                ("plain", shown(self.plain_peak)),
            ]
        if self.allocated_peak is not None:
            facts.append(("allocated", f"{shown(self.allocated_peak)} in blocks of PyTorch's allocator{self._slack}"))
            facts.append(("reserved", f"{shown(self.reserved_peak)} of the device by it"))
        if self.foretold is not None:
            facts.append(("foretold", " and ".join(map(shown, self.foretold)) + " of these two"))
        return "\n".join([f"verified: {same}", *(f"  {name:<11}{text}" for name, text in facts)])

    @property
    def _slack(self) -> str:
        """What to do about blocks above the budget."""
        above = self.budget is not None and (self.allocated_peak or 0) > self.budget
        return f", above the budget: {EXPANDABLE} has it give what is asked for" if above else ""


def compare_with_plain(
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    backend: Backend,
    args: Any,
    kwargs: Any,
    capture: Callable[[Backend], Callable[..., Any]],
    calls: int = 1,
) -> Certificate:
    """Run both on the same batch from the same state, and restore that state.

    Where plain PyTorch does not repeat its own numbers, this is logged as a warning, with the spread of its runs.
    ``capture`` compiles the step with another backend, to find out where it differs. ``calls``: how often each is
    called before the backward.

    Raises:
        ValueError: if ``calls`` is less than 1.
        VerificationError: naming the first result, gradient or buffer that differs, by more than plain runs differ
            among themselves, and the first op that does; or the measured peak where it is above the predicted one.
    """
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"calls is how often the step is called before the backward, 1 or more, not {calls!r}.")
    state = tensors_within((plain, args, kwargs))
    names = names_of(state, (plain, args, kwargs))
    device = main_device(state)

    def run(step: Callable[..., Any], calls: int = calls) -> Outcome:
        with restored(state, device):
            return _outcome(step, args, kwargs, state, names, device, calls)

    once = partial(run, calls=1)

    with restored(state, device):
        compiled(*args, **kwargs)  # plans, and measures for it: no meter may run yet
    expected, found = run(plain), run(compiled)
    for generator in (_PYTHON, _NUMPY):
        if differing(expected.random_states[generator], found.random_states[generator]):
            raise VerificationError(
                f"The plain step draws from {generator}, the compiled one does not, or not as much. Draw with torch, "
                "or draw outside and pass the numbers in as tensors."
            )
    again = run(plain)
    repeats = not names_that_differ(expected, again)
    different, spread = names_that_differ(expected, found), 0.0
    if different:
        if not may_waver(device):
            place = _place(capture, backend, once, plain, device)
            raise VerificationError(as_error(different[0], repeats=repeats) + place)
        spread = compare_with_spread(different, [expected, again, *(run(plain) for _ in range(PLAIN_RUNS - 2))], found)
    if differing(expected.random_states[TORCH], found.random_states[TORCH]):
        place = _place(capture, backend, once, plain, device)
        raise VerificationError(
            f"The compiled step draws other random numbers than plain PyTorch. Please report this.{place}"
        )
    planned = backend.plans[-1] if backend.plans else None
    resident = planned.problem.resident if planned else 0
    comparable = planned is not None and calls == 1 and _is_loss(expected)
    if planned is not None and comparable:
        check_peak(resident + found.use.peak, planned, device, backend.limit(planned))
        check_elsewhere(planned, backend, device)
    return Certificate(
        outputs=expected.count("output"),
        gradients=expected.count("the gradient"),
        tensors=len(state),
        repeats=repeats,
        spread=spread,
        budget=backend.limit(planned) if planned else None,
        predicted_peak=planned.peak if planned else None,
        measured_peak=resident + found.use.peak if comparable else None,
        plain_peak=resident + expected.use.peak if comparable else None,
        calls=calls,
        allocated_peak=found.use.allocated,
        reserved_peak=found.use.reserved,
        foretold=_foretold(planned, found.use) if planned is not None and comparable else None,
    )


def _foretold(plan: Solution, use: MemoryUse) -> Used | None:
    """What the allocator gives and holds for a plan, from where the step began; None where its rules are not known."""
    if use.began is None:
        return None
    return Replays(use.began, use.device).first(plan)


def check_peak(measured: int, plan: Solution, device: torch.device, limit: int) -> None:
    """Refuse a peak above the prediction on the CPU, to the byte, and above the budget anywhere.

    On CUDA these are the bytes that were asked for.

    Raises:
        VerificationError: if the peak is above.
    """
    if measured > limit:
        raise VerificationError(
            f"The measured peak of {exact_bytes(measured)} is above the budget of {exact_bytes(limit)}."
            f"{_OUTSIDE} Please report this."
        )
    if device.type == "cpu" and plan.peak is not None and measured > plan.peak:
        raise VerificationError(
            f"The measured peak of {exact_bytes(measured)} is above the predicted one of {exact_bytes(plan.peak)}, "
            f"though within the budget of {exact_bytes(plan.budget)}.{_OUTSIDE} Please report this."
        )


def check_elsewhere(plan: Solution, backend: Backend, device: torch.device) -> None:
    """What waited in the second memory in the last call is what the plan foretells.

    Raises:
        VerificationError: if it is more.
    """
    if plan.plan is None or not plan.plan.sent or backend.elsewhere is None:
        return
    foretold, found = simulate(plan.plan, plan.problem).peak_there, backend.elsewhere.on(device).use.there
    if found > foretold:
        raise VerificationError(
            f"{exact_bytes(found)} waited in the second memory at once, and not {exact_bytes(foretold)} as foretold. "
            "Please report this."
        )


def _place(
    capture: Callable[[Backend], Callable[..., Any]],
    backend: Backend,
    run: Callable[..., Any],
    plain: Callable[..., Any],
    device: torch.device,
) -> str:
    """A sentence that names the first op whose value differs, or says that none does."""
    if not backend.plans:
        return ""
    first = first_difference(capture, backend.plans[-1], run, plain, device)
    if first is None:
        return " Each op of the captured step gives the values of plain PyTorch: the difference lies outside the graph."
    return f" The first value that differs is {first}"


def _is_loss(outcome: Outcome) -> bool:
    """Whether the step returned one scalar: then nothing outside the plan allocates in between."""
    outputs = [tensor for name, tensor in outcome.results.items() if name.startswith("output")]
    return len(outputs) == 1 and outputs[0].ndim == 0


def _outcome(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    state: list[torch.Tensor],
    names: dict[int, str],
    device: torch.device,
    calls: int,
) -> Outcome:
    """What a step leaves behind. Several calls are differentiated at once, with factors 1, -1/2, 1/3, ..."""

    def step() -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        made = [(i, t) for i in range(calls) for t in tree_leaves(fn(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for _, t in made]
        roots = [t for t in outputs if t.requires_grad]
        leaves = list(dict.fromkeys(leaf for root in roots for leaf in _leaves(root)))
        factors = [torch.full_like(t, (-1) ** i / (i + 1)) for i, t in made if t.requires_grad]
        with torch.autocast(device.type, enabled=False):  # as a backward after the block
            grads = torch.autograd.grad(roots, leaves, factors, allow_unused=True) if leaves else ()
        return outputs, leaves, grads

    use = measure_peak(step, device)
    outputs, leaves, grads = use.result
    results = {f"output {i}": t for i, t in enumerate(outputs)}
    results |= {
        f"the gradient of {names.get(id(leaf), f'tensor {id(leaf):#x}')} of shape {tuple(leaf.shape)}": grad
        for leaf, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }
    results |= {f"{names[id(t)]} of shape {tuple(t.shape)}": t for t in state}
    return outcome_of(results, device, use)


def outcome_of(results: dict[str, torch.Tensor], device: torch.device, use: MemoryUse) -> Outcome:
    """What is there now, held on the CPU: on the step's device it would stand in the way of the next step."""
    states = {TORCH: random_states(device), _PYTHON: random.getstate(), _NUMPY: np.random.get_state()}  # noqa: NPY002
    return Outcome(
        {name: t.detach().to(CPU, copy=True) for name, t in results.items()}, states, replace(use, result=None)
    )


def _leaves(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaf tensors that a result depends on."""
    return (node.variable for node in reachable([root.grad_fn]) if hasattr(node, "variable"))
