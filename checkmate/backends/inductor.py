"""``backend="inductor"``: PyTorch's Inductor compiles the two modules of a plan, and the peak is measured.

The plan is that of the eager backend, and Inductor compiles its two modules. Its kernels round differently: results are
close to plain PyTorch, not equal to it. And it fuses ops and moves them, so that the peak is another than the simulated
one. Two kernels far apart that become one hold all they read at once, which undoes what a plan saves; here only what
stands next to each other in the plan is fused. What remains is measured: before a step is handed over, forward and
backward run once on its first inputs, with all state as before afterwards. Where that takes more than the budget, it is
planned again within that much less, a few times, and then refused.

Random draws are those of eager PyTorch: ops that draw stay as they are and in their order, and ours are ops that
Inductor cannot see into. Where some results of a step have no gradient, its backward runs the generated code of the
eager backend: it is made when it is first met, too late for a trial, and needs none to stay within the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.backends.eager import Backend
from checkmate.backends.tensor_state import unchanged
from checkmate.capture import random_draws as randomness
from checkmate.capture import rewrite
from checkmate.capture.device import main_device
from checkmate.capture.nodes import is_collective, tensors
from checkmate.capture.patches import recurrent
from checkmate.capture.patches.results import strides as layouts
from checkmate.capture.provenance import where
from checkmate.codegen.boxed import boxed
from checkmate.codegen.contributions import lowered
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.memory import CPU, measure_peak
from checkmate.torch_internals import inductor as internals  # takes a second to import: looked up when needed
from checkmate.torch_internals.aot import detect_fake_mode, functorch_config
from checkmate.torch_internals.trees import tree_leaves
from checkmate.units import exact_bytes, format_bytes

log = logging.getLogger("checkmate.backends.inductor")
aten = torch.ops.aten
TRIES = 3  # plans of one graph, each within less than the one before
_INSTEAD = 'backend="eager" runs the step with PyTorch\'s own kernels.'
_CANNOT: dict[Any, str] = {
    layouts.draw_copy: "random numbers in place into a tensor that is not contiguous",
    recurrent.lstm_layer: "nn.LSTM as one kernel",
    rewrite.sum_of_selected: "the sum of what a mask selects, as the gradient of y in x[mask] = y is",
}
_FAILS = (RuntimeError, AssertionError)  # what Inductor raises: its own errors are RuntimeErrors


@dataclass(eq=False)
class Inductor(Backend):
    """A backend that measures each step before it is handed over.

    ``planner`` also takes how many bytes are to be left beside the plan. Each plan has what was measured in
    ``details["measured_peak"]``, in bytes.
    """

    aside: int = 0  # bytes that Inductor's code takes beyond its plan, as far as known

    exact: ClassVar[bool] = False

    def plan(self, problem: Problem, beside: int = 0) -> Solution:
        """Within what Inductor's code is known to leave of the budget. Inductor itself decides what is written over."""
        return self.planner(replace(problem, profile=replace(problem.profile, ways=())), self.aside + beside)

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """As of `Backend`; what has a backward has then run once. Each plan that was tried may take more: refused."""
        if (device := main_device(inputs)) != CPU:
            raise Unsupported(f'backend="inductor" is for steps on the CPU so far, not on {device}. {_INSTEAD}')
        self.rounds_in |= {t.dtype for n in module.graph.nodes for t in tensors(n.meta.get("example_value"))}
        known, self.aside, lowest = len(self.running), 0, False
        tried: list[tuple[Solution, int]] = []  # with the peak that was measured, in bytes
        try:
            while True:
                try:
                    with functorch_config.patch(force_non_lazy_backward_lowering=True):
                        run = super().__call__(module, inputs, **options)
                except InfeasibleBudget as error:
                    lacking = error.min_budget - error.budget
                    if lowest or not 0 < lacking <= self.aside:
                        raise
                    self.aside, lowest = self.aside - lacking, True  # less may do for the lowest of all plans
                    continue
                if len(self.running) == known:
                    return run  # nothing needs a gradient, and nothing was planned
                plan = self.running[-1].plan
                measured = plan.problem.resident + _peak(run, inputs)
                tried.append((plan, measured))
                if measured <= self.budget:
                    self.running[-1].plan = replace(plan, details={**plan.details, "measured_peak": measured})
                    return run
                self.running.pop()
                if len(tried) == TRIES:
                    raise _refusal(self.budget, tried)
                self.aside = measured - (plan.peak or 0)
                log.info(
                    "compiled by Inductor, a plan of %s takes %s; planning again with %s of the budget set aside",
                    *map(format_bytes, (plan.peak or 0, measured, self.aside)),
                )
        except InfeasibleBudget as error:
            del self.running[known:]
            raise _refusal(self.budget, tried) if tried else error from None
        except BaseException:
            del self.running[known:]
            raise


