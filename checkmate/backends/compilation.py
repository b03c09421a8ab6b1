"""The `torch.compile` backend: each captured graph becomes a problem, a solution, and two modules that follow it.

On the main path, 3 of 16: see docs/idea.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.fx as fx

from checkmate.backends import ranks, step_problem
from checkmate.backends.cuda_blocks import Replays, plan_in_blocks
from checkmate.backends.plan_swap import SwappableCode, SwappablePlan, is_swappable
from checkmate.backends.planner import Planner
from checkmate.backends.static_memory import FirstStep, Lower, serving, within
from checkmate.capture.autocast import Copies, keeping_copies, refuse_products_within
from checkmate.capture.device import allocated_on, device_of
from checkmate.capture.guards import checking_guards, take_guards
from checkmate.capture.higher_order.bodies import put_regions_in_place
from checkmate.capture.higher_order.checkpoints import (
    refuse_other_draws,
    refuse_shared,
    warn_of_gradients,
    warn_of_second_writes,
)
from checkmate.capture.higher_order.fused_attention import compile_attention
from checkmate.capture.joint import Joint, read_joint
from checkmate.capture.loss.ladder import with_loss_in_parts
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.number_inputs import numbers_and_draws, refuse_nested, refuse_sizes_of_data
from checkmate.capture.op_order import TracedStep
from checkmate.capture.patches import (
    context_variables,
    ctc_lengths,
    logging_calls,
    numpy_draws,
    small_changes,
    transforms,
)
from checkmate.capture.patches.kernels import eager_kernels
from checkmate.capture.patches.leaves import refuse_lost_leaves
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.capture.patches.results import averages_by_count
from checkmate.capture.patches.results.strides import eager_strides
from checkmate.capture.patches.traced_ops import traced_since_now
from checkmate.capture.provenance import input_names, where
from checkmate.capture.rewrite import prepare
from checkmate.capture.sharded.shards import Shards, local
from checkmate.codegen import undefined_gradients
from checkmate.codegen.contributions import Arrival, Sharing, by_gradient, fan_out, lowered, noted_arrivals, sharing_of
from checkmate.codegen.refused_backwards import added_within, computed_from, refuse_views, refuse_watching
from checkmate.codegen.second_memory import SecondMemories
from checkmate.codegen.shared_copies import sharing_copies
from checkmate.codegen.writing_over import writing_over
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError, InfeasibleBudget, Unsupported
from checkmate.memory.arena import PHASES, Arena, Phase
from checkmate.memory.available import available
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.measure import Measure, forget
from checkmate.profiling.source import Source
from checkmate.profiling.trial import repeats, same_again, same_in_two
from checkmate.statusline import showing
from checkmate.tags import Noted, noting
from checkmate.torch_internals.aot import TracingContext, aot_autograd, functorch_config
from checkmate.torch_internals.inductor import inductor_config
from checkmate.updates.insert import Insert

MEASURE = Measure()
IN_PLACE = (  # once imported
    *(averages_by_count, context_variables, ctc_lengths, logging_calls, numpy_draws, small_changes, transforms),
)
_BY_CUDNN = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def run_generated_code(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Run the generated code unchanged."""
    return lowered(module, writing_over)


@dataclass(eq=False)
class Call:
    """The call for which a step is captured, and the results of the capture."""

    reach: Any = ()  # the function with its arguments: the budget counts all tensors in these
    numbers: Set[str] = frozenset()  # Dynamo's names of inputs that are no tensors
    check: Callable[[Joint], None] = lambda joint: None  # raises if the capture is wrong for such inputs
    answers: tuple[bool | int, ...] = ()  # to what the step asks of its tensors, in order


