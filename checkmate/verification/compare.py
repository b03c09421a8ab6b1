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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_leaves

from checkmate.backends.eager import Backend
from checkmate.backends.state import differing, names_of, restored, same_bits, tensors_within
from checkmate.capture.device import main_device, random_states
from checkmate.codegen.arrival_order import reachable
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.errors import VerificationError
from checkmate.memory import CPU, measure_peak
from checkmate.units import exact_bytes, format_bytes
from checkmate.verification.first_difference import first_difference

log = logging.getLogger("checkmate.verification.compare")

_SLACK = (
    " PyTorch's allocator may give each tensor above 1 MiB up to 1 MiB more than it asks for; set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True, which gives it what it asks for."
)
_OUTSIDE = " What hooks and code outside the compiled step allocate is in no plan."
TORCH, _PYTHON, _NUMPY = "torch", "Python's random", "NumPy's global generator"
TIMES_OFF = 16  # as far off as in trials, of made-up numbers, sums over parts may be
GRADIENT_RTOL = 2e-3  # of the largest gradient: those of a ResNet-18 in float32 are 8e-4 of it from float64's
PLAIN_RUNS = 5  # of a plain step that a compiled one differs from: ten distances between them


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
    off: float = 0.0  # the most that a step differs by which may round differently: by Inductor, or by sums over parts
    calls: int = 1  # of the step before the backward

    def __str__(self) -> str:
        why = "the step returns more than one loss" if self.calls == 1 else "a plan is for one call"

        def shown(count: int | None) -> str:
            return f"not compared: {why}" if count is None else format_bytes(count)

        same = "the same bits as plain PyTorch"
        if self.spread:
            same = f"plain PyTorch within its spread, {self.spread:.3g}"
        elif self.off:
            same = f"plain PyTorch but for rounding, {self.off:.3g} at most"
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
        return "\n".join([f"verified: {same}", *(f"  {name:<11}{text}" for name, text in facts)])


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind."""

    results: dict[str, torch.Tensor]
    random_states: dict[str, Any]  # by the generator's name
    peak: int

    def count(self, kind: str) -> int:
        """How many results are of a kind: those whose names begin so."""
        return sum(name.startswith(kind) for name in self.results)


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
    if calls < 1:
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
    different, spread, off = names_that_differ(expected, found), 0.0, 0.0
    rounding = backend.plans[-1].problem.rounding if backend.plans else 0.0
    if not backend.exact:
        off = _compare_but_for_rounding(different, expected, found, backend.rounds_in)
    elif different and rounding and all(map(is_gradient, different)):
        off = compare_with_sums(different, expected, found, rounding)
    elif different:
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
        check_peak(resident + found.peak, planned, device, backend.limit(planned), exact=backend.exact)
        check_elsewhere(planned, backend, device)
    return Certificate(
        outputs=expected.count("output"),
        gradients=expected.count("the gradient"),
        tensors=len(state),
        repeats=repeats,
        spread=spread,
        budget=backend.limit(planned) if planned else None,
        predicted_peak=planned.peak if planned else None,
        measured_peak=resident + found.peak if comparable else None,
        plain_peak=resident + expected.peak if comparable else None,
        off=off,
        calls=calls,
    )


def check_peak(measured: int, plan: Solution, device: torch.device, limit: int, *, exact: bool = True) -> None:
    """On the CPU the prediction holds to the byte; on CUDA, and compiled by Inductor, it may be more, up to the budget.

    Raises:
        VerificationError: if the peak is above.
    """
    if measured > limit:
        raise VerificationError(
            f"The measured peak of {exact_bytes(measured)} is above the budget of {exact_bytes(limit)}."
            f"{_SLACK if device.type == 'cuda' else _OUTSIDE} Please report this."
        )
    if device.type == "cpu" and exact and plan.peak is not None and measured > plan.peak:
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


def may_waver(device: torch.device) -> bool:
    """Whether plain PyTorch need not repeat its own numbers."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return device.type == "cuda" and not strict


def as_error(name: str, *, repeats: bool) -> str:
    """What to say of a result that differs."""
    if repeats:
        return (
            f"{name} of the compiled step differs from plain PyTorch, which repeats its own bits. Please report this."
        )
    return (
        f"{name} of the compiled step differs from plain PyTorch, which does not give the same bits twice here. "
        "torch.use_deterministic_algorithms(True) may help."
    )


def names_that_differ(expected: Outcome, found: Outcome) -> list[str]:
    """Names of the results that are not the same bits in both."""
    names = [*expected.results, *(found.results.keys() - expected.results.keys())]
    return [name for name in names if not same_bits(expected.results.get(name), found.results.get(name))]


