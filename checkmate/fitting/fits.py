"""`fits`: whether a training step fits a device, before it runs, and what would make it fit.

    stand-ins without data -> a trace of the whole step, and beside it one at another size -> where its bytes are ->
    smallest budgets and plans of each way to take less -> the largest batch -> a verdict

Nothing runs, and nothing is allocated on the device: bytes are those of the captured step, seconds a roofline's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import optim

from checkmate.backends.captures import collecting_seldom
from checkmate.backends.planner import Bytes
from checkmate.backends.static_memory import lives_on
from checkmate.backends.tensor_state import tensors_within
from checkmate.batch.sized_problems import SizedProblems
from checkmate.batch.sized_steps import arguments_of
from checkmate.capture.device import as_allocated, main_device
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import storage
from checkmate.compiler import refuse_what_is_no_step
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError, CheckmateError
from checkmate.fitting import TIME_LIMIT
from checkmate.fitting.answer import Fits, LargestSizes, Way
from checkmate.fitting.batch_sizes import Batch, largest_sizes, other_size, scaled, size_of
from checkmate.fitting.beside import Beside
from checkmate.fitting.memory_parts import (
    Resident,
    kept_parts,
    plain_lives,
    plain_parts,
    without_parts,
    without_rounding,
)
from checkmate.fitting.stand_ins import StandIns, loss_of, trained, update_bytes
from checkmate.memory.available import available
from checkmate.memory.cuda_allocator import CudaAllocator
from checkmate.memory.cuda_replay import replay_steps
from checkmate.memory.lives import Lives
from checkmate.profiling.data_sheets import DEVICES, Device
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import attempt, cheapest_split
from checkmate.statusline import showing
from checkmate.tracing import trace
from checkmate.training import TrainingStep, training_step
from checkmate.units import check_positive, format_bytes, format_seconds, parse_bytes

LEAST_SECONDS = 0.5  # to look for each smallest budget and for better plans, however long tracing took
PATIENCE = 20.0  # seconds to look for a first plan, which is mostly found in much less
LEAST_SIZE = 2  # of a batch to estimate others from: a dimension of 1 is broadcast, by other ops
ANY_GAP, GAP = 1.0, 1e-3  # at which to stop
PARTS_OF_TIME = 12  # of what tracing leaves, of which each search gets one
FOR_WANT_OF_TIME = "not looked at, for want of time"
HOST_BYTES = 64 * 10**9  # of a second memory beside a GPU that nobody has described
HOST_SHARE = 0.8  # of the rate of its link that copies reach


def fits(
    fn: Callable[..., Any],
    *batch: Any,
    device: str | None = None,
    optimizer: optim.Optimizer | Iterable[optim.Optimizer] | None = None,
    budget: Bytes | None = None,
    make_batch: Callable[[int], Any] | None = None,
    host: Host | None = None,
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
        time_limit: seconds for everything, after which no search begins that could be left out. A trace that has
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
    place = _Place.of(device, budget, (fn, batch, named))
    with ExitStack() as stack, showing("looking whether it fits"), collecting_seldom():
        stand_ins = StandIns()
        given = [] if optimizer is None else [optimizer] if isinstance(optimizer, optim.Optimizer) else [*optimizer]
        if place.device is not None:
            stack.enter_context(stand_ins.in_modules((fn, batch, named)))
            batch, named = stand_ins.within((batch, named))
            given = [stand_ins.optimizer(one) if isinstance(one, optim.Optimizer) else one for one in given]
        given = given or [optim.AdamW(trained((fn, batch, named)))]
        step = _Step(fn, given, place)
        sizes = _Sizes(step, (batch, named), make_batch)
        stack.enter_context(sizes.looking_beside())
        problem = step.problem(batch, named)
        traced = time.perf_counter()
        resident = step.resident(batch, named, problem)
        left = max(0.0, time_limit - (traced - began))
        seconds = max(LEAST_SECONDS, left / PARTS_OF_TIME)
        ways = tuple(_ways(problem, place, host, seconds, began + time_limit))
        of_update = update_bytes(given, at_once=place.is_gpu)
        plain = plain_parts(problem, resident, of_update)

        def plain_peak(one: Problem) -> int:
            return plain_parts(one, resident, of_update).peak

        largest, why_none = sizes.largest(problem, traced - began, place.budget, plain_peak, began + time_limit)
    plainly = plain.peak <= place.room
    best = None if plainly else next((way for way in ways if way.fits), None)
    code = _code(fn, best, plainly=plainly, room=place.room)
    return Fits(
        device=place.name,
        room=place.room,
        memory_bytes=place.memory_bytes,
        fits_plainly=plainly,
        verdict=_verdict(place, plain.peak, problem.keep_all_cost, ways, best, largest),
        code=code,
        optimizer=f"{', '.join(type(one).__name__ for one in given)}{' (none was given)' if optimizer is None else ''}",
        plain=plain,
        kept=kept_parts(problem, resident),
        plain_seconds=problem.keep_all_cost,
        plain_reserved=place.reserved(problem.resident, plain_lives(problem, of_update)),
        ways=ways,
        largest=largest,
        why_no_largest=why_none,
        notes=tuple(_notes(place, problem, host, make_batch)),
        problem=without_rounding(problem),
        trace_seconds=traced - began,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Place:
    """The device that a step is to run on."""

    name: str
    room: int  # bytes that the step may take
    memory_bytes: int  # that it has; 0: not known
    device: Device | None  # by its data sheet; None: it is here, and ops are measured
    profile: str  # where costs come from
    block_bytes: int  # what its allocator rounds up to
    is_gpu: bool

    @property
    def budget(self) -> int:
        """Bytes to plan for: the room, as it is written in a line of code."""
        return parse_bytes(_written(self.room))

    @classmethod
    def of(cls, name: str | None, budget: Bytes | None, reach: Any) -> _Place:
        """The device of that name, or the one here."""
        asked = None if budget is None else parse_bytes(budget)
        if name is None:
            held = {storage(t): t.untyped_storage().nbytes() for t in tensors_within(reach) if not is_fake(t)}
            here = main_device(tensors_within(reach))
            there_is = available(here, sum(held.values()))
            room, total = there_is.bytes if asked is None else asked, there_is.limit.total
            blocks, is_gpu = kind_of(here).block_bytes, here.type != "cpu"
            return cls(
                "this machine's CPU" if here.type == "cpu" else f"the {here.type} device here",
                room,
                total,
                None,
                "measure",
                blocks,
                is_gpu,
            )
        if name not in DEVICES:
            raise ValueError(f"There is no device {name!r}; there are {', '.join(DEVICES)}.")
        device = DEVICES[name]
        if asked is None and not device.room:
            raise BudgetError(f"How much memory a {device.name} has is not known: name the bytes, budget='16 GB'.")
        about = device.memory_bytes, device, f"roofline:{name}", device.block_bytes, device.capability is not None
        return cls(device.name, device.room if asked is None else asked, *about)

    def reserved(self, resident: int, lives: Lives) -> int | None:
        """Bytes that PyTorch's allocator would hold on a GPU of NVIDIA, by its rules; elsewhere None."""
        if not self.is_gpu or self.device is None:
            return None
        return resident + replay_steps(lives, CudaAllocator()).reserved

    def reserved_for(self, solution: Solution) -> int | None:
        """The same of a plan."""
        if solution.plan is None or not self.is_gpu or self.device is None:
            return None
        places = torch.device("cuda", 0), torch.device("cpu")  # where there is no C++ compiler, ops are of the CPU
        lives = next(lives for lives in (lives_on(solution, place) for place in places) if lives.sizes.any())
        return self.reserved(solution.problem.resident, lives)


