"""Plan a module's forward in place, with the bytes that training keeps beside a step left out of the budget.

Trainers hold a module, wrap its forward and make its optimizer themselves. So the forward is replaced on the module
that they have, and planned at its first training call: by then there is an optimizer, and what it will keep is known.

    budget >= plan + states of the optimizer + gradients that are accumulated + batches fetched ahead + what is beside
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from checkmate.backends.capture_cache import CaptureCache
from checkmate.backends.planner import Options, Planner
from checkmate.backends.tensor_state import tensors_within
from checkmate.compiler import CompiledStep, Planned
from checkmate.core.solution import infeasible
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory import aside, measure_peak
from checkmate.sizes.largest_batch import LargestBatch
from checkmate.sizes.max_batch_size import max_batch_size
from checkmate.torch_internals.capturing import OptimizedModule
from checkmate.tracing import traced
from checkmate.units import exact_bytes, format_bytes, parse_bytes
from checkmate.updates.optimizers import Update

log = logging.getLogger("checkmate.integrations")

Outside = Callable[[Any, Any], int]  # of the arguments of the planned part; bytes
SCALARS = 4096  # bytes of counters, norms and logged losses that a loop keeps for a moment
SAMPLE = 4096  # elements of a parameter by which the update of a larger one is measured
_PLANNED = "_checkmate_planned"  # the attribute of a module that holds it
_NO_SAMPLE = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Kept:
    """The bytes in use while a step runs that do not belong to it."""

    states: int  # of the optimizers, from the first update on
    gradients: int  # kept from one step to the next
    batches: int  # fetched ahead
    beside: int  # other modules, the buckets of ranks
    outside: int  # code around the planned part, such as the loss
    update: int  # temporaries of the optimizers' updates

    @property
    def total(self) -> int:
        """The bytes to subtract from the budget of a step."""
        return self.states + self.gradients + self.batches + self.beside + self.outside + SCALARS

    def __str__(self) -> str:
        parts = (
            (self.states, "the optimizer's state"),
            (self.gradients, "accumulated gradients"),
            (self.batches, "batches fetched ahead"),
            (self.beside, "other modules and ranks"),
            (self.outside, "what runs outside of the plan"),
        )
        return ", ".join(f"{format_bytes(size)} for {purpose}" for size, purpose in parts if size) or "nothing"


@dataclass(eq=False)
class Loop:
    """The loop around a step, as it is when training begins."""

    optimizers: Sequence[optim.Optimizer]
    accumulates: bool = False  # gradients of several steps are summed before an update
    ahead: int = 0  # batches that are fetched before they are needed
    around: nn.Module | None = None  # the model that the planned module is part of
    beside: Iterable[nn.Module] = ()  # other modules that stay on the device: a reference model
    outside: Outside | None = None  # measures what runs around the planned part

    def kept(self, part: nn.Module, args: Any, kwargs: Any) -> Kept:
        """The bytes that the loop keeps beside a step of a module on a batch."""
        module = part if self.around is None else self.around
        updates = [
            Update(optimizer, i, p)
            for optimizer in map(plain_optimizer, self.optimizers)
            for i, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
        parameters = {id(p): p for p in (*module.parameters(), *(u.parameter for u in updates)) if p.requires_grad}
        gradients = sum(p.nbytes for p in parameters.values())
        ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        buckets = gradients + sum(b.nbytes for b in module.buffers()) if ranks else 0
        # Tensors of the loop that the planned step does not reach.
        planned = {id(t) for t in _tensors(part)}
        sizes = {id(t): t.nbytes for holder in (module, *self.beside) for t in _tensors(holder) if id(t) not in planned}
        return Kept(
            states=sum(map(_state_bytes, updates)),
            gradients=gradients if self.accumulates else 0,
            beside=buckets + sum(sizes.values()),
            update=_bytes_on_the_way(updates),
            **self.with_batch(args, kwargs),
        )

    def with_batch(self, args: Any, kwargs: Any) -> dict[str, int]:
        """The parts of `Kept` that grow with the batch."""
        outside = 0 if self.outside is None else self.outside(args, kwargs)
        return {"batches": self.ahead * _batch_bytes(args, kwargs), "outside": outside}


class PlannedCall(Planned):
    """A module's training method, planned at its first training call."""

    def __init__(self, module: nn.Module, name: str, options: Options) -> None:
        method: Any = getattr(module, name)
        self._fn, self._is_bound = getattr(method, "__func__", method), hasattr(method, "__func__")
        self._options = options
        self._step: CompiledStep[..., Any] | None
        self.module = module
        self.begin(Loop(()))
        self.kept: Kept | None = None  # once it is planned
        self.stub: Any = None  # its result while the code around it is measured
        self.stands_aside = False  # nothing is planned here, but in a part of it

    @property
    def _caches(self) -> Sequence[CaptureCache]:  # type: ignore[override]
        return () if self._step is None else self._step._caches

    def begin(self, loop: Loop) -> None:
        """Begin another training loop: plans for the last one do not hold."""
        self.loop, self._step, self._largest = loop, None, 0

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the planned method, or without gradients the plain one."""
        arguments = (module, *args) if self._is_bound else args
        if self.stub is not None:
            return self.stub
        plain = self.stands_aside or not module.training or not torch.is_grad_enabled()
        if plain or torch.compiler.is_compiling():
            return self._fn(*arguments, **kwargs)
        size = _batch_bytes(args, kwargs)
        if self._step is None or self.kept is None:
            self._step, self._largest = self._planned(module, arguments, kwargs), size
        elif size > self._largest:
            # More is kept beside the largest batch so far; plans for the smaller ones stay.
            planner: Any = self._step._run.backend.planner
            before, self.kept = self.kept.total, replace(self.kept, **self.loop.with_batch(args, kwargs))
            planner.reserve, self._largest = planner.reserve + max(0, self.kept.total - before), size
        return self._step(*arguments, **kwargs)

    def plainly(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the plain method."""
        return self._fn(*((module, *args) if self._is_bound else args), **kwargs)

    def _planned(self, module: nn.Module, arguments: Sequence[Any], kwargs: Any) -> CompiledStep[..., Any]:
        # The bytes beside the step, and those that an update needs, whatever is planned.
        args = arguments[1:] if self._is_bound else arguments
        options, kept = self._options, self.loop.kept(module, args, kwargs)
        self.kept = kept
        beside, total = options.set_aside + kept.total, options.total
        budget = format_bytes(total) if total else options.budget
        log.info("of the budget of %s training keeps %s beside each step", budget, kept)
        gradient_bytes = sum(p.nbytes for p in (self.loop.around or module).parameters() if p.requires_grad)
        update_bytes = sum(t.nbytes for t in _tensors(module)) + gradient_bytes
        update_bytes += kept.states + kept.batches + kept.beside + kept.update
        # Refuse a budget below these; name one that works.
        if 0 < total < update_bytes:
            try:
                Planner(replace(options, reserve=beside)).plan(traced(self._fn, arguments, kwargs, options))
                least = update_bytes
            except InfeasibleBudget as error:  # nor does the step before the update fit
                least = max(update_bytes, error.min_budget)
            why = (
                f"An update of this {type(module).__name__} needs {format_bytes(update_bytes)}, whatever is run again: "
                f"its parameters, their gradients of {format_bytes(gradient_bytes)}, {kept}, and "
                f"{format_bytes(kept.update)} that the optimizer makes on its way. The budget is "
                f"{format_bytes(total)}."
            )
            raise infeasible(why, total, least, "update", " for it and the step")
        return CompiledStep(self._fn, replace(options, reserve=beside))


