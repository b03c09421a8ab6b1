"""The `torch.compile` backend: each captured graph becomes a problem, a solution, and two modules that follow it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.fx as fx

from checkmate.backends import ranks
from checkmate.backends.cuda_blocks import Find, Replays, plan_in_blocks
from checkmate.backends.planner import Budget
from checkmate.backends.static_memory import FirstStep, serving, within
from checkmate.backends.step_problem import (
    asked_bytes,
    joint_of,
    problem_of,
    unread_bytes,
    with_asked,
    with_second_memory,
    with_what_is_held,
)
from checkmate.backends.taking_over import Running
from checkmate.capture.autocast import Copies, keeping_copies, refuse_products_within
from checkmate.capture.device import allocated_on, device_of
from checkmate.capture.higher_order.checkpoints import warn_of_gradients, warn_of_second_writes
from checkmate.capture.higher_order.fused_attention import compile_attention
from checkmate.capture.higher_order.regions import put_regions_in_place
from checkmate.capture.joint import Joint, read_joint
from checkmate.capture.loss.ladder import with_loss_in_parts
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.number_inputs import draws_of_python, refuse_nested, refuse_sizes_of_data, sources_of
from checkmate.capture.patches import context_variables, ctc_lengths, logging_calls, numpy_draws, small_changes
from checkmate.capture.patches.formulas import eager_formulas
from checkmate.capture.patches.kernels import eager_kernels
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.capture.patches.refused_leaves import refuse_lost_leaves
from checkmate.capture.patches.results import averages_by_count
from checkmate.capture.patches.results.strides import eager_strides
from checkmate.capture.provenance import input_names, where
from checkmate.capture.questions import asking_first, taken_out
from checkmate.capture.rewrite import prepare
from checkmate.capture.sharded.shards import Shards, local
from checkmate.codegen.contributions import Sharing, counted_contributions, fan_out, lowered, sharing_of
from checkmate.codegen.refused_backwards import added_within, computed_from, refuse_views, refuse_watching
from checkmate.codegen.replaceable_code import ReplaceableCode, may_change
from checkmate.codegen.second_memory import SecondMemories
from checkmate.codegen.shared_copies import sharing_copies
from checkmate.codegen.undefined_gradients import (
    drop_gradients_of_writes,
    keep_undefined,
    leave_unreached,
    unreached,
    watched,
)
from checkmate.codegen.writing_over import writing_over
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.devices import kind_of
from checkmate.errors import BudgetError, InfeasibleBudget, Unsupported
from checkmate.memory.arena import PHASES, Arena, Phase
from checkmate.memory.available import Available, available
from checkmate.profiling.data_sheets import Device
from checkmate.profiling.measure import Measure, forget
from checkmate.profiling.source import Source
from checkmate.profiling.trial import repeats, same_again, same_in_two
from checkmate.solvers.known_plans import UnfinishedSearch
from checkmate.statusline import showing
from checkmate.tags import Noted, noting
from checkmate.torch_internals.aot import TracingContext, aot_autograd, functorch_config
from checkmate.torch_internals.inductor import inductor_config
from checkmate.updates.insert import Insert

Lower = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
MEASURE = Measure()
IN_PLACE = averages_by_count, context_variables, ctc_lengths, logging_calls, numpy_draws, small_changes  # once imported
_BY_CUDNN = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def run_generated_code(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Run the generated code as it is."""
    return lowered(module, writing_over)