@dataclass(eq=False)
class Backend:
    """Compile each graph that `torch.compile` captures by a plan; a graph without gradients runs plainly."""

    planner: Planner | Callable[[Problem], Solution]  # the latter knows of no budget
    lower: Lower = run_generated_code  # makes of a module and its inputs the function that runs
    profile: Source = MEASURE  # of the costs of ops
    new_arena: Callable[[], Arena | None] = lambda: None  # for a graph that is captured; None: PyTorch's allocator
    updates: Insert | None = None  # of parameters, that are part of the step
    second_memories: SecondMemories | None = None  # where values may wait
    overlap: bool = False  # collectives may go on beside ops

    running: list[SwappablePlan] = field(default_factory=list)  # the training graphs, in the order of capture
    arenas: WeakSet[Arena] = field(default_factory=WeakSet)  # of the graphs whose code is kept
    answer: Answer = field(default_factory=Answer)  # to captured code that asks whether it is compiled
    call: Call = field(default_factory=Call)  # for which is captured now

    @property
    def block_bytes(self) -> int:
        """The allocator's block size of a device that costs are estimated for; 1 for the step's own device."""
        return self.profile.block_bytes if isinstance(self.profile, Device) else 1

    @property
    def plans(self) -> list[Solution]:
        """The `Solution` by which each captured training graph runs now, in the order of capture."""
        return [one.plan for one in self.running]

    @property
    def measures(self) -> bool:
        """Tell whether ops are measured on this machine, where the step then runs."""
        return isinstance(self.profile, Measure)

    def limit(self, plan: Solution) -> int:
        """The bytes that a running step may take; its plan may leave some of them to its guards."""
        return self.planner.budget if isinstance(self.planner, Planner) else plan.budget

    @contextmanager
    def capturing(self, call: Call) -> Iterator[None]:
        """Capture a function for a call within the block."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def forget(self, running: list[SwappablePlan]) -> None:
        """Drop some graphs, and end the searches for their plans."""
        for one in running:
            one.end()
        self.running[:] = [one for one in self.running if one not in running]

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """Compile a captured graph, as `torch.compile` asks for it."""
        with showing(traced_since_now("tracing")):
            return _Compilation(self, module, inputs).function()


class _Compilation:
    """A captured graph on its way to a function: checked, traced, planned, written, wrapped.

    AOTAutograd calls `_partition` with the traced graph of forward and backward, and `_lower` with each of the two
    modules that this gives it.
    """

    def __init__(self, backend: Backend, module: fx.GraphModule, inputs: list[Any]) -> None:
        self.backend, self.call, self.module, self.inputs = backend, backend.call, module, inputs
        put_regions_in_place(module)
        self.guards, self.names = take_guards(module), input_names(module)
        self.call.answers = self.guards.answers
        # Refuse code that would be traced as something else.
        _refuse_inexact(module)
        refuse_nested(self.names, inputs)
        refuse_sizes_of_data(module)
        refuse_lost_leaves(module, inputs)
        refuse_products_within(module)
        refuse_other_draws(module)
        refuse_shared(module, self.names)
        warn_of_gradients(module.graph)
        for name, tensor in zip(self.names, inputs, strict=True):
            if backend.measures and is_fake(tensor):
                raise Unsupported(
                    f"{name} is a fake tensor or on the meta device: with no data, nothing can run and be measured. "
                    'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
                )
        # Read what it is given.
        self.numbers, self.draws = numbers_and_draws(module, self.call.numbers)
        self.known = [*inputs, *module.parameters(), *module.buffers()]  # tensors that it is given, or holds
        self.copies = Copies(module, inputs, self.names)  # of weights, that autocast keeps
        self.shards = Shards.among(inputs)
        self.memory = backend.new_arena()  # serves the step; None: PyTorch's allocator
        if self.memory is not None:
            backend.arenas.add(self.memory)
        self.arrived: list[list[Arrival]] = []  # gradients, of each graph that is traced
        self.noted: Noted = []  # tags of the step
        # Found by `_partition`, if there is anything to plan.
        self.unreached: list[int] = []  # inputs that are never differentiated
        self.watches = list[Callable[..., None]]()  # refuse in a backward what plain PyTorch would do otherwise
        self.sharing = Sharing()
        self.running: SwappablePlan | None = None  # by which plan; None: nothing was planned
        self.first: FirstStep | None = None  # compared with the plan; None if costs were not measured here
        self.code: SwappableCode | None = None  # code that a better plan may replace
        self.search_on: Callable[..., None] | None = None  # begins to look for that plan

    def function(self) -> Callable[..., Any]:
        """Trace and plan the graph, and give the function that `torch.compile` calls for it."""
        backend, guards = self.backend, self.guards
        # Trace, partition and compile it by AOTAutograd, with the ops and bits of eager PyTorch.
        compile_graph = aot_autograd(
            fw_compiler=partial(self._lower, "forward"),
            bw_compiler=partial(self._lower, "backward"),
            inference_compiler=backend.lower,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )
        with (
            transforms.closing_levels(),
            eager_kernels(self.module),
            eager_strides(),
            keeping_copies(),
            inductor_config.patch(fallback_random=True),  # keeps random ops that nobody reads
            functorch_config.patch(backward_pass_autocast="off"),
            noted_arrivals() as self.arrived,
            noting() as self.noted,
        ):
            run = self.shards.around(compile_graph(self.module, self.shards.take_apart(self.module, self.inputs)))
        # Its guards run before it, within the same budget.
        running, search_on = self.running, self.search_on
        self.running = self.search_on = None  # they hold this object: a backend that is dropped is to be gone at once
        taken = 0
        if guards.answers and backend.measures and running is not None:
            taken = step_problem.guard_bytes(running.plan, guards, self.inputs, backend.limit(running.plan))
            running.plan = step_problem.with_guards(running.plan, taken)
        # Around each call, from the inside out.
        run = fan_out(undefined_gradients.leave_unreached(run, self.unreached), self.sharing)
        is_generated = backend.lower is run_generated_code
        nones = [partial(undefined_gradients.keep_undefined, set[type]())] if is_generated else []
        run = undefined_gradients.watched(run, *nones, *self.watches)
        if running is not None and search_on is not None:
            search_on(taken=taken)
            run = running.around(run)
        if running is not None:
            run = ranks.keeping_step(run, running.plan)
        # AOTAutograd keeps `_lower`, and so this object: it must not keep the caller's module and batch alive.
        del self.call, self.module, self.inputs, self.known
        return checking_guards(sharing_copies(run, self.copies), guards)

    def _lower(self, phase: Phase, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Make the function of one of the first plan's two modules."""
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            context.fw_metadata.bw_donated_idxs = []  # no saved tensor is reused: the backward may run twice
        run = within(self.memory, phase, self.backend.lower)(module, inputs)
        run = run if self.first is None else self.first.around(phase, run)
        return run if self.code is None else self.code.first(phase, run)

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
        backend, graph, results = self.backend, module.graph, num_fwd_outputs
        static, device = static_lifetime_input_indices or (), device_of(graph)
        fakes = any(map(is_fake, map(local, self.known)))
        block_bytes = max(backend.block_bytes, kind_of(device).block_bytes)
        for_this_cpu = backend.block_bytes == 1  # else it is planned for a GPU

        # Gradients that autograd sums and passes in, as in eager PyTorch.
        warn_of_second_writes(graph)
        last = self.arrived[-1] if self.arrived else ()  # to measure ops may differentiate, too
        arrived = by_gradient(last, [*graph.output_node().args[0]][results:])  # type: ignore[misc]
        undefined_gradients.drop_gradients_of_writes(module, self.known)
        self.copies.find(module.graph)
        self.shards.refuse_converted(module.graph, self.copies.kept, self.names)
        self.shards.join_exchanges(module.graph, static, overlap=backend.overlap)
        self.unreached = undefined_gradients.unreached(module, results)
        updates = None if backend.updates is None else backend.updates.updates
        if backend.updates is not None:
            backend.updates(module, self.known, results, self.names)
        self.watches = [
            partial(refuse_views, added_within(module.graph, results)),
            partial(refuse_watching, computed_from(module.graph, results)),
        ]

        # The ops and values of the graph.
        prepare(
            module.graph,
            on_cpu=for_this_cpu,
            in_two=None if device.type == "cpu" or fakes else same_in_two,
            again=None if fakes else same_again,
            repeats=None if fakes else repeats,
        )
        if not fakes:
            compile_attention(module.graph)
        names, numbers, draws, noted = self.names, self.numbers, self.draws, self.noted
        parameters = [i for i, tensor in enumerate(self.known) if isinstance(tensor, torch.nn.Parameter)]

        def read(module: fx.GraphModule) -> Joint:  # without `self`: the problem keeps this
            step = TracedStep(module, results, static, names, numbers, draws, parameters)
            return read_joint(step, block_bytes=block_bytes, noted=noted)

        joint = read(module)
        if self.numbers:
            self.call.check(joint)

        # Its problem, with all that is in memory beside it.
        reach = (self.call.reach, updates and updates.reach)
        made = 0 if updates is None else updates.held_bytes  # by the first step, and held from then on
        unread = made + step_problem.unread_bytes(reach, self.known, device, block_bytes)
        allocated = None if fakes else allocated_on(device)
        limit = self._find_budget(module.graph, device, fakes=fakes)
        second_memory = None if backend.second_memories is None else backend.second_memories.on(device)

        name = step_problem.step_name(self.call.reach, () if updates is None else updates.optimizers)

        def pose(joint: Joint) -> Problem:
            problem = step_problem.problem_of(joint, backend.profile, second_memory, tried=fakes or backend.measures)
            problem = step_problem.with_what_is_held(problem, allocated, unread=unread, state=made)
            return replace(problem, name=name)

        problem = with_loss_in_parts(pose(joint), module, read, pose, tried=for_this_cpu and not fakes)

        # Its plan.
        replays = Replays.now(device, limit) if limit and not fakes else None
        planner = backend.planner
        if isinstance(planner, Planner):
            find = partial(planner.plan, go_on=is_swappable(joint))
            try:
                plan = find(problem) if replays is None else plan_in_blocks(find, problem, replays)
            except InfeasibleBudget as error:
                raise planner.explained(error) from None
        else:
            plan = planner(problem)

        # The modules of the plan, and of any that may take over. What goes on then holds no backend, which is gone as
        # soon as it is dropped.
        modules, lower = plan.modules, backend.lower
        share = partial(sharing_of, arrived, results, names, self.shards.layouts)
        arena = self.memory = serving(self.memory, plan, device)
        running = self.running = SwappablePlan(plan)
        backend.running.append(running)

        def write(plan: Solution) -> tuple[Any, Any] | None:
            if replays is not None:
                replays.check(plan)
            modules = plan.modules
            if share(modules) != sharing:
                return None
            forward, backward = (within(serving(arena, plan, device), phase, lower) for phase in PHASES)
            return forward(modules.forward, []), backward(modules.backward, [])

        sharing = self.sharing = share(modules)
        if not fakes and isinstance(backend.profile, Measure) and backend.profile.cache:
            self.first = FirstStep(plan, device, made, partial(forget, step_problem.joint_of(plan.problem)))
            if arena is not None:
                arena.took = self.first.took
        if plan.rest is not None:
            self.code = SwappableCode(results)
            self.search_on = partial(running.go_on, plan.rest, self.code, write)
        return modules.forward, modules.backward

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

        states = [] if updates is None else [[*of.values()] for o in updates.optimizers for of in o.state.values()]
        held = bytes_of(self.known, self.call.reach, updates and updates.reach, states)
        there = available(device, held, in_arena=self.memory is not None, sharing=ranks.sharing_machine())
        exchange = None if updates is None else updates.exchange
        least = partial(ranks.least, graph=graph, exchange=exchange, device=device)
        trained = (t for t in self.known if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad)
        planner.find_budget(there, least, 2 * bytes_of(*trained) if updates is None else 0)
        return planner.budget