def _peak(run: Callable[..., Any], inputs: list[Any]) -> int:
    """Bytes that a compiled function and its backward take beyond its inputs; everything is as before afterwards.

    The backward begins at all results at once, and autograd stores the gradients as in training: with tensors of its
    own in the memory of the inputs, so that no hook runs and no ``grad`` of the user's is touched.
    """
    own = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]

    def step() -> list[Any]:
        results = tree_leaves(run(*own))
        roots = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        with torch.autocast(CPU.type, enabled=False):  # as a backward after the block
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        return results

    with unchanged(own), torch.enable_grad():
        return measure_peak(step).peak


def _refusal(budget: int, tried: list[tuple[Solution, int]]) -> InfeasibleBudget:
    runs = ", ".join(f"{format_bytes(measured)} for a plan of {format_bytes(p.peak or 0)}" for p, measured in tried)
    least = min(measured for _, measured in tried)
    return InfeasibleBudget(
        f"Compiled by Inductor, no plan stays within the budget of {format_bytes(budget)}. Measured in a run: {runs}. "
        f"Smallest that was measured: {exact_bytes(least)}. {_INSTEAD}",
        budget=budget,
        min_budget=least,
        op="",
    )


@cache
def require_compiler() -> None:
    """Have Inductor compile something small, once in a process; where it cannot, an error says what is missing."""
    try:
        internals.get_cpp_compiler()
        torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(8, device=CPU))
    except _FAILS as error:
        said = str(error).strip().splitlines()
        raise Unsupported(
            'backend="inductor" compiles C++, and that does not work here. It takes g++ or clang++ (the environment '
            "variable CXX names another) and the header files of Python (package python3-dev). "
            f"{_INSTEAD}\n{type(error).__name__}: {said[0] if said else ''}"
        ) from error