@dataclass(frozen=True)
class _Step:
    """The step that is looked at."""

    fn: Callable[..., Any]
    optimizers: list[optim.Optimizer]
    place: _Place

    def problem(self, batch: Any, named: Any) -> Problem:
        """The whole step traced for a batch; it may be split further, in the end with sums over parts."""
        step = training_step(loss_of(self.fn), self.optimizers, budget=max(1, self.place.room))
        return trace(step, *batch, profile=self.place.profile, numerics="rounding", **named)

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
        self._other = Beside(self._at_other_size)

    @contextmanager
    def looking_beside(self) -> Iterator[None]:
        """Within the block a second size is looked at beside what goes on, unless ops are measured."""
        with self._other if self._step.place.device is not None else nullcontext():
            yield

    def largest(
        self, problem: Problem, trace_seconds: float, room: int, plain_peak: Callable[[Problem], int], deadline: float
    ) -> tuple[LargestSizes | None, str]:
        """The largest sizes within a room, or why they are not known.

        ``problem``: of the batch that is given, which took so many seconds to trace.
        """
        try:
            size = size_of(self._batch)
            problems = SizedProblems(self._at)
            problems.traced[size] = without_rounding(problem)
            other = self._other.result(PATIENCE + trace_seconds)
            about: dict[str, Any] = {"trace_seconds": trace_seconds, "plain_peak": plain_peak, "deadline": deadline}
            found = largest_sizes(problems, max(LEAST_SIZE, size), room, other=other, **about)
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
        return without_rounding(self._step.problem(batch, named))

    def _at_other_size(self) -> Problem:
        """Its figures: to estimate from."""
        size = max(LEAST_SIZE, size_of(self._batch))
        return replace(self._at(other_size(size)), emit=None, smaller=None)