def _refuse_inexact(module: fx.GraphModule) -> None:
    """Refuse ops that tracing gets wrong: other kernels or generators, and some writes to lists of tensors."""
    for node in module.graph.nodes:
        if getattr(getattr(node.target, "f", None), "__module__", "") == "torch._numpy.random":
            raise Unsupported(
                f"{where(node)}: a draw from NumPy's global generator is captured as one from torch's. "
                "Draw with torch, or draw outside and pass the numbers in as a tensor."
            )
        if node.target in _BY_CUDNN and node.args[0].meta["example_value"].is_cuda:
            raise Unsupported(
                f"{where(node)}: on a GPU {node.target.__name__} is a kernel of cuDNN, which cannot be captured. "
                "Call nn.LSTMCell, nn.GRUCell or nn.RNNCell once for each step of the sequence."
            )
        name = getattr(node.target, "__name__", node.target)
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dtype is torch.complex32 and not value.is_contiguous():
            raise Unsupported(
                f"{where(node)}: a tensor of torch.complex32 that is not contiguous has gradients with other last "
                "bits. Call .contiguous() on it, or compute in complex64."
            )
        if name == "ormqr" and (made := node.meta["example_value"]).is_complex() and made.requires_grad:
            raise Unsupported(
                f"{where(node)}: the gradient of torch.ormqr of complex numbers is traced by a formula with other last "
                "bits. Multiply by torch.linalg.householder_product(a, tau), which is the matrix that it multiplies by."
            )
        if not re.fullmatch(r"_foreach_\w+_", name):
            continue
        written: Any = node.args[0] if node.args else node.kwargs["self"]
        if len({*written}) < len(written):
            raise Unsupported(
                f"{where(node)}: {name} writes to one tensor more than once, of which tracing keeps the last write "
                "only. Call it once for each write."
            )
        tensors = [n.meta["example_value"] for n in written]
        if any(tensor._base is not None and tensor.requires_grad for tensor in tensors):
            raise Unsupported(
                f"{where(node)}: {name} writes to a view of a tensor, and tracing loses the gradient of that. "
                "Write to the whole tensor, or call the op of one tensor for each."
            )
