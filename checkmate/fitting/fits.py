"""`fits`: whether a training step fits a device, before it runs, and what would make it fit.

    stand-ins without data -> a trace of the whole step -> where its bytes are -> ways to take less, until one fits ->
    the largest batch, where nothing fits -> a verdict

With ``everything`` all ways are looked at, and the largest batch always. Nothing runs, and nothing is allocated on the
device: bytes are those of the captured step, seconds a roofline's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import optim

from checkmate.backends.captures import collecting_seldom
from checkmate.backends.planner import Bytes
from checkmate.backends.tensor_state import tensors_within
from checkmate.batch.sized_problems import SizedProblems
from checkmate.batch.sized_steps import arguments_of
from checkmate.capture.device import as_allocated
from checkmate.capture.nodes import storage
from checkmate.compiler import refuse_what_is_no_step
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.errors import CheckmateError
from checkmate.fitting import TIME_LIMIT
from checkmate.fitting.answer import NOT_ASKED, Fits, LargestSizes
from checkmate.fitting.batch_sizes import Batch, largest_sizes, scaled, size_of
from checkmate.fitting.memory_parts import (
    Resident,
    kept_parts,
    plain_lives,
    plain_parts,
)
from checkmate.fitting.place import Place
from checkmate.fitting.stand_ins import StandIns, loss_of, trained, update_bytes
from checkmate.fitting.ways import ways_of
from checkmate.fitting.words import line_of_code, notes, verdict
from checkmate.statusline import showing
from checkmate.tracing import trace
from checkmate.training import TrainingStep, training_step
from checkmate.units import check_positive

LEAST_SECONDS = 0.5  # to look for each smallest budget and for better plans, however long tracing took
LEAST_SIZE = 2  # of a batch to estimate others from: a dimension of 1 is broadcast, by other ops
PARTS_OF_TIME = 12  # of what tracing leaves, of which each search gets one


def fits(
    fn: Callable[..., Any],
    *batch: Any,
    device: str | None = None,
    optimizer: optim.Optimizer | Iterable[optim.Optimizer] | None = None,
    budget: Bytes | None = None,
    make_batch: Callable[[int], Any] | None = None,
    host: Host | None = None,
    everything: bool = False,
    time_limit: float = TIME_LIMIT,
    **named: Any,
) -> Fits:
    """Say whether a training step fits a device, before it runs: where its bytes are, and what would make it fit.

    The step is forward, backward and the optimizer's update. With a ``device`` nothing runs: model and batch may be on
    the meta device, and where they have data, tensors without stand in for theirs. Nothing of the model changes.

    Bytes of plans are those that the captured step allocates, in the allocator's blocks; those of plain PyTorch are
    an estimate from the same ops, with all gradients kept until ``optimizer.step()``. Seconds are a roofline's. A room
    leaves 8 % of a device's memory, 2 GB at least, to what nobody can know before it runs: CUDA's context, workspaces
    of cuDNN and cuBLAS, gaps between blocks.

    Args:
        fn: gives the loss of a batch: a module or a function. Of an output with a ``loss``, as Hugging Face's models
            give it, that is taken; of several results the first; of a tensor that is no number its sum.
        batch, named: an example of what it is called with.
        device: one of `checkmate.profiling.data_sheets.DEVICES`, such as ``"rtx4090"``; None: the device that the
            tensors are on, whose ops are measured then, each on its own, and what is free of its memory.
        optimizer: one or several, as for `checkmate.training_step`; None: AdamW of all parameters with gradients.
        budget: bytes that the step may take, in place of the device's room.
        make_batch: gives the batch of a size, for the largest batch: a tuple, a dict or one tensor. By default the
            first dimension that all tensors of the batch share is scaled.
        host: a second memory, with its bytes and rates; by default 64 GB of the memory of a GPU's host, at 80 % of
            what its link carries.
        everything: look at each way to take less, and for the largest batch, also where plain PyTorch or an earlier
            way fits. Without, the answer takes little longer than one trace where plain PyTorch fits.
        time_limit: seconds for all of it, after which no search begins that could be left out. A trace that has
            begun is ended, and each way is looked at for a second or two.

    Raises:
        ValueError: if there is no such device.
        BudgetError: if the device's memory is not known, and there is no ``budget``.
        Unsupported: if the step cannot be captured as one graph, or trains nothing; or if it is to be measured and has
            no data.

    >>> import torch
    >>> class Loss(torch.nn.Linear):
    ...     def forward(self, x, y):
    ...         return torch.nn.functional.mse_loss(super().forward(x), y)
    >>> with torch.device("meta"):
    ...     found = fits(Loss(4096, 4096), torch.ones(8, 4096), torch.ones(8, 4096), device="rtx4090")
    >>> found.fits, found.plain.parameters, found.plain.optimizer_state, found.code
    (True, 67125248, 134250504, 'loss = loss_fn(*batch); loss.backward(); optimizer.step(); optimizer.zero_grad()')
    """
    began = time.perf_counter()
    refuse_what_is_no_step(fn, "checkmate.fits")
    check_positive("time_limit", time_limit, " of seconds")
    if isinstance(fn, TrainingStep):
        raise TypeError("checkmate.fits takes what gives the loss, and the optimizer, not a training step of both.")
    place = Place.of(device, budget, (fn, batch, named))
    with ExitStack() as stack, showing("looking whether it fits"), collecting_seldom():
        stand_ins = StandIns()
        given = [] if optimizer is None else [optimizer] if isinstance(optimizer, optim.Optimizer) else [*optimizer]
        if place.device is not None:
            stack.enter_context(stand_ins.in_modules((fn, batch, named)))
            batch, named = stand_ins.within((batch, named))
            given = [stand_ins.optimizer(one) if isinstance(one, optim.Optimizer) else one for one in given]
        given = given or [optim.AdamW(trained((fn, batch, named)))]
        step = _Step(fn, given, place)
        problem = step.problem(batch, named)
        traced = time.perf_counter()
        resident = step.resident(batch, named, problem)
        left = max(0.0, time_limit - (traced - began))
        seconds = max(LEAST_SECONDS, left / PARTS_OF_TIME)
        of_update = update_bytes(given, at_once=place.is_gpu)
        plain = plain_parts(problem, resident, of_update)
        plainly = plain.peak <= place.room
        asked: dict[str, Any] = {"fits": plainly, "everything": everything}
        ways = tuple(ways_of(problem, place, host, seconds, began + time_limit, **asked))
        best = None if plainly else next((way for way in ways if way.fits), None)

        def plain_peak(one: Problem) -> int:
            return plain_parts(one, resident, of_update).peak

        largest, why_none = None, NOT_ASKED
        if everything or not (plainly or best is not None):
            sizes = _Sizes(step, (batch, named), make_batch)
            largest, why_none = sizes.largest(problem, traced - began, place.budget, plain_peak, began + time_limit)
    return Fits(
        device=place.name,
        room=place.room,
        memory_bytes=place.memory_bytes,
        fits_plainly=plainly,
        verdict=verdict(place, plain.peak, problem.keep_all_cost, ways, best, largest),
        code=line_of_code(fn, best, plainly=plainly, room=place.room),
        optimizer=f"{', '.join(type(one).__name__ for one in given)}{' (none was given)' if optimizer is None else ''}",
        plain=plain,
        kept=kept_parts(problem, resident),
        plain_seconds=problem.keep_all_cost,
        plain_reserved=place.reserved(problem.resident, plain_lives(problem, of_update)),
        ways=ways,
        largest=largest,
        why_no_largest=why_none,
        notes=tuple(notes(place, problem, host, make_batch, ways, largest)),
        problem=problem,
        trace_seconds=traced - began,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Step:
    """The step that is looked at."""

    fn: Callable[..., Any]
    optimizers: list[optim.Optimizer]
    place: Place

    def problem(self, batch: Any, named: Any) -> Problem:
        """The whole step traced for a batch; its loss may run in parts."""
        step = training_step(loss_of(self.fn), self.optimizers, budget=max(1, self.place.room))
        return trace(step, *batch, profile=self.place.profile, **named)

    def resident(self, batch: Any, named: Any, problem: Problem) -> Resident:
        """How many of the bytes that are there all the time are parameters and states."""
        reached = {storage(t): t for t in tensors_within((self.fn, batch, named)) if isinstance(t, torch.nn.Parameter)}
        sizes = (t.untyped_storage().nbytes() for t in reached.values())
        parameters = sum(as_allocated(size, self.place.block_bytes) for size in sizes)
        step = training_step(loss_of(self.fn), self.optimizers, budget=max(1, self.place.room))
        states = step.inserts.updates.held_bytes
        return Resident(min(parameters, problem.resident), max(0, min(states, problem.resident - parameters)))


class _Sizes:
    """The step at other sizes of its batch."""

    def __init__(self, step: _Step, batch: Batch, make_batch: Callable[[int], Any] | None) -> None:
        self._step, self._batch, self._make_batch = step, batch, make_batch

    def largest(
        self, problem: Problem, trace_seconds: float, room: int, plain_peak: Callable[[Problem], int], deadline: float
    ) -> tuple[LargestSizes | None, str]:
        """The largest sizes within a room, or why they are not known.

        ``problem``: of the batch that is given, which took so many seconds to trace.
        """
        try:
            size = size_of(self._batch)
            problems = SizedProblems(self._at)
            problems.traced[size] = problem
            about: dict[str, Any] = {"trace_seconds": trace_seconds, "plain_peak": plain_peak, "deadline": deadline}
            found = largest_sizes(problems, max(LEAST_SIZE, size), room, **about)
            return replace(found, given=size), ""
        except CheckmateError as error:
            return None, str(error)

    def _at(self, size: int) -> Problem:
        if self._make_batch is None:
            batch, named = scaled(self._batch, size)
        else:
            batch, named = arguments_of(self._make_batch(size))
            if self._step.place.device is not None:
                batch, named = StandIns().within((batch, named))
        return self._step.problem(batch, named)