def _forbid_donation() -> None:
    """Tell AOTAutograd that the code now compiled reuses no saved tensors, so that the backward may run twice."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@dataclass(eq=False)
class Call:
    """The call for which a step is captured, and what came of it."""

    reach: Any = ()  # what is called, with its arguments: the budget counts all tensors in these
    numbers: Collection[str] = ()  # Dynamo's names of inputs that are no tensors
    check: Callable[[Joint], None] = lambda joint: None  # what was captured with such inputs
    joint: Joint | None = None  # what was planned
    answers: tuple[bool | int, ...] = ()  # to what the step asks of its tensors, in order


@dataclass
class _Facts:
    """What is known of one captured graph beside its ops; all but the first four is found when it is traced."""

    names: list[str]  # of the inputs, as the user knows them
    known: list[Any]  # tensors that it is given, or holds as constants
    copies: Copies  # of weights, that autocast keeps
    memory: Arena | None  # what serves the step; None: PyTorch's allocator
    counts: list[list[int]] = field(default_factory=list)  # contributions to gradients, of each graph that is traced
    noted: Noted = field(default_factory=list)  # what the step has tagged
    sharing: Sharing = field(default_factory=Sharing)
    shards: Shards = field(default_factory=Shards)  # among the inputs
    watches: Sequence[Callable[..., None]] = ()  # that have a call's backward refuse what it cannot do as plain PyTorch
    unreached: list[int] = field(default_factory=list)  # inputs that are never differentiated
    running: Running | None = None  # by which plan, until it is lowered; None: nothing was planned
    first: FirstStep | None = None  # that the plan is held against; None: its costs are not ours
    code: ReplaceableCode | None = None  # that another plan may take over
    go_on: Callable[..., None] | None = None  # begins to look for that plan


@dataclass(eq=False)
class Backend:
    """Plans each training graph with ``planner`` and lowers it; graphs without gradients run as they are.

    With ``begin`` a graph may run by the first plan that fits, and change to better ones. ``lower`` makes of a module
    and its inputs the function that runs; if it is another than `run_generated_code`, a backward gets zeros where a
    result has no gradient. ``profile`` is where the costs of the ops come from. ``answer``: what captured code is told
    that asks whether it is compiled.
    """

    planner: Callable[..., Solution]  # of a problem
    lower: Lower = run_generated_code
    profile: Source = MEASURE
    new_arena: Callable[[], Arena | None] = lambda: None  # for a graph that is captured; None: PyTorch's allocator
    begin: Callable[[Problem], tuple[Solution, UnfinishedSearch | None]] | None = None  # a plan, and what is open of it
    updates: Insert | None = None  # of parameters, that are part of the step
    elsewhere: SecondMemories | None = None  # where values may wait
    overlap: bool = False  # what ranks send each other may go on beside ops
    budget: int = 0  # bytes that a step may take when it runs; 0: as many as its plan
    asked: Budget | None = None  # what finds these when a graph is first planned; None: they are known

    running: list[Running] = field(default_factory=list)  # the training graphs, in the order of capture
    arenas: WeakSet[Arena] = field(default_factory=WeakSet)  # of the graphs whose code is kept
    answer: Answer = field(default_factory=Answer)
    call: Call = field(default_factory=Call)  # for which is captured now

    @property
    def block_bytes(self) -> int:
        """Sizes are rounded up to a multiple of these for the device that costs are estimated for, if there is one.

        For the step's own device the allocator there may take more.
        """
        return self.profile.block_bytes if isinstance(self.profile, Device) else 1

    @property
    def plans(self) -> list[Solution]:
        """The `Solution` by which each captured training graph runs now, in the order of capture."""
        return [one.plan for one in self.running]

    def plan(self, problem: Problem, beside: int = 0) -> Solution:
        """What the step will follow, with so many bytes left beside it."""
        return self.planner(problem, beside) if beside else self.planner(problem)

    def limit(self, plan: Solution) -> int:
        """Bytes that a step may take when it runs, of which its plan may have left some to what is beside it."""
        return self.budget or plan.budget

    @contextmanager
    def capturing(self, call: Call) -> Iterator[None]:
        """Within the block a function is captured for a call."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    @showing("capturing")
    def __call__(self, module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """What `torch.compile` calls for each captured graph."""
        put_regions_in_place(module)
        questions, call, names = taken_out(module), self.call, input_names(module)
        call.answers = questions.answers
        _refuse_inexact(module)
        refuse_nested(names, inputs)
        refuse_sizes_of_data(module)
        refuse_lost_leaves(module, inputs)
        refuse_products_within(module)
        warn_of_gradients(module.graph)
        if isinstance(self.profile, Measure):
            _refuse_fakes(names, inputs)
        numbers, draws = sources_of(module, call.numbers), draws_of_python(module)
        known = [*inputs, *module.parameters(), *module.buffers()]
        facts = _Facts(names, known, Copies(module, inputs, names), self.new_arena(), shards=Shards.among(inputs))
        if isinstance(facts.memory, Arena):
            self.arenas.add(facts.memory)
        compile_graph = aot_autograd(
            fw_compiler=partial(self._lower, facts, "forward"),
            bw_compiler=partial(self._lower, facts, "backward"),
            inference_compiler=self.lower,
            partition_fn=partial(self._partition, facts, numbers, draws),
            keep_inference_input_mutations=True,
        )
        keep_random_ops = inductor_config.patch(fallback_random=True)  # those that nobody reads as well
        backward_outside_of_autocast = functorch_config.patch(backward_pass_autocast="off")
        with (
            eager_kernels(),
            eager_formulas(),
            eager_strides(),
            keeping_copies(),
            keep_random_ops,
            backward_outside_of_autocast,
            counted_contributions() as facts.counts,
            noting() as facts.noted,
        ):
            run = facts.shards.around(compile_graph(module, facts.shards.take_apart(module, inputs)))
        asked, running, go_on = 0, facts.running, facts.go_on
        facts.running = facts.go_on = None  # which hold these facts: a backend that is dropped is to be gone at once
        if questions.answers and isinstance(self.profile, Measure) and running is not None:
            given = 0 if call.joint is None else call.joint.number_bytes
            asked = asked_bytes(running.plan, questions, inputs, given, self.limit(running.plan))
            running.plan = with_asked(running.plan, asked)
        nones = [partial(keep_undefined, set[type]())] if self.lower is run_generated_code else []
        run = fan_out(leave_unreached(run, facts.unreached), facts.sharing)
        run = watched(run, *nones, *facts.watches)
        if running is not None and go_on is not None:
            go_on(asked=asked)
            run = running.around(run)
        if running is not None:
            run = ranks.keeping_step(run, running.plan)
        return asking_first(sharing_copies(run, facts.copies), questions)

    def _lower(self, facts: _Facts, phase: Phase, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """What AOTAutograd calls for one of the two modules of the first plan."""
        _forbid_donation()
        run = within(facts.memory, phase, self.lower)(module, inputs)
        run = run if facts.first is None else facts.first.around(phase, run)
        return run if facts.code is None else facts.code.first(phase, run)

    def _find_budget(self, facts: _Facts, graph: fx.Graph, device: torch.device, *, fakes: bool) -> None:
        """Have as many bytes as were asked for, or as there are where the step runs, before anything is measured."""
        if self.asked is None:
            return
        updates = None if self.updates is None else self.updates.updates

        def bytes_of(*reach: Any) -> int:
            return unread_bytes(reach, (), device, self.block_bytes)

        def look() -> Available:
            if fakes:
                raise BudgetError("Without data a step runs nowhere: name the bytes, such as budget='8 GB'.")
            states = [] if updates is None else [[*of.values()] for o in updates.optimizers for of in o.state.values()]
            held = bytes_of(facts.known, self.call.reach, updates and updates.reach, states)
            return available(device, held, in_arena=facts.memory is not None, sharing=ranks.sharing_machine())

        exchange = None if updates is None else updates.exchange
        least = partial(ranks.least, graph=graph, exchange=exchange, device=device)
        trained = (t for t in facts.known if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad)
        self.budget = self.asked.find(look, least, 2 * bytes_of(*trained) if updates is None else 0)

    def forget(self, running: list[Running]) -> None:
        """Let go of some graphs, and end what goes on for them."""
        for one in running:
            one.end()
        self.running[:] = [one for one in self.running if one not in running]

    def _partition(
        self,
        facts: _Facts,
        numbers: dict[int, str],
        draws: list[int],
        joint_module: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        device = device_of(joint_module.graph)
        warn_of_second_writes(joint_module.graph)
        counts = [*facts.counts[-1]] if facts.counts else []  # to measure ops may differentiate, too
        drop_gradients_of_writes(joint_module, facts.known)
        facts.copies.find(joint_module.graph)
        facts.shards.refuse_converted(joint_module.graph, facts.copies.kept, facts.names)
        facts.shards.join_exchanges(joint_module.graph, static_lifetime_input_indices or (), overlap=self.overlap)
        facts.unreached = unreached(joint_module, num_fwd_outputs)
        if self.updates is not None:
            gone = self.updates(joint_module, facts.known, num_fwd_outputs, facts.names)
            counts = [count for n, count in enumerate(counts) if n not in gone]
        views = added_within(joint_module.graph, num_fwd_outputs)
        users = computed_from(joint_module.graph, num_fwd_outputs)
        block_bytes = max(self.block_bytes, kind_of(device).block_bytes)
        fakes = any(map(is_fake, map(local, facts.known)))
        read = partial(
            read_joint,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static_lifetime_input_indices or (),
            input_names=facts.names,
            block_bytes=block_bytes,
            numbers=numbers,
            draws=draws,
            noted=facts.noted,
        )
        prepare(
            joint_module.graph,
            on_cpu=self.block_bytes == 1,  # else it is planned for a GPU
            in_two=None if device.type == "cpu" or fakes else same_in_two,
            again=None if fakes else same_again,
            repeats=None if fakes else repeats,
        )
        if not fakes:
            compile_attention(joint_module.graph)
        joint = read(joint_module)
        if numbers:
            self.call.check(joint)
        updates = None if self.updates is None else self.updates.updates
        unread = unread_bytes((self.call.reach, updates and updates.reach), facts.known, device, block_bytes)
        held = 0 if updates is None else updates.held_bytes
        allocated = None if fakes else allocated_on(device)
        self._find_budget(facts, joint_module.graph, device, fakes=fakes)
        tried = fakes or isinstance(self.profile, Measure)  # or not to be tried

        memory = None if self.elsewhere is None else self.elsewhere.on(device)

        def pose(joint: Joint) -> Problem:
            problem = with_what_is_held(problem_of(joint, self.profile, tried=tried), allocated, unread=unread + held)
            return problem if memory is None else with_second_memory(problem, memory)

        def share(modules: Any) -> Sharing:
            shards = facts.shards.layouts
            return sharing_of(counts, modules.forward, modules.backward, num_fwd_outputs, facts.names, shards)

        problem = pose(joint)
        in_data = not fakes and self.block_bytes == 1
        problem = with_loss_in_parts(problem, joint_module, read, pose, tried=in_data)
        at_once = self.begin is None or not may_change(joint)
        find: Find = (lambda *asked: (self.plan(*asked), None)) if at_once else self.begin  # type: ignore[assignment]
        replays = Replays.now(device, self.budget) if self.budget and not fakes else None
        try:
            solution, unfinished = find(problem) if replays is None else plan_in_blocks(find, problem, replays)
        except InfeasibleBudget as error:
            raise error if self.asked is None else self.asked.explained(error) from None
        modules, joint = solution.modules, joint_of(solution.problem)
        facts.running, self.call.joint = Running(solution), joint
        self.running.append(facts.running)
        facts.memory = serving(facts.memory, solution, device)
        facts.sharing = share(modules)
        if not fakes and isinstance(self.profile, Measure) and self.profile.cache:
            facts.first = FirstStep(solution, device, held, partial(forget, joint))
            if facts.memory is not None:
                facts.memory.took = facts.first.took
        facts.watches = (partial(refuse_views, views), partial(refuse_watching, users))
        if unfinished is None:
            return modules.forward, modules.backward
        lower = self.lower  # alone: a backend that is dropped is gone at once, and what goes on too

        def write(plan: Solution) -> tuple[Any, Any] | None:
            if replays is not None:
                replays.check(plan)
            modules = plan.modules
            if share(modules) != facts.sharing:
                return None
            facts.memory = serving(facts.memory, plan, device)
            forward, backward = (within(facts.memory, phase, lower) for phase in PHASES)
            return forward(modules.forward, []), backward(modules.backward, [])

        facts.code = ReplaceableCode(num_fwd_outputs)
        facts.go_on = partial(facts.running.go_on, unfinished, facts.code, write)
        return modules.forward, modules.backward


def _refuse_inexact(module: fx.GraphModule) -> None:
    """Refuse what is traced as something else: kernels that round differently, draws of another generator."""
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
        if re.fullmatch(r"_foreach_\w+_", getattr(node.target, "__name__", "")):
            _refuse_lost_writes(node)


def _refuse_lost_writes(node: fx.Node) -> None:
    """Refuse what tracing gets wrong of a write to a list of tensors: two writes to one of them, gradients of views."""
    written: Any = node.args[0] if node.args else node.kwargs["self"]
    name = node.target.__name__  # type: ignore[union-attr]
    if len({*written}) < len(written):
        raise Unsupported(
            f"{where(node)}: {name} writes to one tensor more than once, of which tracing keeps the last write only. "
            "Call it once for each write."
        )
    tensors = [n.meta["example_value"] for n in written]
    if any(tensor._base is not None and tensor.requires_grad for tensor in tensors):
        raise Unsupported(
            f"{where(node)}: {name} writes to a view of a tensor, and tracing loses the gradient of that. "
            "Write to the whole tensor, or call the op of one tensor for each."
        )


def _refuse_fakes(names: list[str], inputs: list[Any]) -> None:
    for name, tensor in zip(names, inputs, strict=True):
        if is_fake(tensor):
            raise Unsupported(
                f"{name} is a fake tensor or on the meta device: with no data, nothing can run and be measured. "
                'checkmate.trace(..., profile="roofline:h100") estimates the costs for a named device instead.'
            )
