"""Run a step plainly and compiled on the user's own batch, and compare all its effects bit by bit.

On CUDA some kernels do not repeat their own numbers: they add in whatever order their threads come, atomically. Bits
cannot be promised there. If a result differs from plain PyTorch, plain PyTorch is run again, to see by how much its
runs differ among themselves; the compiled step must be as close to one of them as they are to each other. On the CPU,
and wherever PyTorch is told to use deterministic algorithms, nothing but the same bits passes.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import optim

from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.static_memory import Replays
from checkmate.backends.tensor_state import differing, names_of, restored, same_bits, tensors_within
from checkmate.capture.device import main_device, may_waver, random_states
from checkmate.capture.sharded.shards import local
from checkmate.codegen.contributions import reachable
from checkmate.core.simulator import simulate
from checkmate.core.solution import Solution
from checkmate.errors import VerificationError
from checkmate.memory import CPU, MemoryUse, measure_peak
from checkmate.memory.cuda_allocator import EXPANDABLE, Used
from checkmate.torch_internals.running import tree_leaves, tree_map_only
from checkmate.units import exact_bytes, format_bytes
from checkmate.updates.optimizers import parameters_of
from checkmate.updates.per_parameter import known
from checkmate.verification.first_difference import Capture, Step, first_difference

log = logging.getLogger("checkmate.verification.compare")

PLAIN_RUNS = 5  # of a plain step that a compiled one differs from: ten distances between them
TIMES_SPREAD = 4  # as far off as gradients of plain runs are among themselves, those of a compiled step may be
TORCH, PYTHON, NUMPY = "torch", "Python's random", "NumPy's global generator"
_NORM = "the norm of all gradients"
_OUTSIDE = " What hooks and code outside the compiled step allocate is in no plan."


PLAIN = "plain PyTorch"


@dataclass(frozen=True)
class Certificate:
    """A certificate that a compiled step and plain PyTorch agree, with the list of comparisons."""

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
    foretold: Used | None = None  # both, replayed from the step's begin; None if not possible
    against: str = PLAIN  # what it is compared with

    def __str__(self) -> str:
        why = "the step returns other than its loss alone" if self.calls == 1 else "a plan is for one call"

        def shown(count: int | None) -> str:
            return f"not compared: {why}" if count is None else format_bytes(count)

        within = f"{self.against} within its spread, {self.spread:.3g}"
        same = within if self.spread else f"the same bits as {self.against}"
        runs, peak = ("plain runs", "plain") if self.against == PLAIN else ("its runs", "its peak")
        counts = f"{self.outputs} outputs, {self.gradients} gradients, {self.tensors} tensors of state"
        facts = [
            ("compared", f"{counts}, random state" + (f", {self.calls} calls" if self.calls > 1 else "")),
            (runs, "repeat their bits" if self.repeats else "differ among themselves"),
        ]
        if self.budget is not None:
            facts += [
                ("budget", shown(self.budget)),
                ("predicted", shown(self.predicted_peak)),
                ("measured", shown(self.measured_peak)),
                (peak, shown(self.plain_peak)),
            ]
        if self.allocated_peak is not None:
            above = self.budget is not None and self.allocated_peak > self.budget
            slack = f", above the budget: {EXPANDABLE} has it give what is asked for" if above else ""
            facts.append(("allocated", f"{shown(self.allocated_peak)} in blocks of PyTorch's allocator{slack}"))
            facts.append(("reserved", f"{shown(self.reserved_peak)} of the device by it"))
        if self.foretold is not None:
            facts.append(("foretold", " and ".join(map(shown, self.foretold)) + " of these two"))
        return "\n".join([f"verified: {same}", *(f"  {name:<11}{text}" for name, text in facts)])


def compare_with_plain(
    plain: Step, compiled: Step, cache: CaptureCache, args: Any, kwargs: Any, capture: Capture, calls: int = 1,
    against: str = PLAIN,
) -> Certificate:  # fmt: skip
    """Run a step and its backward both ways on one batch from one state, and restore that state.

    Where plain PyTorch does not repeat its own numbers, this is logged as a warning, with the spread of its runs.
    ``capture`` compiles the step with another backend, to find out where it differs. ``calls``: how often each is
    called before the backward. ``against``: what ``plain`` is called.

    Raises:
        ValueError: if ``calls`` is less than 1.
        VerificationError: naming the first result, gradient or buffer that differs, by more than plain runs differ
            among themselves, and the first op that does; or the measured peak where it is above the predicted one.
    """
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ValueError(f"calls is how often the step is called before the backward, 1 or more, not {calls!r}.")
    reach = Reach((plain, args, kwargs))
    device, backend = reach.device, cache.backend

    def run(step: Step, calls: int = calls) -> StepState:
        return reach.run(partial(_differentiated, reach, lambda: step(*args, **kwargs), calls))

    def place() -> str:
        if not cache.plans or backend.kernels != "eager":  # kernels of groups have no values of plain PyTorch
            return ""
        difference = first_difference(capture, cache.plans[-1].plan, partial(run, calls=1), plain)
        if difference is not None:
            return f" The first value that differs is {difference}"
        return " Each op of the captured step gives the values of plain PyTorch: the difference lies outside the graph."

    with reach.put_back():
        compiled(*args, **kwargs)  # plans, and measures for it: no meter may run yet
    expected, actual, repeats, spread = _compare(partial(run, plain), partial(run, compiled), device, against, place)
    plan = cache.plans[-1].plan if cache.plans else None
    # A step that returns more than a loss begins its backward outside of the plan, with whatever is allocated there.
    is_loss = [t.ndim for t in expected.outputs.values()] == [0]
    followed = plan if calls == 1 and is_loss else None
    resident = followed.problem.resident if followed else 0
    # The bytes, in both memories.
    foretold = None
    if followed is not None:
        check_peak(resident + actual.use.peak, followed, device, backend.limit(followed))
        if followed.plan is not None and followed.plan.moves and backend.second_memories is not None:
            held = backend.second_memories.on(device).use.peak
            host_peak = simulate(followed.plan, followed.problem).host_peak
            if held > host_peak:
                raise VerificationError(
                    f"{exact_bytes(held)} waited in the second memory at once, and not {exact_bytes(host_peak)} as "
                    "foretold. Please report this."
                )
        if actual.use.began is not None:
            foretold = Replays(actual.use.began, actual.use.device).first(followed)
    return Certificate(
        outputs=len(expected.outputs),
        gradients=len(expected.gradients),
        tensors=len(expected.state),
        repeats=repeats,
        spread=spread,
        budget=backend.limit(plan) if plan else None,
        predicted_peak=plan.peak if plan else None,
        measured_peak=resident + actual.use.peak if followed else None,
        plain_peak=resident + expected.use.peak if followed else None,
        calls=calls,
        allocated_peak=actual.use.allocated,
        reserved_peak=actual.use.reserved,
        foretold=foretold,
        against=against,
    )


def _differentiated(
    reach: Reach, step: Callable[[], Any], calls: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Outputs and gradients of a step. Several calls are differentiated together, with factors 1, -1/2, 1/3, ..."""
    outputs = [(i, t) for i in range(calls) for t in tree_leaves(step()) if isinstance(t, torch.Tensor)]
    roots = [t for _, t in outputs if t.requires_grad]
    nodes = (node for root in roots for node in reachable([root.grad_fn]))
    leaves = list(dict.fromkeys(node.variable for node in nodes if hasattr(node, "variable")))
    factors = [torch.full_like(t, (-1) ** i / (i + 1)) for i, t in outputs if t.requires_grad]
    with torch.autocast(reach.device.type, enabled=False):  # as a backward after the block
        grads = torch.autograd.grad(roots, leaves, factors, allow_unused=True) if leaves else ()
    names = [f"the gradient of {reach.name(leaf)}" for leaf in leaves]
    return [t for _, t in outputs], dict(zip(names, grads, strict=True))