def plan_call(module: nn.Module, name: str, options: Options, wrap: Callable[[Any], Any] | None = None) -> PlannedCall:
    """Replace a method of a module object by one that is planned at its first training call.

    ``wrap``: makes of the planned method what is called in its place.

    Raises:
        Unsupported: if the module was compiled already.
    """
    # Refuse modules that are planned or compiled already.
    kind = type(module).__name__
    if hasattr(module, "_checkmate_step") or isinstance(vars(module).get(_PLANNED), PlannedCall):
        raise Unsupported(
            f"This {kind} stays within a budget already. Hand over the plain module; or leave this out, and say "
            "checkmate.compile(model, budget=..., reserve=...) with the bytes of the optimizer's state as the reserve."
        )
    if isinstance(module, OptimizedModule):
        raise Unsupported(f"This {kind} was compiled by torch.compile. Hand over the module that was given to it.")
    # Put a method with the same signature on the object.
    planned, original = PlannedCall(module, name, options), getattr(module, name)
    run = planned if wrap is None else wrap(planned)

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(original)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    object.__setattr__(module, name, MethodType(method, module))
    object.__setattr__(module, _PLANNED, planned)
    return planned


def largest_batch(
    step: Callable[[Any], Any],
    loader: Any,
    settings: Options,
    module: nn.Module,
    loop: Loop,
    options: Mapping[str, Any],
    prepare: Callable[[Any], Any] = lambda batch: batch,
) -> LargestBatch:
    """Find the largest batch of a module's step within a budget that it shares with the loop around it.

    Batches are made of the rows of a loader's data, and prepared. Those that the loop holds beside the one at hand grow
    with it: the step is given them too, and reads one.

    Raises:
        InfeasibleBudget: if the loop leaves nothing, or the smallest size does not fit what it leaves.
    """
    # The budget of the step is the rest of what the loop keeps.
    rows, kept = loader.dataset, replace(loop, ahead=0).kept(module, (), {})
    total = parse_bytes(settings.budget)
    beside = settings.set_aside + kept.total

    def one_of(batch: Any, *ahead: Any) -> Any:
        return step(batch)

    # A batch of n rows of the data, with those that the loader prepares ahead.
    def batches(n: int) -> tuple[Any, ...]:
        batch = prepare(loader.collate_fn([rows[i % len(rows)] for i in range(n)]))
        return batch, *(copy.deepcopy(batch) for _ in range(loop.ahead))

    was_training = module.training
    module.train()
    try:
        with torch.enable_grad():
            options = {"largest": len(rows), **options}
            return max_batch_size(lambda: one_of, batches, max(1, total - beside), **options)
    except InfeasibleBudget as error:
        in_all = exact_bytes(error.min_budget + beside, up=True)
        words = f"Beside a step training keeps {kept}: {in_all} in all, of a budget of {format_bytes(total)}."
        raise error.saying(words, total, beside) from None
    finally:
        module.train(was_training)