def compare_with_spread(names: list[str], plain: list[Outcome], found: Outcome) -> float:
    """Hold what differs against what plain runs differ by among themselves, in each tensor by the largest element.

    Returns the largest such spread.

    min_i |found - plain_i|  <=  max_ij |plain_i - plain_j|
    """
    spreads: dict[str, float] = {}
    for name in names:
        runs, result = [outcome.results.get(name) for outcome in plain], found.results.get(name)
        spreads[name] = max(distance(a, b) for i, a in enumerate(runs) for b in runs[:i])
        off = min(distance(result, run) for run in runs)
        if spreads[name] == 0:
            raise VerificationError(as_error(name, repeats=True))
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
    return spreads[largest]


def is_gradient(name: str) -> bool:
    """Whether a result is a gradient."""
    return name.startswith("the gradient")


def compare_with_sums(
    names: list[str], plain: Outcome, found: Outcome, rounding: float, kind: Callable[[str], Any] = is_gradient
) -> float:
    """Hold what differs against how far off sums over parts were when they were tried.

    Args:
        names: of what differs.
        rounding: the most that such a sum was off by, of its largest element.
        kind: of a result, by its name: it may be off by what the largest of its kind allows.

    Returns the largest difference.

    |found - plain|  <=  16 * rounding * max |all of its kind|
    """
    largest: dict[Any, float] = {}
    for name, t in plain.results.items():
        if t.numel() and t.is_floating_point():
            largest[kind(name)] = max(largest.get(kind(name), 0.0), float(t.abs().max()))
    off = {name: distance(plain.results.get(name), found.results.get(name)) for name in names}
    for name in names:
        allowed = TIMES_OFF * rounding * largest.get(kind(name), 0.0)
        if not off[name] <= allowed:
            raise VerificationError(
                f"{name} of the compiled step, which sums over parts, differs from plain PyTorch by {off[name]:.3g}, "
                f"where {allowed:.3g} are allowed, {TIMES_OFF} times what such sums were off by when they were tried. "
                'numerics="exact" gives the bits of plain PyTorch.'
            )
    return max(off.values(), default=0.0)


def _compare_but_for_rounding(names: list[str], plain: Outcome, found: Outcome, types: set[torch.dtype]) -> float:
    """Hold each tensor that differs against what `torch.testing.assert_close` allows of a largest element.

    That is the tensor's own, or the largest of all gradients: one that is zero but for rounding is not far off. The
    tolerances are those of the coarsest type that the step computes in.

    Returns the largest difference.

    |found - plain|  <=  atol + rtol * max |plain|
    """
    off = {name: distance(plain.results.get(name), found.results.get(name)) for name in names}
    sizes = {name: float(t.abs().max()) if t.numel() else 0.0 for name, t in plain.results.items() if name in off}
    steepest = max((size for name, size in sizes.items() if is_gradient(name)), default=0.0)
    for name in names:
        kind = plain.results[name].dtype if name in plain.results else torch.bool
        rtol, atol = default_tolerances(kind, *(types if kind.is_floating_point or kind.is_complex else ()))
        if is_gradient(name) and kind != torch.float64:
            rtol = max(rtol, GRADIENT_RTOL)
        allowed = atol + rtol * max(sizes.get(name, 0.0), steepest if is_gradient(name) else 0.0)
        if not off[name] <= allowed:
            raise VerificationError(
                f"{name} of the step compiled by Inductor differs from plain PyTorch by {off[name]:.3g}, where "
                f'rounding is allowed {allowed:.3g}. backend="eager" gives the bits of plain PyTorch.'
            )
    return max(off.values(), default=0.0)


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference of two elements; 0 for the same bits, infinite where they cannot be compared."""
    if same_bits(a, b):
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities
    return float(apart.nan_to_num(nan=float("inf")).max())


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
    """What a step leaves behind, held on the CPU: on the step's device it would stand in the way of the next.

    Several calls are differentiated at once, each with a factor of its own: 1, -1/2, 1/3, ...
    """

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
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    results |= {
        f"the gradient of {names.get(id(leaf), f'tensor {id(leaf):#x}')} of shape {tuple(leaf.shape)}": grad
        for leaf, grad in zip(leaves, grads, strict=True)
        if grad is not None
    }
    results |= {f"{names[id(t)]} of shape {tuple(t.shape)}": t.detach().clone() for t in state}
    on_host = {name: tensor.to(CPU) for name, tensor in results.items()}
    return Outcome(on_host, all_random_states(device), use.peak)


def all_random_states(device: torch.device) -> dict[str, Any]:
    """Those of torch, Python and NumPy."""
    return {TORCH: random_states(device), _PYTHON: random.getstate(), _NUMPY: np.random.get_state()}  # noqa: NPY002


def _leaves(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaf tensors that a result depends on."""
    return (node.variable for node in reachable([root.grad_fn]) if hasattr(node, "variable"))