def lower(module: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    """Compile a module; what is left of it where gradients that are handed in are None runs as it is."""
    return lowered(module, lambda part: _compiled(part, inputs) if part is module else boxed(part))


def _compiled(module: fx.GraphModule, inputs: list[Any]) -> Any:
    if exchange := next((node for node in module.graph.nodes if is_collective(node)), None):
        raise Unsupported(
            f"{exchange.name} exchanges data with other ranks, which a trial of the step would do once more. {_INSTEAD}"
        )
    is_backward = any(node.meta.get("autograd_backward") for node in module.graph.nodes)
    neighbours = _neighbours()
    settings = internals.inductor_config.patch(
        fallback_random=True,
        inductor_choices_class=lambda: neighbours,
        reorder_for_peak_memory=False,  # the order is the plan's; with its own, gradients of a VGG-16 were zero
    )
    try:
        with settings, internals.V.set_choices_handler(neighbours):
            traced = _decomposed(module, inputs)
            output: Any = traced.graph.output_node()
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # in the strides of the plan
            return internals.compile_fx_inner(traced, inputs, is_backward=is_backward)
    except _FAILS as error:
        raise Unsupported(f"Inductor cannot compile this step: {error}\n{_INSTEAD}") from error


@cache
def _neighbours() -> Any:
    """What Inductor would fuse, where nothing stands between: the order of a plan is what bounds its peak."""

    class Neighbours(internals.InductorChoices):
        def uuid(self) -> str:
            return "checkmate: neighbours"  # a part of the key by which Inductor keeps compiled code

        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            between = max(node2.min_order - node1.max_order, node1.min_order - node2.max_order)
            return between <= 1 and internals.InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    return Neighbours()


def _decomposed(module: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
    """The module in the smaller set of ops that Inductor makes kernels of, with results of the same types."""
    _define_ops()
    results: Any = module.graph.output_node().args[0]
    types = [n.meta["val"].dtype if isinstance(n, fx.Node) else None for n in results]

    def run(*args: Any) -> tuple[Any, ...]:
        made = _ForInductor(module).run(*args)
        return tuple(r if dtype is None else r.to(dtype) for r, dtype in zip(made, types, strict=True))

    mode = detect_fake_mode(inputs)
    assert mode is not None
    with mode, torch.no_grad():
        return make_fx(run, decomposition_table=internals.select_decomp_table(), _allow_non_fake_inputs=True)(*inputs)


class _ForInductor(fx.Interpreter):
    """Runs a module with ops that Inductor knows, or cannot see into, in place of our own functions."""

    def run_node(self, n: fx.Node) -> Any:
        args: Any
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        val: Any = n.meta.get("val")
        ops = torch.ops.checkmate
        if n.target is aten._foreach_copy_.default:
            return [target.copy_(source) for target, source in zip(*args, strict=True)]
        if n.target is rewrite.scale_mask:
            return args[0].to(args[2]).div(args[1])
        if n.target is layouts.lay_out:
            return aten.copy(args[0].new_empty_strided(*args[1:3], dtype=args[3]), args[0])
        if n.target is layouts.write_copy:
            return torch.func.functionalize(layouts.write_copy)(*args, **kwargs)
        if n.target in _CANNOT:
            raise Unsupported(f"{where(n)}: Inductor cannot compile {_CANNOT[n.target]}. {_INSTEAD}")
        if n.target in (randomness.draw_mask, randomness.draw_numbers, randomness.draw_once):
            return ops.draw(val.shape, val.stride(), args[-1], val.dtype)
        if n.target is randomness.save_state:
            return ops.save_state(args[0].shape, args[0].stride())
        if n.target in (randomness.draw_saved, randomness.draw_again):
            return getattr(ops, n.target.__name__)(args[0], val.shape, val.stride(), args[2])
        return super().run_node(n)


@cache
def _define_ops() -> torch.library.Library:
    """Our draws as ops of PyTorch. They read no tensor but its sizes and strides: Inductor may lay it out otherwise."""
    library = torch.library.Library("checkmate", "DEF")

    def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
        name = schema.split("(")[0]
        library.define(schema, tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"checkmate::{name}", fake, lib=library)

    def empty(size: Sequence[int], stride: Sequence[int], p: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def draw(size: Sequence[int], stride: Sequence[int], p: float, dtype: torch.dtype) -> torch.Tensor:
        return empty(size, stride, p, dtype).bernoulli_(p)

    def state(size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty(randomness.STATE_BYTES + 8 * len(size), dtype=torch.uint8)

    def save_state(size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return randomness.save_state(torch.empty_strided(size, stride, device="meta"))

    def mask(saved: torch.Tensor, size: Sequence[int], stride: Sequence[int], p: float) -> torch.Tensor:
        return empty(size, stride, p, torch.bool)

    def draw_saved(saved: torch.Tensor, size: Sequence[int], stride: Sequence[int], p: float) -> torch.Tensor:
        return randomness.draw_saved(saved, tuple(size), p)

    def draw_again(saved: torch.Tensor, size: Sequence[int], stride: Sequence[int], p: float) -> torch.Tensor:
        return randomness.draw_again(saved, tuple(size), p)

    draws = torch.Tag.nondeterministic_seeded  # such ops stay in their order, read or not
    define("draw(SymInt[] size, SymInt[] stride, float p, ScalarType dtype) -> Tensor", draw, empty, draws)
    define("save_state(SymInt[] size, SymInt[] stride) -> Tensor", save_state, state, draws)
    define("draw_saved(Tensor saved, SymInt[] size, SymInt[] stride, float p) -> Tensor", draw_saved, mask, draws)
    define("draw_again(Tensor saved, SymInt[] size, SymInt[] stride, float p) -> Tensor", draw_again, mask)
    return library
