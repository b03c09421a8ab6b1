"""Plan a captured step whose sizes are inputs, at the sizes of each call.

The first sizes are those of an earlier capture of fixed sizes, whose measured costs and plan serve all others. For
other sizes all is kept, where that fits; else the cheapest known plan that fits there runs, simulated to the byte at
these sizes; where none fits, one is found as for a first step. The plan of the largest sizes is the one that a search
beside the training makes better.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.fx as fx

from checkmate.backends import step_problem
from checkmate.backends.plan_swap import Planning, SwappableCode, SwappablePlan, is_swappable
from checkmate.backends.step_problem import Codegen
from checkmate.capture.around import Around
from checkmate.capture.guards import DataGuards, GuardFailed
from checkmate.capture.joint import Joint
from checkmate.capture.loss.ladder import with_split
from checkmate.capture.number_inputs import NotFree, Number, symbols_of_numbers
from checkmate.capture.sizes import OtherStep, Sizes, check_answers, put_in
from checkmate.core.graph import Op
from checkmate.core.problem import Problem
from checkmate.core.rules import as_mapping, ruled, with_rules, without_rules
from checkmate.core.schedule import Packed
from checkmate.core.solution import Solution
from checkmate.errors import InfeasibleBudget, SolverError
from checkmate.memory.meter import collecting_seldom
from checkmate.profiling.source import Source
from checkmate.solvers.common.incumbent import again
from checkmate.torch_internals.running import outside_tracing


@dataclass(frozen=True, eq=False)
class Earlier:
    """An earlier capture, at the sizes of its plan, or of the first of its plans."""

    training: SwappablePlan | SizedPlans
    sizes: Callable[[Sizes], Sizes]  # what the open sizes were then, by what they are now; NotFree if that is not known
    check: Callable[[Joint], None]  # raises NotFree if with these sizes and numbers another step was captured
    numbers: Mapping[str, Number]  # by Dynamo's names, what those that are inputs now were then
    answers: Sequence[bool | int]  # to what it asks of its tensors

    def known(self, joint: Joint, single: Joint, reading: Reading) -> tuple[Solution | None, list[Problem]]:
        """The plan of the earlier capture, for the same step as it is captured now at the same sizes.

        None, if it has other ops; ``single`` is the step without groups. With it come the problems of the step, and of
        the step with its loss in the plan's parts, at these sizes.
        """
        self.check(single)
        if not is_swappable(joint):
            raise NotFree("its plans save other things: what it writes twice, as a norm that is applied twice")
        plan, captured = self.training.plan, without_rules(self.training.plans[0].captured)
        if reading.known(joint, captured) is None:
            return None, []
        problems = [captured, without_rules(plan.problem)]
        whole = reading.problem(joint, problems)
        same = next((split for split in whole.splits_in_turn() if split.splits == plan.problem.splits), None)
        if same is None:
            raise NotFree("its loss does not run in the same parts")
        problem = with_rules(same, as_mapping(plan.problem))
        keywords: dict[str, Any] = {"bound": plan.bound, "seconds": plan.seconds, "origin": plan.origin}
        return again(plan, problem, plan.budget, **keywords), [whole] if same is whole else [whole, same]


@dataclass(frozen=True, eq=False)
class Reading:
    """The way to read a joint graph with open sizes at given ones.

    ``rewrite`` makes the graph's ops those that run, ``fuse`` groups of these one op each, if given; ``read`` finds ops
    and values, ``pose`` adds costs and bytes, measured here, and ``split`` the splits of its loss
    (`with_loss_in_parts`). ``pose`` counts all that is in use beside the captured call, or beside another one, given
    the ``in_all`` of that: a function of the bytes that the graph reads.
    """

    module: fx.GraphModule
    rewrite: Callable[[fx.GraphModule, Collection[str] | None], fx.GraphModule]
    fuse: Callable[[fx.GraphModule, Sizes], fx.GraphModule] | None
    read: Callable[[fx.GraphModule], Joint]
    pose: Callable[..., Problem]
    split: Callable[..., Problem]
    source: Source
    in_all: Callable[[Sequence[Any], Any], Callable[[int], int]]  # of the inputs of a call, and all that it reaches
    places: tuple[int, ...]  # of the open sizes, among the inputs
    numbers: Mapping[fx.Node, str]  # inputs whatever the size, with Dynamo's names
    states: Collection[str] | None = None  # that the rewrites keep, of whatever size; None: by size

    def joint(self, sizes: Sizes, inputs: Sequence[Any] | None = None) -> Joint:
        """The step at these sizes, for these inputs of the joint graph."""
        with outside_tracing():
            module = put_in(self.module, sizes, inputs, self.numbers)
            module = self.rewrite(module, self.states)
            return self.read(module if self.fuse is None else self.fuse(module, sizes))

    def single(self, sizes: Sizes) -> Joint:
        """The step at these sizes without groups."""
        return replace(self, fuse=None).joint(sizes)

    def first_alike(
        self, captures: Sequence[Earlier], sizes: Sizes, answers: Sequence[bool | int]
    ) -> tuple[Earlier, Sizes]:
        """The first of earlier captures for whose sizes, numbers and answers the graph is, and these sizes.

        Raises:
            NotFree: if it is for none of them.
        """
        reasons, numbers = list[NotFree](), symbols_of_numbers(self.numbers)
        for earlier in captures:
            try:
                # With open sizes it may ask more: what shapes decide.
                if len(earlier.answers) == len(answers) and earlier.answers != answers:
                    raise OtherStep("what is computed depends on the value of a tensor")
                then = earlier.sizes(sizes)
                of_then = {node: earlier.numbers[name] for node, name in numbers.items()}
                check_answers(self.module.graph, dict(zip(self.places, then, strict=True)), of_then)
            except NotFree as error:
                reasons.append(error)
            else:
                return earlier, then
        raise reasons[0]

    def known(self, joint: Joint, *problems: Problem) -> Problem | None:
        """The problem of a step, by the costs of one of these with the same ops; None if none has them."""
        with outside_tracing():
            candidates = (step_problem.at_other_sizes(joint, problem, self.source) for problem in problems)
            return next((problem for problem in candidates if problem is not None), None)

    def problem(self, joint: Joint, problems: Sequence[Problem]) -> Problem:
        """The problem of a step, with the splits of its loss, by the costs of those of these that have the same ops."""

        def pose(joint: Joint) -> Problem:
            return self.known(joint, *problems) or self.pose(joint)

        splits = [name for problem in problems for name in problem.splits]
        return self.split(pose(joint), joint.module, pose, splits)

    def again(self, sizes: Sizes, ops: Sequence[Op], splits: Sequence[str]) -> Joint:
        """The step at these sizes, read as before: with these ops in this order, and these splits of its loss."""
        joint = self.joint(sizes)
        if splits:
            with outside_tracing():
                joint = self.read(with_split(joint.module, splits))
        place = {op.name: k for k, op in enumerate(joint.graph.ops)}
        return joint.in_order([place[op.name] for op in ops])

    def split_further(self, sizes: Sizes, problems: Sequence[Problem], splits: Sequence[str]) -> Problem | None:
        """The problem at these sizes with its loss in more parts than in these splits."""
        problem = self.problem(self.joint(sizes), problems)
        same = next((split for split in problem.splits_in_turn() if split.splits == splits), None)
        return None if same is None or same.next_split is None else same.next_split()

    def hand_over(self, *inputs: Any) -> NoReturn:
        """Run in place of a plan: raise what is known of the call."""
        raise SizedCall(self, inputs)


class SizedCall(Exception):
    """Raised in place of a result, with a reading and the inputs of a call, by which its problem is posed."""

    def problem(self, reach: Any) -> Problem:
        """The problem that a capture of this call would pose; ``reach`` holds all tensors of the step."""
        reading, inputs = self.args
        joint, in_all = reading.joint(tuple(inputs[i] for i in reading.places), inputs), reading.in_all(inputs, reach)
        pose = partial(reading.pose, in_all=in_all)
        with outside_tracing():
            problem: Problem = reading.split(pose(joint), joint.module, pose)
        return problem


class SizedPlan(SwappablePlan):
    """The plan at other sizes than the first, which can let go of the graphs of its step."""

    def __init__(self, plan: Solution, captured: Problem, reading: Reading, sizes: Sizes, peers: list[Problem]) -> None:
        super().__init__(plan, captured)
        self._reading, self._at, self._others = reading, sizes, peers

    def let_go(self) -> None:
        """Keep the plan, and read the step anew where somebody asks for its graphs."""
        problem, schedule, read = self.plan.problem, self.plan.schedule, self._reading
        if isinstance(schedule, Packed):
            return
        codegen, splits = problem.codegen, problem.splits
        assert isinstance(codegen, Codegen)
        assert schedule is not None
        codegen.let_go(partial(read.again, self._at, problem.graph.ops, splits))
        further = partial(read.split_further, self._at, self._others, splits)
        light = problem.let_go(problem.next_split and partial(ruled, further, as_mapping(problem)))
        self.captured = light if self.captured is problem else replace(self.captured.let_go(None), codegen=None)
        self.plan = replace(self.plan, problem=light, schedule=Packed(schedule))


class SizedPlans(Around):
    """The plans of a captured step whose sizes are inputs, by sizes; for the largest of them a search goes on.

    Args:
        earlier: the capture whose place this one takes.
        training: its plan, with the search for a better one; or a new plan.
        first: that plan, for the step at these sizes as it is captured now.
        problems: of the step at these sizes, and with its loss in parts.
        sizes: of that plan.
        find: gives a plan for a problem, with known plans beside it.
        write: makes the functions of a plan.
        code: runs these, by sizes.
        most: so many other sizes are kept, the last used.
    """

    def __init__(
        self,
        reading: Reading,
        earlier: Earlier,
        training: SwappablePlan,
        first: Solution,
        problems: list[Problem],
        sizes: Sizes,
        find: Callable[[Problem, Sequence[Solution]], Solution],
        write: Callable[[Solution], tuple[Any, Any] | None],
        code: SwappableCode,
        most: int,
    ) -> None:
        self.training, self.sizes, self._first = training, sizes, first
        self.earlier = weakref.ref(earlier)
        self._reading, self._find, self._write, self._code, self._most = reading, find, write, code, most
        self._problems = problems
        self._others = dict[Sizes, SwappablePlan]()
        self._making, self._call = threading.Lock(), threading.local()
        self._guard_bytes: Callable[..., int] = lambda plan, inputs: 0

    @property
    def plan(self) -> Solution:
        """The plan of the largest sizes."""
        return self.training.plan

    @property
    def plans(self) -> list[SwappablePlan]:
        """The plans by sizes, that of the largest first."""
        return [self.training, *self._others.values()]

    @property
    def known(self) -> Planning:
        """The state of the search."""
        return self.training.known

    def guarding(self, guards: DataGuards, limit: int) -> None:
        """Count the bytes of guards that run before each call."""
        self._guard_bytes = partial(step_problem.guard_bytes, guards=guards, limit=limit)

    def before(self, inputs: list[Any]) -> None:
        """Install a better plan for the largest sizes before a forward, if there is one."""
        self._call.inputs = [weakref.ref(x) if isinstance(x, torch.Tensor) else lambda x=x: x for x in inputs]
        self.training.before(inputs)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the search to end; tell whether it has."""
        return self.training.wait(timeout)

    def end(self) -> None:
        """End the search."""
        self.training.end()

    def single(self) -> Joint:
        """The step at the largest sizes without groups."""
        return self._reading.single(self.sizes)

    def plan_at(self, sizes: Sizes, inputs: Sequence[Any] | None = None) -> SwappablePlan:
        """Find the plan for these sizes."""
        try:
            return self._plan_at(self._reading, sizes, inputs)
        except InfeasibleBudget:
            if self._reading.fuse is None:
                raise
        # Its ops one by one have the same bits, and need less at once.
        return self._plan_at(replace(self._reading, fuse=None), sizes, inputs)

    def _plan_at(self, reading: Reading, sizes: Sizes, inputs: Sequence[Any] | None) -> SwappablePlan:
        plans = [self._first, *(plan.plan for plan in self.plans)]
        problem = reading.problem(reading.joint(sizes, inputs), self._problems)
        # Where it is larger than all before, or does not fit, other random states may be worth to be kept.
        refusal: InfeasibleBudget | None = None
        if problem.keep_all_cost <= max(plan.captured.keep_all_cost for plan in self.plans):
            try:
                return SizedPlan(self._find(problem, plans), problem, reading, sizes, self._problems)
            except InfeasibleBudget as error:
                refusal = error
        reading = replace(reading, states=None)
        joint = reading.joint(sizes, inputs)
        if len(joint.graph.ops) != len(problem.graph.ops):
            problem, plans, refusal = reading.split(reading.pose(joint), joint.module), [], None
        if refusal is not None:
            raise refusal
        return SizedPlan(self._find(problem, plans), problem, reading, sizes, self._problems)

    def begin(self, sizes: Sizes, plan: SwappablePlan | None, *, taken: int) -> None:
        """Run by the first plan from now on, and at these sizes by this one, if there is one."""
        self.training.move(self._first, self._problems[0], self._code, self._write, self.sizes)
        self._code.make = self._functions_at
        self._add(sizes, plan or self.training, taken)

    def _add(self, sizes: Sizes, plan: SwappablePlan, taken: int) -> None:
        solution = plan.plan
        if all(len(problem.graph.ops) != len(solution.problem.graph.ops) for problem in self._problems):
            problem = without_rules(solution.problem)
            self._problems.append(replace(problem, codegen=Codegen(step_problem.joint_of(problem)), next_split=None))
        plan.plan = step_problem.with_guards(solution, taken)
        for sized_plan in self._others.values():  # but the graphs of the newest, of which its first backward may ask
            if isinstance(sized_plan, SizedPlan):
                sized_plan.let_go()
        if solution.rest is not None and plan.captured.keep_all_cost > self.training.captured.keep_all_cost:
            # It is larger than all before: search for a better one, and no more for that of the smaller sizes.
            self.training.end()
            self._others[self.sizes], self.training, self.sizes = self.training, plan, sizes
        if plan is not self.training:
            self._others[sizes] = plan
        elif solution.rest is not None:
            plan.go_on(solution.rest, self._code, self._write, taken=taken, sizes=sizes)
        while len(self._others) > self._most:
            oldest = next((sizes for sizes in self._code.sizes if sizes in self._others), next(iter(self._others)))
            del self._others[oldest]
            self._code.forget(oldest)

    def _functions_at(self, sizes: Sizes, inputs: Sequence[Any]) -> tuple[Any, Any]:
        with self._making, collecting_seldom():
            try:
                plan = self.training if sizes == self.sizes else self.plan_at(sizes, inputs)
            except (NotFree, InfeasibleBudget) as error:
                # With fixed numbers another plan may fit.
                if isinstance(error, InfeasibleBudget) and not self._reading.numbers:
                    raise
                raise GuardFailed(str(error), self.sizes, sizes, None) from None
            functions = self._write(plan.plan)
            if functions is None:
                raise SolverError(f"At the sizes {sizes} the step hands over its gradients in another way.")
            if plan is not self.training:
                inputs = [x() for x in self._call.inputs]
                self._add(sizes, plan, self._guard_bytes(plan.plan, inputs=inputs))
            return functions
