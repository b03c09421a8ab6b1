"""The `torch.compile` backend: each captured graph becomes a problem, a solution, and two modules that follow it.

On the main path, 3 of 16: see docs/idea.md.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from checkmate.backends import ranks, step_problem
from checkmate.backends.other_sizes import Earlier, Reading, SizedPlans
from checkmate.backends.passes import CHECKS, GRADIENT_REWRITES, REWRITES, JointGraph, OpGraph
from checkmate.backends.plan_swap import SwappableCode, SwappablePlan, is_swappable
from checkmate.backends.planner import Planner
from checkmate.backends.static_memory import FirstStep, Lower, Replays, plan_in_blocks, serving, within
from checkmate.backends.step_problem import Codegen
from checkmate.capture.around import Around, surrounded
from checkmate.capture.autocast import Copies, keeping_copies
from checkmate.capture.device import allocated_on, device_of
from checkmate.capture.fusion.compiling import begin, can_compile
from checkmate.capture.fusion.kernels import Kernel, Kernels
from checkmate.capture.fusion.write import fuse
from checkmate.capture.guards import take_guards
from checkmate.capture.higher_order.bodies import put_regions_in_place
from checkmate.capture.joint import Joint, read_joint
from checkmate.capture.loss.ladder import with_loss_in_parts
from checkmate.capture.meta_tensors import Descriptions, is_fake
from checkmate.capture.nodes import is_collective, storage
from checkmate.capture.number_inputs import NotFree, number_placeholders, numbers_and_draws
from checkmate.capture.op_order import TracedStep
from checkmate.capture.patches import ctc_lengths, python_calls, small_changes  # noqa: F401
from checkmate.capture.patches.kernels import eager_kernels, value_of
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.capture.patches.results import averages_by_count  # noqa: F401  # this and the three above change PyTorch once imported
from checkmate.capture.patches.results.strides import eager_strides
from checkmate.capture.patches.traced_ops import traced_since_now
from checkmate.capture.patches.transforms import closing_levels
from checkmate.capture.provenance import input_names
from checkmate.capture.rewrite import states_kept
from checkmate.capture.sharded.shards import Shards, local
from checkmate.capture.sizes import Sizes, fixed_at, open_sizes, symbols_of
from checkmate.codegen.boxed import ANEW
from checkmate.codegen.contributions import Arrival, FanOut, Sharing, by_gradient, lowered, noted_arrivals, sharing_of
from checkmate.codegen.emit import Modules
from checkmate.codegen.refused_backwards import SharedCopies
from checkmate.codegen.second_memory import SecondMemories, SecondMemory
from checkmate.codegen.undefined_gradients import Unreached, Watches, keep_undefined
from checkmate.codegen.writing_over import prepare, writing_over
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError, HostError, InfeasibleBudget, Unsupported
from checkmate.host import home_of, is_stand_in
from checkmate.memory.arena import PHASES, Arena, Phase
from checkmate.memory.available import available
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.measure import Measure, forget
from checkmate.profiling.source import Source
from checkmate.profiling.trial import runs_well
from checkmate.statusline import showing
from checkmate.tags import Noted, noting
from checkmate.torch_internals.capturing import (
    TracingContext,
    _is_primal,
    aot_autograd,
    functorch_config,
    inductor_config,
)
from checkmate.units import format_bytes
from checkmate.updates.insert import Insert

log = logging.getLogger("checkmate.backend")
MEASURE = Measure()
_ALL_HERE = (
    "The model is in a file, and the step has no second memory: with host='file:/the/folder' and host_budget= its "
    "parameters and states are in memory only while the step needs them."
)
_NONE_THERE = (
    "No parameter is at home in the second memory: checkmate.in_file(model, '/the/folder') has a model there, and "
    "device= one that is on the CPU."
)


def run_generated_code(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Run the generated code unchanged."""
    return lowered(module, writing_over)


