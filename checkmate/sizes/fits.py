"""`fits`: whether a training step fits a device, before it runs, and what would make it fit.

    stand-ins without data -> a trace of the whole step -> where its bytes are -> ways to take less, until one fits ->
    the largest batch, where nothing fits -> a verdict

With ``everything`` all ways are looked at, and the largest batch always. Nothing runs, and nothing is allocated on the
device: bytes are those of the captured step, seconds a roofline's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import optim

from checkmate.backends.planner import Bytes, Options
from checkmate.backends.static_memory import lives_on
from checkmate.backends.tensor_state import tensors_within
from checkmate.capture.device import main_device
from checkmate.capture.fusion.kernels import Kernels
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import storage
from checkmate.compiler import refuse_what_is_no_step
from checkmate.core.host import Host
from checkmate.core.problem import Problem
from checkmate.core.solution import Query, Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError, CheckmateError
from checkmate.host.homes import LEAST
from checkmate.memory.available import available
from checkmate.memory.cuda_allocator import EXPANDABLE, CudaAllocator, replay_steps
from checkmate.memory.lives import Lives
from checkmate.memory.meter import collecting_seldom
from checkmate.profiling.data_sheets import Device, device_named
from checkmate.sizes import FITS_TIME_LIMIT
from checkmate.sizes.batches import StandIns, amount_of, loss_of, scaled, size_of, trained, update_bytes
from checkmate.sizes.fits_page import NOT_ASKED, Fits, LargestSizes, MemoryOption
from checkmate.sizes.memory_parts import as_plain, lives_of_plain, parts_of
from checkmate.sizes.search import AUTO, KEEP_ALL, ONE_FORWARD, Attempt, SizeSearch
from checkmate.sizes.sized_steps import SizedProblems, SizedSteps, arguments_of
from checkmate.solvers.common.incumbent import Clock, Task
from checkmate.solvers.host.kept import keep_homes
from checkmate.solvers.search.min_budget import min_budget
from checkmate.solvers.solve import attempt, cheapest_split
from checkmate.statusline import showing
from checkmate.tracing import Batch, trace
from checkmate.training import TrainingStep, training_step
from checkmate.units import check_positive, format_bytes, format_seconds, parse_budget, parse_bytes

LEAST_SECONDS = 0.5  # to look for each smallest budget and for better plans, however long tracing took
PARTS_OF_TIME = 12  # of what tracing leaves, of which each search gets one
TRACES, SIZES_SECONDS = 4, 5.0  # for the largest batch at least: as long as so many traces took, and so many seconds
TRY_SECONDS = 1.0  # to plan a size
PATIENCE = 20.0  # seconds to look for a first plan, which is mostly found in much less
ANY_GAP, GAP = 1.0, 1e-3  # at which to stop
HOST_BYTES = 64 * 10**9  # of a second memory beside a GPU that nobody has described
HOST_SHARE = 0.8  # of the rate of its link that copies reach
HOMES_SECONDS = 5.0  # for a better plan than the first of a step whose model is in a second memory
NAMES = ("recomputation", "with its loss in parts", "with a second memory", "with its model in a second memory")
RECOMPUTATION, IN_PARTS, WITH_HOST, WITH_HOMES = NAMES
_HOW = {
    RECOMPUTATION: "by recomputation",
    IN_PARTS: "by recomputation, with its loss in parts",
    WITH_HOST: "only with a second memory",
}


def fits(
    fn: Callable[..., Any],
    *batch: Any,
    device: str | None = None,
    optimizer: optim.Optimizer | Iterable[optim.Optimizer] | None = None,
    budget: Bytes | None = None,
    make_batch: Callable[[int], Any] | None = None,
    host: Host | None = None,
    host_budget: Bytes | None = None,
    everything: bool = False,
    time_limit: float = FITS_TIME_LIMIT,
    kernels: Kernels = "eager",
    **named: Any,
) -> Fits:
    """Say whether a training step fits a device, before it runs: where its bytes are, and what would make it fit.

    The step is forward, backward and the optimizer's update. With a ``device`` nothing runs: model and batch may be on
    the meta device, and where they have data, tensors without stand in for theirs. Nothing of the model changes. The
    page docs/fit.md says what the figures mean, and what a device's room leaves aside.

    Args:
        fn: gives the loss of a batch: a module or a function. Of an output with a ``loss``, as Hugging Face's models
            give it, that is taken; of several results the first; of a tensor that is no number its sum.
        batch, named: an example of what it is called with.
        device: one of `checkmate.profiling.data_sheets.DEVICES`, such as ``"rtx4090"``; None: the device that the
            tensors are on, with its free memory; its ops are measured then, each on its own.
        optimizer: one or several, as for `checkmate.training_step`; None: AdamW of all parameters with gradients.
        budget: bytes that the step may take, in place of the device's room.
        make_batch: gives the batch of a size, as for `checkmate.max_batch_size`; None: the first dimension that all
            tensors of the batch share is scaled.
        host: a second memory; by default 64 GB of the memory of a GPU's host, at 80 % of what its link carries, beside
            what is at home there.
        host_budget: bytes of the memory of a GPU's host in place of these, with what is at home there.
        everything: look at each way to take less, and for the largest batch, also where an earlier way fits.
        time_limit: seconds for all of it, after which no search begins that could be left out.
        kernels: of planned steps, as for `checkmate.compile`.

    Raises:
        ValueError: if there is no such device, or no such kernels.
        BudgetError: if the device's memory is not known, and there is no ``budget``; or a ``host_budget`` is none.
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
    place = TargetDevice.of(device, budget, (fn, batch, named))
    if host_budget is not None:
        second_memory = place.host(host)
        if host is not None or second_memory is None:
            raise ValueError("host_budget= is for a GPU that device= names: else give host=checkmate.Host(...) alone.")
        host = replace(second_memory, budget=parse_budget(host_budget))
    with ExitStack() as stack, showing("looking whether it fits"), collecting_seldom():
        # Replace tensors by meta tensors if the step is for another device, and make it a whole training step.
        stand_ins = StandIns()
        optims = [] if optimizer is None else [optimizer] if isinstance(optimizer, optim.Optimizer) else [*optimizer]
        if place.device is not None:
            stack.enter_context(stand_ins.in_modules((fn, batch, named)))
            batch, named = stand_ins.within((batch, named))
            optims = [stand_ins.optimizer(o) if isinstance(o, optim.Optimizer) else o for o in optims]
        optims = optims or [optim.AdamW(trained((fn, batch, named)))]
        whole = training_step(loss_of(fn), optims, budget=max(1, place.room))

        def batch_of(size: int) -> Batch:
            if make_batch is None:
                return scaled((batch, named), size)
            arguments = arguments_of(make_batch(size))
            return arguments if place.device is None else StandIns().within(arguments)

        as_traced = problem = trace(whole, *batch, profile=place.profile, **named)
        if kernels != "eager":
            problem = trace(whole, *batch, profile=place.profile, kernels=kernels, **named)
        traced, deadline = time.perf_counter(), began + time_limit
        seconds = max(LEAST_SECONDS, (deadline - traced) / PARTS_OF_TIME)
        # See whether plain PyTorch fits; else find a way that does.
        of_update = update_bytes(optims, at_once=place.is_gpu)
        as_it_is = as_plain(as_traced, of_update)
        plain = parts_of(as_it_is)
        plainly = plain.peak <= place.room
        ways = tuple(ways_of(problem, place, host, seconds, deadline, fits=plainly, everything=everything))
        best = None if plainly else next((way for way in ways if way.fits), None)
        # See what the allocator holds beyond the room, and what it would with expandable segments.
        lives = lives_of_plain(as_it_is)
        plain_reserved = place.reserved(problem.resident, lives)
        reserved, expanded = plain_reserved, place.reserved(problem.resident, lives, expandable=True)
        if best is not None and best.solution is not None:
            reserved, expanded = best.reserved, place.reserved_for(best.solution, expandable=True)
        held = Held(reserved or 0, expanded or 0, place.room)
        # Find the largest batch sizes if asked to, or if nothing fits.
        largest, why_none = None, NOT_ASKED
        if everything or not (plainly or best is not None):
            try:
                size, why_none = size_of((batch, named)), ""

                def sized(kernels: Kernels, traced_problem: Problem) -> SizedProblems:
                    options = Options(profile=place.profile, kernels=kernels)
                    return SizedProblems(SizedSteps(lambda size: whole, batch_of, options), {size: traced_problem})

                plainly_sized = sized("eager", as_traced)
                problems = plainly_sized if kernels == "eager" else sized(kernels, problem)
                until = max(deadline, time.perf_counter() + max(SIZES_SECONDS, TRACES * (traced - began)))
                largest = largest_sizes(
                    *(plainly_sized, problems, size, place.budget), update_bytes=of_update, deadline=until
                )
            except CheckmateError as error:
                why_none = str(error)
    return Fits(
        device=place.name,
        room=place.room,
        memory_bytes=place.memory_bytes,
        fits_plainly=plainly,
        verdict=verdict(
            place, plain.peak, as_traced.keep_all_cost, ways, best, largest, held, amount_of((batch, named))
        ),
        code=line_of_code(fn, best, kernels, plainly=plainly, room=place.room),
        optimizer=f"{', '.join(type(o).__name__ for o in optims)}{' (none was given)' if optimizer is None else ''}",
        plain=plain,
        kept=parts_of(problem),
        plain_seconds=as_traced.keep_all_cost,
        plain_reserved=plain_reserved,
        ways=ways,
        largest=largest,
        why_no_largest=why_none,
        notes=tuple(notes(place, problem, host, make_batch, ways, largest)),
        problem=problem,
        trace_seconds=traced - began,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class Held:
    """Bytes that PyTorch's allocator would hold for the step, in words where they are more than the room."""

    reserved: int
    expanded: int  # with expandable segments
    room: int

    @property
    def condition(self) -> str:
        """The condition on which the step fits: a comma and words, or nothing."""
        if self.reserved <= self.room:
            return ""
        return f", with {EXPANDABLE}" if self.expanded <= self.room else ", if its bytes alone count"

    @property
    def clause(self) -> str:
        """The end of a sentence that begins with what the step takes."""
        if not self.condition:
            return ""
        reserved, expanded = format_bytes(self.reserved), format_bytes(self.expanded)
        holds = f"; PyTorch's allocator would hold {reserved} for it without that setting, and {expanded} with it"
        if self.expanded <= self.room:
            return holds
        least = format_bytes(min(self.reserved, self.expanded))
        return f"; PyTorch's allocator would hold {least} for it at least: name a smaller budget"


def verdict(
    place: TargetDevice,
    plain_peak: int,
    plain_seconds: float,
    ways: tuple[MemoryOption, ...],
    best: MemoryOption | None,
    sizes: LargestSizes | None,
    held: Held,
    amount: str,
) -> str:
    """The verdict in a sentence; ``amount``: of samples that an update is for, in words."""
    needs, room = format_bytes(plain_peak), format_bytes(place.room)
    if plain_peak <= place.room:
        takes = f"plain PyTorch takes about {needs}, and there is room for {room}{held.clause}"
        return f"It fits {place.name} as it is{held.condition}: {takes}."
    # It does not fit: name the smallest budget, and a batch that would.
    if best is None:
        least = min((way.smallest for way in ways if way.smallest is not None), default=plain_peak)
        smaller = f"; a batch of {sizes.planned} does" if sizes is not None and sizes.planned else ""
        proven = all(way.bound is None or way.bound > place.budget for way in ways)
        claim = "the smallest budget" if proven else "the smallest budget found"
        return (
            f"It does not fit {place.name}: there is room for {room}, plain PyTorch takes about {needs}, and {claim} "
            f"of any way is {format_bytes(least, up=True)}{smaller}."
        )
    # It fits planned: at which price.
    took, plain_took = format_seconds(best.seconds or 0.0), format_seconds(plain_seconds)
    if best.name == WITH_HOMES and best.solution is not None:
        memory, at_home = format_bytes(best.host_bytes or 0, up=True), format_bytes(best.solution.problem.homes_bytes)
        speed, most = math.floor(100 * (best.speed or 0)) / 100, math.ceil(100 * (best.speed_bound or 1)) / 100
        return (
            f"It fits {place.name} with {memory} of {place.second_memory}, at {speed:.2f} of the speed of a device "
            f"that holds it (no plan above {most:.2f}){held.condition}: {at_home} of parameters and states are at home "
            f"there, and the step takes {format_bytes(best.peak or 0)} of the {room} that there is room for, where "
            f"plain PyTorch takes about {needs}{held.clause}; it takes about {took} for {amount}."
        )
    again = f"{best.overhead:.1%} of it runs again" if best.overhead else "nothing runs twice"
    how = _HOW[best.name] if best.overhead or best.name != RECOMPUTATION else "as one whole step"
    return (
        f"It fits {place.name} {how}{held.condition}: planned, the step takes {format_bytes(best.peak or 0)} of the "
        f"{room} that there is room for, where plain PyTorch takes about {needs}{held.clause}; {again}, and it takes "
        f"about {took} instead of {plain_took}."
    )


def line_of_code(
    fn: Callable[..., Any], best: MemoryOption | None, kernels: Kernels, *, plainly: bool, room: int
) -> str:
    """The line of code to write."""
    name = getattr(fn, "__name__", "loss_fn")
    name = name if name.isidentifier() else "loss_fn"
    if plainly:
        return f"loss = {name}(*batch); loss.backward(); optimizer.step(); optimizer.zero_grad()"
    if best is None:
        return "none: take a smaller batch, a lower precision or another device"
    named = {**best.options} if kernels == "eager" else {**best.options, "kernels": f'"{kernels}"'}
    options = "".join(f", {option}={value}" for option, value in named.items())
    first = "checkmate.in_file(model, folder); " if "folder" in named.get("host", "") else ""
    return f'{first}step = checkmate.training_step({name}, optimizer, budget="{written(room)}"{options})'


def notes(
    place: TargetDevice,
    problem: Problem,
    host: Host | None,
    make_batch: Callable[[int], Any] | None,
    ways: tuple[MemoryOption, ...],
    largest: LargestSizes | None,
) -> Iterator[str]:
    """The assumptions, and the terms on the page explained."""
    yield "nothing run twice: a planned step that runs each op once, and lets go of each gradient at its update"
    looked_at = {way.name for way in ways if way.smallest is not None}
    if IN_PARTS in looked_at:
        yield f"{IN_PARTS}: logits of a language model are computed for some rows after the others, with the same bits"
    if WITH_HOST in looked_at:
        yield f"{WITH_HOST}: values wait in the memory of the host until the backward reads them"
    if WITH_HOMES in looked_at:
        yield f"{WITH_HOMES}: parameters and states are there between updates, and here only while they are in use"
    yield f"costs: {problem.profile.source}"
    if place.is_gpu and place.device is not None:
        yield (
            "allocator holds: memory of the device that PyTorch's caching allocator has, by its rules, as nvidia-smi "
            "shows it beside CUDA's context: the step's tensors, and gaps between them that none of them fits"
        )
    if {WITH_HOST, WITH_HOMES} & looked_at and (second_memory := place.host(host)) is not None:
        beside = ", beside what is at home there" * (WITH_HOMES in looked_at)
        yield f"second memory: {second_memory}{'' if host is not None else f' (assumed{beside})'}"
    if make_batch is None and largest is not None:
        yield "sizes of the batch scale the first dimension that all its tensors share"


def ways_of(
    problem: Problem,
    place: TargetDevice,
    host: Host | None,
    seconds: float,
    deadline: float,
    *,
    fits: bool,
    everything: bool,
) -> list[MemoryOption]:
    """The ways to make the step take less, each with its smallest budget, and a plan for that or for the room.

    Once one ``fits``, as plain PyTorch may, the others are looked at only if ``everything`` is asked for, and then
    none that would go on beyond the deadline if it took as long as the longest before it.
    """
    memory = place.host(host)
    homes = homes_of(problem)
    sizes = sum(problem.graph.values[v].size_bytes for v in homes)
    with_homes = memory if memory is None or host is not None else replace(memory, budget=memory.budget + sizes)
    can_be_there = with_homes is not None and 0 < sizes <= with_homes.budget
    hopeless = problem.resident > place.budget and can_be_there and not everything  # with the model here
    ways: list[MemoryOption] = []
    last_way: MemoryOption | None = None  # that was looked at
    longest = 0.0
    for name in NAMES:
        began, why_not = time.perf_counter(), ""
        planned_fits = any(way.fits for way in ways)
        if (fits or planned_fits) and not everything:
            why_not = NOT_ASKED
        elif planned_fits and began + longest > deadline:
            why_not = "not looked at, for want of time"
        elif name == IN_PARTS and (problem.next_split is None or problem.next_split() is None):
            why_not = "no loss that would help"
        elif name in (WITH_HOST, WITH_HOMES) and memory is None:
            why_not = "give host=checkmate.Host(...)"
        elif name == WITH_HOMES and not can_be_there:
            why_not = f"{format_bytes(sizes)} would be at home there" if sizes else "nothing of 1 MiB to be there"
        elif name != WITH_HOMES and hopeless:
            why_not = f"{format_bytes(problem.resident)} are here all the time"
        if why_not:
            ways.append(MemoryOption(name, {}, None, None, fits=False, why_not=why_not))
            continue
        variant, options = replace(problem, next_split=None) if name == RECOMPUTATION else problem, {}
        if name == WITH_HOST and memory is not None:
            variant, options = problem.with_host(memory), {"host_budget": f'"{written(memory.budget)}"'}
        if name == WITH_HOMES and with_homes is not None:
            ways.append(model_there(problem.with_host(with_homes).with_homes(homes), place, last_way, seconds))
            continue
        # The smallest budget: that of an earlier way will do, and a plan at the bound is often found where other
        # searches had no time.
        ends = min_budget(variant, time_limit=seconds)
        smallest = ends.peak if last_way is None else min(ends.peak, last_way.smallest or ends.peak)
        if not ends.proven:
            smallest = min(smallest, planned(variant, ends.bound, seconds).peak or smallest)
        # The plan, for the room or that budget; without a host that of an earlier way will do.
        if last_way is not None and last_way.fits and last_way.solution is not None and variant.host is None:
            solution = last_way.solution
        else:
            budget = place.budget if ends.bound <= place.budget else smallest
            solution = planned(variant, budget, PATIENCE, improve=seconds)
            if solution.peak is None:
                solution = planned(variant, smallest, PATIENCE)
        smallest = min(smallest, solution.peak or smallest)
        fits_here = solution.peak is not None and solution.peak <= place.budget
        why_not = "" if solution.peak is not None else "no plan found in time"
        reserved = place.reserved_for(solution)
        last_way = MemoryOption(name, options, smallest, ends.bound, fits_here, solution, reserved, why_not)
        ways.append(last_way)
        longest = max(longest, time.perf_counter() - began)
    return ways


def homes_of(problem: Problem) -> list[int]:
    """The parameters, buffers and states that can be at home in a second memory, of 1 MiB at least each."""
    graph, over = problem.graph, problem.graph.overwritten_by
    return [
        v
        for v, value in enumerate(graph.values)
        if value.producer is None and value.role != "input" and value.size_bytes >= LEAST and not graph.links
        if graph.users[v] and v not in graph.outputs and (v not in over or v in graph.ops[over[v]].inputs)
    ]


def model_there(problem: Problem, place: TargetDevice, last_way: MemoryOption | None, seconds: float) -> MemoryOption:
    """The way to have at home in a second memory what a problem has there, with a plan soon, and the linear bound."""
    # The step, or its first split, which leaves more room for transfers: the better first plan, improved.
    firsts = [
        planned(replace(step, next_split=None), place.budget, PATIENCE) for step in islice(problem.splits_in_turn(), 2)
    ]
    solution = min(firsts, key=lambda first: first.cost)
    if solution.plan is None:
        solution = planned(problem, place.budget, PATIENCE)
    elif solution.gap > GAP:
        query = Query(solution.problem, place.budget, seconds=max(seconds, HOMES_SECONDS), gap=GAP, start=solution)
        better = attempt(query, progress=False)
        solution = better if better.plan is not None and better.cost < solution.cost else solution
    smallest, ends = solution.peak, None  # how much lower it could be is not asked where there is a plan
    if smallest is None:
        ends = min_budget(problem, time_limit=seconds)
        smallest, solution = ends.peak, planned(problem, ends.peak, PATIENCE)
    smallest = min(smallest, (last_way and last_way.smallest) or smallest)
    fits_here = solution.peak is not None and solution.peak <= place.budget
    least = keep_homes(Task(solution.problem, solution.budget, Clock(PATIENCE)))[1]  # whatever is kept here
    at_home = solution.second_memory.peak if solution.second_memory is not None else problem.homes_bytes
    options = {"host_budget": f'"{format_bytes(at_home, up=True)}"'}
    options |= {"device": '"cuda"'} if place.is_gpu else {"host": 'f"file:{folder}"'}
    why_not, full = "" if solution.peak is not None else "no plan found in time", problem.keep_all_cost
    return MemoryOption(
        *(WITH_HOMES, options, smallest, None if ends is None else ends.bound, fits_here, solution),
        *(place.reserved_for(solution), why_not),
        host_bytes=at_home,
        speed=full / solution.cost if solution.cost > 0 else 1.0,
        speed_bound=min(1.0, full / least) if least > 0 else 1.0,
    )


def largest_sizes(
    of_plain: Callable[[int], Problem],
    problems: Callable[[int], Problem],
    size: int,
    room: int,
    *,
    update_bytes: int,
    deadline: float,
) -> LargestSizes:
    """The largest sizes within a room: of plain PyTorch, of a step that reruns nothing, and of a planned one.

    Args:
        of_plain: the step of a size as it is traced; ``problems`` with the kernels of a planned one.
        size: that of the batch that was looked at.
        update_bytes: that the update of plain PyTorch takes, as for `as_plain`.
        deadline: of `time.perf_counter`; a size that is found until then is the answer.
    """

    def search(problem_of: Callable[[int], Problem], method: str, hint: int, low: Attempt | None = None) -> SizeSearch:
        result = SizeSearch(problem_of, room, ONE_FORWARD, deadline, TRY_SECONDS, method, hint=hint, low=low)
        result.run()
        return result

    plain = search(lambda n: as_plain(of_plain(n), update_bytes), KEEP_ALL, size)
    keep_all = search(problems, KEEP_ALL, plain.low.size if plain.low else size)
    best = search(problems, AUTO, keep_all.low.size if keep_all.low else size, keep_all.low)
    searches = plain, keep_all, best
    sizes = dict(
        zip(("plain", "keep_all", "planned"), (run.low.size if run.low else 0 for run in searches), strict=True)
    )
    checked = all(run.low is None or not run.is_open for run in searches)
    solution = None if best.low is None else best.low.solution
    seconds, overhead = (None, None) if solution is None else (solution.cost, solution.recomputation)
    return LargestSizes(size, **sizes, checked=checked, seconds=seconds, overhead=overhead)


def planned(problem: Problem, budget: int, patience: float, *, improve: float = 0.0) -> Solution:
    """The first plan found within a budget, and a better one if it may be far from the best.

    Args:
        patience: seconds until there is one.
        improve: seconds more to look for a better one.
    """

    def improved(query: Query) -> Solution:
        first = attempt(query, progress=False)
        if first.plan is None or first.gap <= GAP or not improve:
            return first
        better = attempt(Query(query.problem, budget, seconds=improve, gap=GAP, start=first), progress=False)
        return better if better.plan is not None and better.cost <= first.cost else first

    solver = cheapest_split(improved, look_on=bool(improve))
    return solver(Query(problem, budget, seconds=patience, gap=ANY_GAP))


@dataclass(frozen=True)
class TargetDevice:
    """The device that a step is to run on."""

    name: str
    room: int  # bytes that the step may take
    memory_bytes: int  # 0: not known
    device: Device | None  # by its data sheet; None: it is here, and ops are measured
    profile: str  # where costs come from
    block_bytes: int  # unit of its allocator's sizes
    is_gpu: bool

    @property
    def second_memory(self) -> str:
        """The memory beside it in a word."""
        return "RAM" if self.is_gpu else "a file"

    @property
    def budget(self) -> int:
        """The room as a budget, as a line of code writes it."""
        return parse_bytes(written(self.room))

    @classmethod
    def of(cls, name: str | None, budget: Bytes | None, reach: Any) -> TargetDevice:
        """The device of a name, or the one here."""
        budget_bytes = None if budget is None else parse_budget(budget)
        if name is None:
            held = {storage(t): t.untyped_storage().nbytes() for t in tensors_within(reach) if not is_fake(t)}
            own_device = main_device(tensors_within(reach))
            memory = available(own_device, sum(held.values()))
            room, total = memory.bytes if budget_bytes is None else budget_bytes, memory.limit.total
            title = "this machine's CPU" if own_device.type == "cpu" else f"the {own_device.type} device here"
            return cls(title, room, total, None, "measure", kind_of(own_device).block_bytes, own_device.type != "cpu")
        device = device_named(name)
        if budget_bytes is None and not device.room:
            raise BudgetError(f"How much memory a {device.name} has is not known: name the bytes, budget='16 GB'.")
        facts = device.memory_bytes, device, f"roofline:{name}", device.block_bytes, device.capability is not None
        return cls(device.name, device.room if budget_bytes is None else budget_bytes, *facts)

    def host(self, host: Host | None) -> Host | None:
        """The second memory that is asked for, or the one beside a GPU."""
        if host is not None or self.device is None or not self.is_gpu:
            return host
        rate = HOST_SHARE * self.device.host_link
        return Host(HOST_BYTES, send=rate, fetch=rate)

    def reserved(self, resident: int, lives: Lives, *, expandable: bool = False) -> int | None:
        """Bytes that PyTorch's allocator would hold on an NVIDIA GPU, by its rules; None elsewhere."""
        if not self.is_gpu or self.device is None:
            return None
        return resident + replay_steps(lives, CudaAllocator(expandable=expandable)).reserved

    def reserved_for(self, solution: Solution, *, expandable: bool = False) -> int | None:
        """Bytes that the allocator would hold for a plan."""
        if solution.plan is None or not self.is_gpu or self.device is None:
            return None
        places = torch.device("cuda", 0), torch.device("cpu")  # where there is no C++ compiler, ops are of the CPU
        lives = next(lives for lives in (lives_on(solution, place) for place in places) if lives.sizes.any())
        return self.reserved(solution.problem.resident, lives, expandable=expandable)


def written(count: int) -> str:
    """Bytes in few digits for `parse_bytes`, rounded down.

    >>> written(23_709_803_776), written(64 * 10**9), written(999)
    ('23.7 GB', '64 GB', '999 B')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{math.floor(count / scale * 100) / 100:.10g} {unit}"
    return f"{count} B"