def compare_whole(
    plain: Callable[[], Any],
    planned: Callable[[], Any],
    plan_now: Callable[[], Solution | None],
    optimizers: Sequence[optim.Optimizer],
    things: Any,
) -> None:
    """Run a whole training step both ways from the same state, and restore that state.

    Args:
        plain: runs the step plainly, once; gives its result and the norm of its gradients or None.
        planned: runs it as it is planned; its first call plans.
        plan_now: the plan that it follows; None: there is none, as nothing was captured.
        optimizers: those of the step.
        things: that the step is given and holds: its tensors are found in them.

    Raises:
        VerificationError: naming what differs, or the measured peak where it is above the planned one.
    """
    reach = Reach(things, optimizers)
    strangers = [o for o in optimizers if known(o) is None]  # which may replace tensors of their states

    def state_bytes(optimizers: Sequence[optim.Optimizer]) -> int:
        leaves = tree_leaves([[*o.state.values()] for o in optimizers])
        return sum(local(t).nbytes for t in leaves if isinstance(t, torch.Tensor))

    def measured(step: Callable[[], Any]) -> tuple[Any, dict[str, torch.Tensor | None]]:
        for optimizer in strangers:  # a meter sees only that go which it has seen come
            for parameter in [*optimizer.state]:
                optimizer.state[parameter] = tree_map_only(torch.Tensor, torch.clone, optimizer.state[parameter])
        result, norm = step()
        return result, {_NORM: norm, **{f"the gradient of {reach.name(t)}": t.grad for t in reach.tensors if t.is_leaf}}

    with reach.put_back():
        planned()  # plans, and measures for it: no meter may run yet
        first_states = state_bytes(optimizers)
    # The optimizers' first states are among what is resident in a plan, and in the peak of the step that makes them.
    twice = first_states - state_bytes(optimizers) + state_bytes(strangers)
    plain_run, planned_run = (partial(reach.run, partial(measured, step)) for step in (plain, planned))
    expected, actual, *_ = _compare(plain_run, planned_run, reach.device, updates=True)
    if (plan := plan_now()) is not None:
        check_peak(plan.problem.resident - twice + actual.use.peak, plan, reach.device, plan.budget)
    log.info("verified: the whole step has the bits of plain PyTorch, in %d tensors", len(expected.tensors))