def _ways(problem: Problem, place: _Place, host: Host | None, seconds: float, deadline: float) -> Iterator[Way]:
    """Each way to have the step take less, with its smallest budget, and a plan for the room or for that budget.

    Where one fits, no other is looked at after the deadline.
    """
    exact = without_rounding(problem)
    plain = _way("recomputation", without_parts(problem), place, seconds)
    yield plain

    def late() -> bool:
        return in_parts.fits and time.perf_counter() > deadline

    in_parts = plain
    if late():
        yield _left_out("with ops in parts", FOR_WANT_OF_TIME)
    elif exact.smaller is not None and exact.smaller() is not None:
        in_parts = _way("with ops in parts", exact, place, seconds, known=plain)
        yield in_parts
    else:
        yield _left_out("with ops in parts", "no op that would help")
    there = _host_of(place, host)
    if there is None:
        yield _left_out("with a second memory", "give host=checkmate.Host(...)")
    elif late():
        yield _left_out("with a second memory", FOR_WANT_OF_TIME)
    else:
        options = {"host_budget": f'"{_written(there.budget)}"'}
        yield _way(
            "with a second memory", exact.with_host(there), place, seconds, options=options, no_more_than=in_parts
        )
    if late():
        yield _left_out("with rounding", FOR_WANT_OF_TIME)
    elif not any(one.rounding for one in problem.and_smaller()):
        yield _left_out("with rounding", "no sum that would help")
    else:
        yield _way("with rounding", problem, place, seconds, options={"numerics": '"rounding"'}, known=in_parts)


def _left_out(name: str, why: str) -> Way:
    return Way(name, {}, None, None, fits=False, why_not=why)


def _way(
    name: str,
    problem: Problem,
    place: _Place,
    seconds: float,
    *,
    options: dict[str, str] | None = None,
    known: Way | None = None,
    no_more_than: Way | None = None,
) -> Way:
    """A way, whose plan is one that is ``known`` already where that is within the room.

    ``no_more_than``: a way that this one may go as well.
    """
    ends = min_budget(problem, time_limit=seconds)
    smallest, bound = ends.peak, ends.bound
    if (other := known or no_more_than) is not None:
        smallest = min(smallest, other.smallest or smallest)
    if not ends.proven:  # a plan at the bound is often found where other searches had no time
        smallest = min(smallest, _planned(problem, bound, seconds).peak or smallest)
    if known is not None and known.fits and known.solution is not None:
        solution = known.solution
    else:
        budget = place.budget if bound <= place.budget else smallest
        solution = _planned(problem, budget, PATIENCE, improve=seconds)
        if solution.peak is None:
            solution = _planned(problem, smallest, PATIENCE)
    smallest = min(smallest, solution.peak or smallest)
    fits_ = solution.peak is not None and solution.peak <= place.budget
    about = solution, place.reserved_for(solution), "" if solution.peak is not None else "no plan found in time"
    return Way(name, options or {}, smallest, bound, fits_, *about)