@dataclass(frozen=True, eq=False)
class Call:
    """The call for which a step is captured."""

    reach: Any = ()  # the function with its arguments: the budget counts all tensors in these
    numbers: Set[str] = frozenset()  # Dynamo's names of inputs that are no tensors
    check: Callable[[Joint], None] = lambda joint: None  # raises if the capture is wrong for such inputs
    earlier: Sequence[Earlier] = ()  # captures, of one of which some sizes become inputs
    poses: bool = False  # its problems are asked for, and no plan


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured graph, compiled."""

    run: Callable[..., Any]  # what Dynamo calls
    answers: tuple[bool | int, ...] = ()  # to what it asks of its tensors, in order: its guards
    training: SwappablePlan | SizedPlans | None = (
        None  # by which it runs; None: it needs no gradient, and is not planned
    )
    arena: Arena | None = None  # serves it; None: PyTorch's allocator
    single: Callable[[], Joint] | None = (
        None  # the step without groups, at the sizes of its first plan; None: as planned
    )


@dataclass(frozen=True, eq=False)
class Backend:
    """The way to plan and compile the graphs of a step; a graph without gradients runs plainly."""

    planner: Planner | Callable[[Problem], Solution]  # the latter knows of no budget
    lower: Lower = run_generated_code  # makes of a module and its inputs the function that runs
    profile: Source = MEASURE  # of the costs of ops
    new_arena: Callable[[], Arena | None] = lambda: None  # for a graph that is captured; None: PyTorch's allocator
    updates: Insert | None = None  # of parameters, that are part of the step
    second_memories: SecondMemories | None = None  # where values may wait
    overlap: bool = False  # collectives may go on beside ops
    kernels: Kernels = "eager"  # of groups of ops
    op_by_op: set[str] = field(default_factory=set)  # keys of kernels in the way of a budget
    answer: Answer = field(default_factory=Answer)  # to captured code that asks whether it is compiled

    @property
    def block_bytes(self) -> int:
        """The allocator's block size of a device that costs are estimated for; 1 for the step's own device."""
        return self.profile.block_bytes if isinstance(self.profile, Device) else 1

    @property
    def measures(self) -> bool:
        """Tell whether ops are measured on this machine, where the step then runs."""
        return isinstance(self.profile, Measure)

    def limit(self, plan: Solution) -> int:
        """The bytes that a running step may take; its plan may leave some of them to its guards."""
        return self.planner.budget if isinstance(self.planner, Planner) else plan.budget

    def compile(self, module: fx.GraphModule, inputs: list[Any], call: Call | None = None) -> CapturedStep:
        """Compile a graph that Dynamo captured for a call."""
        with showing(traced_since_now("tracing")):
            return _Compilation(self, module, inputs, call or Call()).compiled()


class _Read(Exception):
    """Raised in place of planning a graph whose problems are asked for, with its `Reading`."""


def _written(codegen: Any, plan: Any, share: Callable[[Modules], Any], phase: Phase) -> fx.GraphModule:
    """Write a module of a plan again."""
    modules: Modules = codegen(plan)
    share(modules)
    return modules.forward if phase == "forward" else modules.backward


class _Lowering:
    """Makes the functions of the first plan's two modules, for AOTAutograd, which keeps this object."""

    def __init__(self, lower: Lower, arena: Arena | None) -> None:
        self.lower, self.arena = lower, arena
        self.first: FirstStep | None = None  # compared with the plan; None if costs were not measured here
        self.code: SwappableCode | None = None  # code that a better plan may replace

    def __call__(self, phase: Phase, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # no saved tensor is reused: the backward may run twice
        run = within(self.arena, phase, self.lower)(module, inputs)
        run = run if self.first is None else self.first.around(phase, run)
        return run if self.code is None else self.code.first(phase, run)


class _Compilation:
    """A captured graph on its way to a `CapturedStep`: checked, traced, rewritten, planned, written.

    AOTAutograd calls `_partition` with the traced graph of forward and backward.
    """

    def __init__(self, backend: Backend, module: fx.GraphModule, inputs: list[Any], call: Call) -> None:
        put_regions_in_place(module)
        self.guards, names = take_guards(module), input_names(module)
        for check in CHECKS:
            check(module, inputs, names, backend.measures)
        self.backend, self.call, self.module, self.inputs = backend, call, module, inputs
        self.numbers, self.draws = numbers_and_draws(module, call.numbers)
        self.known = [*inputs, *module.parameters(), *module.buffers()]  # tensors that it is given, or holds
        self.names, self.copies, self.shards = names, Copies(module, inputs, names), Shards.among(inputs)
        self.arena = backend.new_arena()
        self.lowering = _Lowering(backend.lower, self.arena)
        self.arrived: list[list[Arrival]] = []  # gradients, of each graph that is traced
        self.noted: Noted = []  # tags of the step
        # Set by `_partition`, if there is anything to plan.
        self.joint: JointGraph | None = None
        self.sharing = Sharing()
        self.training: SwappablePlan | SizedPlans | None = None
        self.plan: Solution | None = None  # for the sizes of this call
        self.single: Callable[[], Joint] | None = None  # the step without groups, if it has some
        self.search_on: Callable[..., None] | None = None  # begins to look for a better plan

    def compiled(self) -> CapturedStep:
        """Trace and plan the graph, and give the compiled step."""
        backend, guards, reference = self.backend, self.guards, weakref.ref(self)  # AOTAutograd keeps what it is given
        # Trace, partition and compile it by AOTAutograd, with the ops and bits of eager PyTorch.
        compile_graph = aot_autograd(
            fw_compiler=partial(self.lowering, "forward"),
            bw_compiler=partial(self.lowering, "backward"),
            inference_compiler=backend.lower,
            partition_fn=lambda *args, **options: reference()._partition(*args, **options),  # type: ignore[union-attr]
            keep_inference_input_mutations=True,
        )
        with (
            closing_levels(),
            eager_kernels(self.module),
            eager_strides(),
            keeping_copies(),
            inductor_config.patch(fallback_random=True),  # keeps random ops that nobody reads
            functorch_config.patch(backward_pass_autocast="off"),
            noted_arrivals() as self.arrived,
            noting() as self.noted,
        ):
            try:
                run = compile_graph(self.module, self.shards.take_apart(self.module, self.inputs))
            except _Read as read:
                return CapturedStep(surrounded(read.args[0].hand_over, [guards]), guards.answers)
        if self.joint is None and any(map(is_stand_in, self.known)):
            raise Unsupported(
                "The step computes nothing that needs a gradient, so there is no plan by which parameters that are at "
                "home on the CPU would come to the device."
            )
        # Its guards run before it, within the same budget.
        training, taken = self.training, 0
        if guards.answers and backend.measures and self.plan is not None:
            inputs = [*map(value_of, self.inputs)]
            taken = step_problem.guard_bytes(self.plan, guards, inputs, backend.limit(self.plan))
            if isinstance(training, SwappablePlan):
                training.plan = step_problem.with_guards(training.plan, taken)
        if self.search_on is not None:
            self.search_on(taken=taken)
        return CapturedStep(surrounded(run, [*self._around()]), guards.answers, training, self.arena, self.single)

    def _around(self) -> Iterator[Around]:
        """List the parts around each call, from the outside in."""
        yield Descriptions(self.module)
        if self.guards.answers:
            yield self.guards
        if any(self.copies.kept):
            yield SharedCopies(self.copies)
        if self.training is not None and (exchanges := ranks.SameExchanges(self.training.plan)).numbers:
            yield exchanges
        if self.training is not None and self.search_on is not None:
            yield self.training
        watches = [] if self.joint is None else [*self.joint.watches]
        if self.backend.lower is run_generated_code:
            watches.insert(0, partial(keep_undefined, set[type]()))
        if watches:
            yield Watches(*watches)
        if self.sharing.apart or self.sharing.together:
            yield FanOut(self.sharing)
        if self.joint is not None and self.joint.unreached:
            yield Unreached(self.joint.unreached)
        if self.shards.layouts:
            yield self.shards

    def _partition(
        self,
        module: fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph of forward and backward, and write the two modules of the plan."""
        backend, results, static = self.backend, num_fwd_outputs, static_lifetime_input_indices or ()
        device = device_of(module.graph)
        fakes = any(map(is_fake, map(local, self.known)))
        block_bytes = max(backend.block_bytes, kind_of(device).block_bytes)
        for_this_cpu = backend.block_bytes == 1  # else it is planned for a GPU

        # Rewrite the graph.
        last = self.arrived[-1] if self.arrived else ()  # to measure ops may differentiate, too
        arrived = by_gradient(last, [*module.graph.output_node().args[0]][results:])  # type: ignore[misc]
        joint_graph = self.joint = JointGraph(
            *(module, results, static, self.known, self.names, self.copies, self.shards),
            updates=backend.updates,
            overlap=backend.overlap,
        )
        for rewrite in GRADIENT_REWRITES:
            rewrite(joint_graph)
        is_open = bool((self.call.earlier or self.call.poses) and symbols_of(module.graph))
        free = number_placeholders(module.graph, self.numbers)

        def rewrite_ops(module: fx.GraphModule, states: Collection[str] | None = None) -> fx.GraphModule:
            graph = OpGraph(module, device, has_data=not fakes, on_cpu=for_this_cpu, states=states)
            for rewrite in REWRITES:
                rewrite(graph)
            return module

        is_fused = backend.kernels != "eager" and (fakes or can_compile(device))
        same_bits, op_by_op = backend.kernels == "same-bits", backend.op_by_op
        groups: dict[str, Any] = {}  # at whatever sizes

        def compile_ahead(kernels: Iterable[Kernel], *, variants: bool = False) -> None:
            if device.type == "cpu" and not fakes:
                begin(task for kernel in kernels for task in kernel.tasks(variants=variants))

        def fused(module: fx.GraphModule, sizes: Sizes = ()) -> fx.GraphModule:
            trial = partial(runs_well, same_bits=same_bits, sizes=sizes, anew=poses)
            module = fx.GraphModule(module, deepcopy(module.graph))
            fuse(
                *(module, traced, (lambda node: True) if fakes else trial),
                ahead=(lambda kernels: None) if sizes else compile_ahead,
                reductions=not same_bits,
                alone={storage(tensor) for tensor, _ in noted},
                op_by_op=op_by_op,
                decided=groups if sizes else None,
            )
            if not sizes:  # of open sizes a variant is compiled once it is tried
                compile_ahead((n.target for n in module.graph.nodes if isinstance(n.target, Kernel)), variants=True)
            return module

        updates = None if backend.updates is None else backend.updates.updates

        names, numbers, draws, noted, poses = self.names, self.numbers, self.draws, self.noted, self.call.poses
        parameters = [i for i, tensor in enumerate(self.known) if isinstance(tensor, torch.nn.Parameter)]

        def traced(module: fx.GraphModule) -> TracedStep:  # without `self`: the problem keeps this
            return TracedStep(module, results, static, names, numbers, draws, parameters)

        def read(module: fx.GraphModule) -> Joint:
            return read_joint(traced(module), block_bytes=block_bytes, noted=noted)

        # All that is in memory beside it.
        update_bytes = 0 if updates is None else updates.held_bytes  # made by the first step, and held from then on
        held = self.known[len(self.inputs) :]

        def in_all(inputs: Sequence[Any], reach: Any) -> Callable[[int], int]:
            reach = (reach, updates and updates.reach)
            unread = update_bytes + step_problem.unread_bytes(reach, [*inputs, *held], device, block_bytes)
            allocated = 0 if fakes else allocated_on(device) or 0
            beside = step_problem.bytes_elsewhere([*inputs, *held], updates) if allocated else 0
            return lambda read: max(read + unread, allocated + beside)

        total_bytes = in_all(self.inputs, self.call.reach)
        limit = self._find_budget(module.graph, device, fakes=fakes)
        second_memory = None if backend.second_memories is None else backend.second_memories.on(device)
        if second_memory is not None and not second_memory.budget and ranks.train_together():
            raise HostError('Ranks share a plan: say how many bytes each may take there, host_budget="10 GB".')
        name = step_problem.step_name(self.call.reach, () if updates is None else updates.optimizers)
        source, is_tried = backend.profile, fakes or backend.measures
        tensors = enumerate(self.known if updates is not None else ())
        away = {i: is_stand_in(t) for i, t in tensors if isinstance(t, torch.Tensor) and home_of(t) is not None}
        homes = partial(step_problem.homes_of, away=away)

        def pose(joint: Joint, in_all: Callable[[int], int] = total_bytes) -> Problem:
            problem = step_problem.problem_of(joint, source, second_memory, homes, tried=is_tried)
            # All bytes in use on the device count: what the graph reads, what else the step holds, and other models.
            read = problem.resident - problem.graph.state_bytes  # states count as made
            profile = replace(problem.profile, resident_bytes=in_all(read), state_bytes=update_bytes)
            problem = replace(problem, profile=profile, name=name)
            return problem if updates is None else step_problem.with_homes(problem, updates)

        def split(
            problem: Problem,
            module: fx.GraphModule,
            pose: Callable[[Joint], Problem] = pose,
            splits: Collection[str] = (),
        ) -> Problem:
            tried = for_this_cpu and not fakes
            return with_loss_in_parts(problem, module, read, pose, tried=tried, known=splits)

        replays = Replays.now(device, limit) if limit and not fakes else None
        planner, lower = backend.planner, backend.lower

        def find(problem: Problem, plans: Sequence[Solution] = (), *, go_on: bool = True) -> Solution:
            if not isinstance(planner, Planner):
                return planner(problem)
            ask = partial(planner.plan, known=plans, go_on=go_on)
            try:
                return ask(problem) if replays is None else plan_in_blocks(ask, problem, replays)
            except InfeasibleBudget as error:
                words = [planner.source]
                if updates is not None and bool(away) == (second_memory is None):
                    words.append(_ALL_HERE if away else _NONE_THERE)
                raise (error.saying(" ".join(filter(None, words))) if any(words) else error) from None

        # The modules of the plan, and of any that may take over. What goes on then holds no backend, which is gone as
        # soon as it is dropped.
        share = partial(sharing_of, arrived, results, names, self.shards.layouts)

        def write(plan: Solution) -> tuple[Any, Any] | None:
            if replays is not None:
                replays.check(plan)
            modules = plan.modules
            assert code is not None
            if share(modules) != sharing or len(step_problem.joint_of(plan.problem).step.given_numbers) != code.numbers:
                return None
            for phase in PHASES if sized is not None else ():
                anew = partial(_written, plan.problem.codegen, plan.plan, share, phase)
                getattr(modules, phase).meta[ANEW] = anew
            prepare(modules.forward)
            prepare(modules.backward)
            runs = [
                within(serving(arena, plan, device), phase, lower)(module, [])
                for phase, module in zip(PHASES, (modules.forward, modules.backward), strict=True)
            ]
            if sized is not None and (first := first_step(plan)) is not None:
                runs = [first.around(phase, run) for phase, run in zip(PHASES, runs, strict=True)]
                if arena is not None:
                    arena.took_next = first.told
            return runs[0], runs[1]

        def first_step(plan: Solution) -> FirstStep | None:
            if fakes or not isinstance(source, Measure) or not source.cache:
                return None
            codegen = plan.problem.codegen
            assert isinstance(codegen, Codegen)
            return FirstStep(plan, device, update_bytes, lambda: forget(codegen.joint))

        code = sized = None
        places = open_sizes(module.graph, free) if is_open else {}
        reading = Reading(
            module, rewrite_ops, fused if is_fused else None, read, pose, split, source, in_all, tuple(places), free
        )
        if is_open or self.call.poses:
            self._refuse_sizes(module.graph, second_memory, fused=is_fused and backend.kernels == "fused" and not fakes)
        if not is_open and (self.call.poses or (self.call.earlier and free)):
            env = TracingContext.get().fake_mode.shape_env
            raise NotFree(f"PyTorch traces it for one size only: {fixed_at(env)}")
        if self.call.poses:
            raise _Read(reading)
        if not is_open:
            module = rewrite_ops(module)
            joint = single = read(module)
            if self.numbers:
                self.call.check(joint)
            if is_fused:
                joint, self.single = read(fused(module)), lambda: single
            problem = split(pose(joint), joint.module)
            while True:
                try:
                    plan = find(problem, go_on=is_swappable(joint))
                    break
                except InfeasibleBudget:
                    every = {*step_problem.kernels_of(joint).values()}
                    if not every:
                        raise
                # Let the ops of kernels that stand in the way run one by one: of one, then of two more, of four more.
                above = [] if ranks.train_together() else step_problem.kernels_above(problem, limit)
                kernels, count = (above, 1) if above else ([*every], len(every))
                while kernels:
                    op_by_op |= {*kernels[:count]}
                    joint = read(fused(module))
                    problem = split(pose(joint), joint.module)
                    kernels, count = step_problem.kernels_above(problem, limit), 2 * count
                log.info("within %s, groups of %d kinds run op by op", format_bytes(limit), len(op_by_op))
            self.training = alone = SwappablePlan(plan, problem if plan.problem.splits else None)
        else:
            # Its sizes are inputs: with those of an earlier capture it has to be what was captured then.
            sizes = tuple(places.values())
            assert isinstance(planner, Planner)
            earlier, then = reading.first_alike(self.call.earlier, sizes, self.guards.answers)
            joint = reading.joint(then)
            of_ops = reading.single(then) if is_fused else joint
            training, (first_plan, problems) = earlier.training.plans[0], earlier.known(joint, of_ops, reading)
            if first_plan is None:  # numbers that were no inputs then are handed in by an op: plan it as a first step
                then, joint = sizes, reading.joint(sizes)
                problems = [split(pose(joint), joint.module)]
                try:
                    training = SwappablePlan(find(problems[0]), problems[0])
                except InfeasibleBudget:
                    if not is_fused:
                        raise
                    joint = reading.single(sizes)
                    problems = [split(pose(joint), joint.module)]
                    training = SwappablePlan(find(problems[0]), problems[0])
                first_plan = training.plan
            reading = replace(reading, states=states_kept(joint.module.graph))
            code = SwappableCode(results, reading.places, sizes, len(joint.step.given_numbers))
            most = planner.options.max_plans
            self.training = sized = SizedPlans(
                reading, earlier, training, first_plan, problems, then, find, write, code, most
            )
            self.single = sized.single if is_fused else None
            if self.guards.answers and backend.measures:
                sized.guarding(self.guards, backend.limit(first_plan))
            at_once = None if then == sizes else sized.plan_at(sizes)
            plan = first_plan if at_once is None else at_once.plan
        self.plan, modules = plan, plan.modules
        if not fakes:
            prepare(modules.forward)
            prepare(modules.backward)
        if self.arena is not None and sized is not None:
            self.arena.lays_out = False
        arena = self.lowering.arena = serving(self.arena, plan, device)
        sharing = self.sharing = share(modules)
        self.lowering.first = first = first_step(plan)
        if arena is not None and first is not None and sized is None:
            arena.took = first.took
        elif arena is not None and first is not None:
            arena.took_next = first.told
        if sized is not None:
            self.lowering.code, self.search_on = code, partial(sized.begin, sizes, at_once)
        elif plan.rest is not None:
            self.lowering.code = code = SwappableCode(results, numbers=len(joint.step.given_numbers))
            self.search_on = partial(alone.go_on, plan.rest, code, write)
        return modules.forward, modules.backward

    def _refuse_sizes(self, graph: fx.Graph, second_memory: SecondMemory | None, *, fused: bool) -> None:
        """Raise `NotFree` for a capture that cannot have open sizes."""
        reasons = {
            "some of its tensors are tagged": self.noted,
            "sums of fused kernels may round otherwise at sizes that change": fused,
            "it exchanges with other ranks, which have to run the same plan": any(map(is_collective, graph.nodes)),
        }
        if self.call.poses:
            count = sum(map(_is_primal, graph.find_nodes(op="placeholder")))
            reasons["its inputs are not those of the call"] = self.shards.layouts or count != len(self.inputs)
        else:
            reasons |= {
                "a second memory is planned for fixed sizes": second_memory is not None,
                "its plans are not those of a budget": not isinstance(self.backend.planner, Planner),
            }
        if obstacles := [reason for reason, is_so in reasons.items() if is_so]:
            raise NotFree(obstacles[0])

    def _find_budget(self, graph: fx.Graph, device: torch.device, *, fakes: bool) -> int:
        """Find the bytes that the step may take, before anything is measured; 0 means any number."""
        backend, planner = self.backend, self.backend.planner
        if not isinstance(planner, Planner):
            return 0
        if planner.total:
            return planner.budget
        if fakes:
            raise BudgetError("Without data a step runs nowhere: name the bytes, such as budget='8 GB'.")
        # Free bytes of the device plus those that the step holds already; the least of all ranks.
        updates = None if backend.updates is None else backend.updates.updates

        def bytes_of(*reach: Any) -> int:
            return step_problem.unread_bytes(reach, (), device, backend.block_bytes)

        optimizers = () if updates is None else updates.optimizers
        states = [[*state.values()] for o in optimizers for state in o.state.values()]
        held = bytes_of(self.known, self.call.reach, updates and updates.reach, states)
        memory = available(device, held, in_arena=self.arena is not None, sharing=ranks.sharing_machine())
        exchange = None if updates is None else updates.exchange
        least = partial(ranks.least, graph=graph, exchange=exchange, device=device)
        leaves = (t for t in self.known if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad)
        planner.find_budget(memory, least, 2 * bytes_of(*leaves) if updates is None else 0)
        return planner.budget