def _compare(
    plain: Callable[[], StepState],  # runs the step, and puts its state back
    compiled: Callable[[], StepState],
    device: torch.device,
    against: str = PLAIN,
    place: Callable[[], str] = lambda: "",  # where they differ, to be said in the error
    *,
    updates: bool = False,  # the step updates parameters, so that its state is computed from gradients
) -> tuple[StepState, StepState, bool, float]:
    """Run both from the same state, and compare the states after them.

    Returns a plain and a compiled run that are the same, whether plain PyTorch repeats its bits, and its `spread`.

    Raises:
        VerificationError: naming what differs.
    """
    # Python's and NumPy's draws must be the same.
    expected, actual = plain(), compiled()
    for generator in (PYTHON, NUMPY):
        if differing(expected.random[generator], actual.random[generator]):
            raise VerificationError(
                f"The plain step draws from {generator}, the compiled one does not, or not as much. Draw with torch, "
                "or draw outside and pass the numbers in as tensors."
            )
    # Tensors must have the same bits; where plain PyTorch does not repeat itself, be within its spread.
    again = plain()
    repeats, spread = not names_that_differ(expected, again), 0.0
    if different := names_that_differ(expected, actual):
        if not may_waver(device):
            raise VerificationError(_as_error(different[0], against, repeats=repeats) + place())
        runs = [expected, again, *(plain() for _ in range(PLAIN_RUNS - 2))]
        sums = {*expected.gradients, *(expected.state if updates else ())}
        spread = compare_with_spread(different, runs, actual, sums, against)
    # PyTorch's generators must end in the same state.
    if differing(expected.random[TORCH], actual.random[TORCH]):
        raise VerificationError(
            f"The compiled step draws other random numbers than {against}. Please report this.{place()}"
        )
    return expected, actual, repeats, spread


def names_that_differ(expected: StepState, actual: StepState) -> list[str]:
    """Names of the tensors whose bits differ."""
    a, b = expected.tensors, actual.tensors
    return [name for name in {**a, **b} if not same_bits(a.get(name), b.get(name))]


def _as_error(name: str, against: str, *, repeats: bool) -> str:
    if repeats:
        return f"{name} of the compiled step differs from {against}, which repeats its own bits. Please report this."
    return (
        f"{name} of the compiled step differs from {against}, which does not give the same bits twice here. "
        "torch.use_deterministic_algorithms(True) may help."
    )