def _planned(problem: Problem, budget: int, patience: float, *, improve: float = 0.0) -> Solution:
    """The first plan within a budget that is found, and if it may be far from the best, a better one.

    Args:
        patience: seconds until there is one.
        improve: seconds more to look for a better one.
    """

    def find(one: Problem, seconds: float) -> Solution:
        found = attempt(one, budget, time_limit=seconds, gap=ANY_GAP, progress=False)
        if found.plan is None or found.gap <= GAP or not improve:
            return found
        better = attempt(one, budget, time_limit=improve, gap=GAP, start=found, progress=False)
        return better if better.plan is not None and better.cost <= found.cost else found

    return cheapest_split(problem, find, patience, look_on=bool(improve))


def _host_of(place: _Place, host: Host | None) -> Host | None:
    """The second memory that is asked for, or the one that a GPU has beside it."""
    if host is not None or place.device is None or not place.is_gpu:
        return host
    rate = HOST_SHARE * place.device.host_link
    return Host(HOST_BYTES, send=rate, fetch=rate)


def _verdict(
    place: _Place,
    plain_peak: int,
    plain_seconds: float,
    ways: tuple[Way, ...],
    best: Way | None,
    sizes: LargestSizes | None,
) -> str:
    """Whether it fits, and how, in a sentence."""
    needs, room = format_bytes(plain_peak), format_bytes(place.room)
    if plain_peak <= place.room:
        return f"It fits {place.name} as it is: plain PyTorch takes about {needs}, and there is room for {room}."
    if best is None:
        least = min((way.smallest for way in ways if way.smallest is not None), default=plain_peak)
        smaller = f"; a batch of {sizes.planned} does" if sizes is not None and sizes.planned else ""
        proven = all(way.bound is None or way.bound > place.budget for way in ways)
        found = "the smallest budget" if proven else "the smallest budget found"
        return (
            f"It does not fit {place.name}: there is room for {room}, plain PyTorch takes about {needs}, and {found} "
            f"of any way is {format_bytes(least)}{smaller}."
        )
    again = f"{best.overhead:.1%} of it runs again" if best.overhead else "nothing runs twice"
    took, plain_took = format_seconds(best.seconds or 0.0), format_seconds(plain_seconds)
    how = _HOW[best.name] if best.overhead or best.name != "recomputation" else "as one whole step"
    return (
        f"It fits {place.name} {how}: planned, the step takes {format_bytes(best.peak or 0)} of the {room} "
        f"that there is room for, where plain PyTorch takes about {needs}; {again}, and it takes about {took} instead "
        f"of {plain_took}."
    )


_HOW = {
    "recomputation": "by recomputation",
    "with ops in parts": "by recomputation, with ops that run in parts",
    "with a second memory": "only with a second memory",
    "with rounding": "only with sums over parts, so that its numbers differ from plain PyTorch's by rounding",
}


def _code(fn: Callable[..., Any], best: Way | None, *, plainly: bool, room: int) -> str:
    """The line to write."""
    name = getattr(fn, "__name__", "loss_fn")
    name = name if name.isidentifier() else "loss_fn"
    if plainly:
        return f"loss = {name}(*batch); loss.backward(); optimizer.step(); optimizer.zero_grad()"
    if best is None:
        return "none: take a smaller batch, a lower precision or another device"
    options = "".join(f", {option}={value}" for option, value in best.options.items())
    return f'step = checkmate.training_step({name}, optimizer, budget="{_written(room)}"{options})'


def _written(count: int) -> str:
    """Bytes as `parse_bytes` reads them: in few digits, a little less rather than more.

    >>> _written(23_709_803_776), _written(64 * 10**9), _written(999)
    ('23.7 GB', '64 GB', '999 B')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{math.floor(count / scale * 100) / 100:.10g} {unit}"
    return f"{count} B"


def _notes(
    place: _Place, problem: Problem, host: Host | None, make_batch: Callable[[int], Any] | None
) -> Iterator[str]:
    """What was assumed, in words."""
    yield f"costs: {problem.profile.source}"
    if (there := _host_of(place, host)) is not None:
        yield f"second memory: {there}{'' if host is not None else ' (assumed)'}"
    if make_batch is None:
        yield "sizes of the batch scale the first dimension that all its tensors share"