def plain_optimizer(optimizer: Any) -> optim.Optimizer:
    """The optimizer inside Accelerate's and Lightning's wrappers.

    >>> sgd = optim.SGD([torch.ones(1)], lr=0.1)
    >>> plain_optimizer(sgd) is sgd
    True
    """
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def _batch_bytes(args: Any, kwargs: Any) -> int:
    return sum(t.nbytes for t in tensors_within((args, kwargs)))


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _state_bytes(update: Update) -> int:
    try:
        return update.state_bytes
    except _NO_SAMPLE as error:
        kind = type(update.optimizer).__name__
        log.info("What %s keeps is not known (%s): twice the bytes of its parameters are reserved", kind, error)
        return 2 * update.parameter.nbytes


def _bytes_on_the_way(updates: Sequence[Update]) -> int:
    """Temporary bytes of an optimizer update: for the largest parameter, or for all at once."""
    per_element: dict[Any, float] = {}
    largest: dict[Any, int] = defaultdict(int)
    for update in updates:
        p, settings = update.parameter, update.settings
        at_once = settings.get("foreach") or (settings.get("foreach") is None and p.device.type != "cpu")
        key = (id(update.optimizer), update.group, p.dtype)
        if key not in per_element:
            per_element[key] = _sampled(update)
        largest[key] = largest[key] + p.numel() if at_once else max(largest[key], p.numel())
    return max((int(per_element[key] * numel) for key, numel in largest.items()), default=0)


def _sampled(update: Update) -> float:
    """Temporary bytes per element of a parameter in an update, from a small parameter like it."""
    p = update.parameter
    like = nn.Parameter(torch.zeros(SAMPLE, dtype=p.dtype, device=p.device))
    states: dict[torch.Tensor, Any] = defaultdict(dict)

    def run() -> None:
        update._step(like, torch.zeros_like(like), states)

    try:
        run()
        return max(0.0, aside(lambda: measure_peak(run, p.device)).peak / SAMPLE - p.element_size())
    except _NO_SAMPLE:
        return 2.0 * p.element_size()