def compare_with_spread(
    names: Sequence[str], plain: Sequence[StepState], actual: StepState, sums: Collection[str], against: str = PLAIN
) -> float:
    """Compare differences with those among plain runs, per tensor by the largest element.

    Where kernels add in no order of their own, a tensor may come out the same in all of a few runs and differ in the
    next. So it is decided for all gradients together: if one of them differs between plain runs, each may be off by
    `TIMES_SPREAD` times the largest spread of its type, as a share of its largest element. What is off by less is not
    told from rounding. Outputs are held against their own spread: as many as repeat must be the same.

    Args:
        names: of what differs.
        plain: several runs of the plain step.
        actual: the compiled one.
        sums: names of gradients, and of what is computed from gradients.
        against: what the plain step is called.

    Returns the largest spread of two plain runs.

    min_i |actual - plain_i| <=  max_ij |plain_i - plain_j|,  or of gradients
                             <=  4 * max |plain| * max over all of their type (max_ij |plain_i - plain_j| / max |plain|)
    """
    # Spread among the plain runs, per tensor; for sums also the largest relative spread of their type.
    runs, results = [state.tensors for state in plain], actual.tensors
    together = [name for name, t in runs[0].items() if name in sums and t.is_floating_point() and t.numel()]
    largest = {name: float(runs[0][name].abs().max()) for name in together}
    spreads = {
        name: max(distance(a.get(name), b.get(name)) for i, a in enumerate(runs) for b in runs[:i])
        for name in dict.fromkeys([*names, *together])
    }
    share: dict[torch.dtype, float] = {}
    for name in together:
        kind = runs[0][name].dtype
        share[kind] = max(share.get(kind, 0.0), spreads[name] / largest[name] if largest[name] else 0.0)
    # Each differing tensor must be as near to some plain run as plain runs are to each other.
    for name in names:
        off, allowed = min(distance(results.get(name), run.get(name)) for run in runs), spreads[name]
        if name in together:
            allowed = TIMES_SPREAD * max(allowed, share[runs[0][name].dtype] * largest[name])
        if allowed == 0:
            raise VerificationError(_as_error(name, against, repeats=True))
        if not off <= allowed:
            raise VerificationError(
                f"{name} of the compiled step differs by {off:.3g} at least from {against}, which does not repeat its "
                f"own numbers here: {len(plain)} runs of it differ by {spreads[name]:.3g} at most, and {allowed:.3g} "
                "is allowed. torch.use_deterministic_algorithms(True) makes it repeat them. Please report this if it "
                "differs then."
            )
    # Say that bits could not be compared.
    widest = max(spreads, key=lambda name: spreads[name])
    log.warning(
        "%s does not repeat its own numbers here: %d of its results differ between %d runs, %s by %.3g. "
        "The compiled step is within that spread; bits could not be compared. "
        "torch.use_deterministic_algorithms(True) makes them repeat.",
        against[0].upper() + against[1:],
        sum(spread > 0 for spread in spreads.values()),
        len(plain),
        widest,
        spreads[widest],
    )
    return spreads[widest]


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """The largest difference of two elements; 0 for equal bits, infinite if they cannot be compared."""
    if same_bits(a, b):
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    apart[(x == y) | (x.isnan() & y.isnan())] = 0.0  # equal infinities
    return float(apart.nan_to_num(nan=float("inf")).max())


def check_peak(measured: int, plan: Solution, device: torch.device, limit: int) -> None:
    """Raise for a peak above the budget, or on the CPU above the prediction, to the byte.

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
            result, gradients = use.result
            outputs = {f"output {i}": t for i, t in enumerate(tree_leaves(result)) if isinstance(t, torch.Tensor)}
            state = {self.name(t): t for t in self.tensors}
            for optimizer in self._optimizers:
                for p, values in optimizer.state.items():
                    suffix = f"of {type(optimizer).__name__} for {self._names[id(p)]}"
                    numbers = {name: torch.tensor(n) for name, n in values.items() if isinstance(n, (int, float))}
                    tensors = {name: t for name, t in values.items() if isinstance(t, torch.Tensor)} | numbers
                    state |= {f"{name} {suffix}": t for name, t in tensors.items()}
            defined = {name: t for name, t in gradients.items() if t is not None}
            numpy_state = np.random.get_state()  # noqa: NPY002  # the user's generator
            generators = {TORCH: random_states(self.device), PYTHON: random.getstate(), NUMPY: numpy_state}
            return StepState(_copied(outputs), _copied(defined), _copied(state), generators, replace(use, result=None))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore tensors, their gradients, the optimizers and the random states after the block."""
        gradients = [(t, t.grad) for t in self.tensors if t.is_leaf]
        states = [{p: dict(values) for p, values in o.state.items()} for o in self._optimizers]
        copies = [copy.deepcopy([*state.values()]) for state in states]
        settings = [(mapping, dict(mapping)) for o in self._optimizers for mapping in (vars(o), *o.param_groups)]
        try:
            with restored(self.tensors):
                yield
        finally:
            for mapping, before in settings:
                mapping.clear()
                mapping.update(before)
            for optimizer, state, values in zip(self._optimizers, states, copies, strict=True):
                optimizer.state.clear()
                for (parameter, held), before in zip(state.items(), values, strict=True):
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
