"""Make the `Problem` of a captured step: its ops, and the bytes in use beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from checkmate.backends.tensor_state import modules_within, tensors_within
from checkmate.capture.device import as_allocated, main_device
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.guards import DataGuards
from checkmate.capture.joint import NUMBERS, Joint
from checkmate.capture.nodes import Held, input_position, storage, storages
from checkmate.capture.sharded.shards import local
from checkmate.codegen.emit import Begin, Modules, emit
from checkmate.codegen.second_memory import SecondMemory, rounding
from checkmate.codegen.transfers import no_second_memory
from checkmate.core.graph import Op
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import HostError, Unsupported
from checkmate.host import home_of
from checkmate.host.homes import LEAST
from checkmate.memory import aside, measure_peak
from checkmate.profiling.measure import Measure
from checkmate.profiling.other_sizes import profile_at
from checkmate.profiling.source import Source, profile_of
from checkmate.profiling.trial import tried_here
from checkmate.solvers.search.late_gradients import late_results
from checkmate.solvers.search.min_budget import ops_above
from checkmate.units import exact_bytes, format_bytes
from checkmate.updates.updates import Updates

SECONDS_OF_FLOOR = 1.0  # to look for the smallest budget of a step with fewer kernels


class Codegen:
    """Writes the modules of plans of a captured step."""

    def __init__(self, joint: Joint, begin: Begin = no_second_memory, homes: frozenset[int] = frozenset()) -> None:
        self._joint: Callable[[], Joint] = lambda: joint
        self._begin, self.homes = begin, homes

    @property
    def joint(self) -> Joint:
        """The captured step."""
        return self._joint()

    def let_go(self, read: Callable[[], Joint]) -> None:
        """Keep the captured step no longer, and read it anew whenever it is asked for."""
        self._joint = read

    def __call__(self, plan: Plan) -> Modules:
        """Write the modules of a plan."""
        return emit(self.joint, plan, self._begin, self.homes)


def joint_of(problem: Problem) -> Joint:
    """The captured step of a problem."""
    assert isinstance(problem.codegen, Codegen)
    return problem.codegen.joint


def kernels_of(joint: Joint) -> dict[int, str]:
    """Keys of the kernels of groups, by op."""
    targets = {k: node.target for k, node in enumerate(joint.nodes) if node is not None}
    return {k: target.key for k, target in targets.items() if isinstance(target, Kernel)}


def kernels_above(problem: Problem, budget: int) -> list[str]:
    """Keys of the kernels by which a step takes more than a budget at the smallest peak that is known.

    These are the kernels that run at that peak, the one that takes the most first; if none does, the one that has made,
    or is to read, the most bytes that are held then. Empty if the step fits.
    """
    *_, problem = problem.splits_in_turn()
    above, kernels = ops_above(problem, budget, time_limit=SECONDS_OF_FLOOR), kernels_of(joint_of(problem))
    if running := [kernels[k] for k in sorted(above, key=above.__getitem__, reverse=True) if k in kernels]:
        return [*dict.fromkeys(running)]
    held = Counter[str]()
    for value, users in zip(problem.graph.values, problem.graph.users, strict=True):
        ops = [] if value.producer is None else [value.producer, *users]
        if any(min(ops) <= k <= max(ops) for k in above if ops):
            for key in {kernels[k] for k in ops if k in kernels}:
                held[key] += value.size_bytes
    return [key for key, _ in held.most_common(1)]


def is_at_home(held: Held) -> bool:
    """Tell whether a state or a sum is at home where its parameter is: in a file, if it is large enough for that."""
    return held.nbytes >= LEAST and home_of(held.parameter) is not None


def is_there(held: Held) -> bool:
    """Tell whether a state or a sum is in its home already."""
    tensor = held.get()
    return tensor is not None and home_of(tensor) is not None


def bytes_elsewhere(tensors: Iterable[Any], updates: Updates | None) -> int:
    """Bytes of a whole step that are not allocated when it begins: at home elsewhere, or made by the first update."""
    if updates is None:
        return 0
    homes = {home for t in tensors if isinstance(t, torch.Tensor) and (home := home_of(t)) is not None}
    of_updates = (held.nbytes for held in updates.held if is_at_home(held) or held.get() is None)
    return sum(home.nbytes for home in homes) + sum(of_updates)


def homes_of(joint: Joint, away: Mapping[int, bool]) -> frozenset[int]:
    """The inputs, states and sums that are at home in a second memory.

    Args:
        away: whether inputs that have a home are only there, by their positions in what was traced.

    Raises:
        Unsupported: if such an input has to be here.
    """
    inputs = {v for v, value in enumerate(joint.graph.values) if value.producer is None} - {*joint.graph.outputs}
    held = {v for v, held in joint.held.items() if is_at_home(held)}
    homes = frozenset(
        v
        for v in inputs - joint.held.keys()
        if any(input_position(node) in away for node in joint.nodes_of_value[v])
        and joint.step.overwritten.keys().isdisjoint(storages(*joint.nodes_of_value[v]))  # by ops, and so in place
    ).union(inputs & held)
    for node in joint.step.placeholders:
        i = input_position(node)
        if i is not None and away.get(i) and not homes.issuperset(joint.value_of.get(node, ())):
            raise Unsupported(
                f"{joint.step.name(node)} is at home on the CPU, and the step writes to it or returns it, beside its "
                "update. With device= a step reads large parameters only: have it write to, or return, a copy."
            )
    return homes


def with_homes(problem: Problem, updates: Updates) -> Problem:
    """The problem with its homes in the second memory, which other calls share with it.

    Raises:
        Unsupported: with averaged parameters, ranks that train together, or states that cannot move each alone.
        HostError: if the second memory is too small.
    """
    codegen, host = problem.codegen, problem.host
    if not isinstance(codegen, Codegen) or host is None or not codegen.homes:
        return problem
    for option, setting in (("ema=", updates.average), ("ranks that train together", updates.exchange)):
        if setting is not None:
            raise Unsupported(f"Parameters that are in a file are not planned with {option}: keep them in memory.")
    for update in updates.of_parameters().values():
        if home_of(update.parameter) is not None and sum(update.states.values()) >= LEAST and update.inseparable:
            raise Unsupported(
                f"{type(update.optimizer).__name__} has for a parameter of {exact_bytes(update.parameter.nbytes)}, "
                f"which is at home in the second memory, the state {update.inseparable!r}, which is no tensor with "
                "bytes of its own: it is a list or the like, or shares memory with another state or the parameter. "
                "Keep that parameter in memory, or each state in a tensor of its own."
            )
    # States and sums that this graph does not reach are there too.
    values, held_here = problem.graph.values, codegen.joint.held
    value_bytes = {v: values[v].size_bytes for v in codegen.homes}
    sizes = Counter(parameters=sum(size for v, size in value_bytes.items() if v not in held_here))
    for held in filter(is_at_home, updates.held):
        sizes["sums of gradients" if held.name == "grad" else "states"] += held.nbytes
    extra = sizes.total() - sum(value_bytes.values())
    if sizes.total() > host.budget:
        parts = ", ".join(f"{format_bytes(size)} of {kind}" for kind, size in sizes.items() if size)
        least = sizes.total() + rounding(problem.graph)
        raise HostError(
            f"The second memory has room for {exact_bytes(host.budget)}, and {exact_bytes(sizes.total())} are at home "
            f"there: {parts}. Say host_budget={least:_} at least, where that is free; more for values to wait there."
        )
    if updates.sums is not None:
        updates.sums.at_home.update(held.parameter for held in updates.sums.held if is_at_home(held))
    profile = replace(problem.profile, resident_bytes=problem.resident - extra)
    host = replace(host, budget=host.budget - extra)
    return replace(problem, profile=profile, host=host).with_homes(codegen.homes)


def problem_of(
    joint: Joint,
    source: Source,
    memory: SecondMemory | None,
    homes: Callable[[Joint], frozenset[int]] = lambda joint: frozenset(),
    *,
    tried: bool,
) -> Problem:
    """The problem of a captured step, with measured or estimated ops, in the order with the lower floor.

    Args:
        memory: a second one, in which its values may wait.
        homes: gives the values that are at home there, whose bytes count as resident here all the same.
    """
    order = late_results(joint.graph)
    joint = joint if order is None else joint.in_order(order)
    costs = profile_of(joint, source)
    costs = costs if tried else tried_here(joint, costs)
    if memory is None:
        return Problem(joint.graph, costs, Codegen(joint))
    codegen = Codegen(joint, memory.begin, homes(joint))
    home_values = (v for v in codegen.homes if v not in joint.held or is_there(joint.held[v]))
    host = memory.host(joint.graph, sum(joint.graph.values[v].size_bytes for v in home_values))
    return Problem(joint.graph, costs, codegen, host=host)


def at_other_sizes(joint: Joint, problem: Problem, source: Source) -> Problem | None:
    """The problem of a step at other sizes than those of a known one; None if it has other ops or another order."""
    then = joint_of(problem)
    if len(joint.graph.ops) != len(then.graph.ops):
        return None
    # The same nodes have the same names; of another capture they come in the same order where the sizes are the same.
    place = {op.name: k for k, op in enumerate(joint.graph.ops)}
    is_same = place.keys() == {op.name for op in then.graph.ops}
    order = [place[op.name] for op in then.graph.ops] if is_same else late_results(joint.graph)
    joint = joint if order is None or order == sorted(order) else joint.in_order(order)
    joint = replace(joint, graph=joint.graph.sharing(then.graph))
    ops, before = joint.graph.ops, then.graph.ops
    if ops is not before and [*map(_alike, ops)] != [*map(_alike, before)]:
        return None
    if isinstance(source, Measure):
        profile = profile_at(joint, then, problem.profile, cache=source.cache)
    else:
        profile = profile_of(joint, source)
    resident = problem.resident - then.resident_bytes + joint.resident_bytes
    profile = replace(profile, resident_bytes=resident, state_bytes=problem.profile.state_bytes)
    return replace(problem, graph=joint.graph, profile=profile, codegen=Codegen(joint))


def _alike(op: Op) -> tuple[Any, ...]:
    return op.target, op.inputs, op.outputs, op.phase, op.pinned is None, op.overwrites, op.link


def step_name(reach: Any, optimizers: Iterable[torch.optim.Optimizer] = ()) -> str:
    """The name of a step: the classes of its modules with parameters, else its function, and its optimizers.

    Args:
        reach: the function, its arguments and its keywords; empty: the step is unknown.
    """
    if not reach:
        return ""
    fn, args, _ = reach
    modules = [fn] if isinstance(fn, torch.nn.Module) else modules_within((fn, args))
    kinds = [type(module).__name__ for module in modules if next(module.parameters(), None) is not None]
    step = " and ".join(dict.fromkeys(kinds)) or getattr(fn, "__name__", type(fn).__name__)
    return " with ".join([step, *dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)])


def unread_bytes(reach: Any, inputs: Iterable[Any], device: torch.device, block_bytes: int) -> int:
    """Bytes of tensors on its device that a step holds and its graph does not take, each storage once."""

    def storages(tensors: Iterable[Any]) -> dict[int, int]:
        dense = [t for t in map(local, tensors) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
        dense = [t for t in dense if t.device.type in (device.type, "meta")]
        return {storage(t): t.untyped_storage().nbytes() for t in dense}

    read = storages(inputs)
    sizes = [size for key, size in storages(tensors_within(reach)).items() if key not in read]
    return sum(as_allocated(size, block_bytes) for size in sizes)


def guard_bytes(plan: Solution, guards: DataGuards, inputs: list[Any], limit: int) -> int:
    """Measure the bytes of the guards before the step, beside resident ones; refuse them above the limit."""
    device, graph = main_device(inputs), plan.problem.graph
    numbers = [graph.values[v].size_bytes for op in graph.ops if op.name == NUMBERS for v in op.outputs]  # at each call
    taken = sum(numbers) + aside(partial(measure_peak, partial(guards.before, inputs), device)).peak
    peak = plan.problem.resident + taken
    if peak > limit:
        places = ", ".join(dict.fromkeys(guards.places))
        raise Unsupported(
            f"{places}: the step asks for the value of a tensor, which is found out before the step runs. "
            f"That takes {format_bytes(taken)}, with what is resident {format_bytes(peak)}, of a budget of "
            f"{format_bytes(limit)}. Ask outside of the step, and pass the answer in as a bool."
        )
    return taken


def with_guards(plan: Solution, taken: int) -> Solution:
    """The plan with the higher peak of two: its own or its guards'."""
    peak = plan.problem.resident + taken
    if plan.peak is None or peak <= plan.peak:
        return plan
    return replace(plan, peak=peak, details={**plan.details, "guard_bytes": taken})
