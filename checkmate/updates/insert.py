"""Rewrite a traced step so that each gradient goes to its parameter's update instead of being a result.

gradient -> as autograd stores it -> (mean of all ranks) -> (without the scale) -> (clipped) -> update

Of several micro-batches each gradient is added to its sum, a value that is there before the step; the last one's step
goes on with the sums. What each node does is said by `checkmate.updates.updates`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import optim

from checkmate.capture.nodes import call, is_collective, storage
from checkmate.capture.op_order import after_tangent
from checkmate.capture.patches.results.strides import lay_out, obeys_layout
from checkmate.capture.provenance import where
from checkmate.capture.sharded.shards import local
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import _is_primal
from checkmate.updates import operations
from checkmate.updates.all_reduce import INSTEAD
from checkmate.updates.gradients import largest_of, norm_of
from checkmate.updates.optimizers import Update, parameters_of
from checkmate.updates.updates import Updates

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Insert:
    """Inserts the updates into traced steps."""

    updates: Updates
    last: bool = True  # the steps are of the last micro-batch before an update; the others only add to sums

    def __call__(
        self, module: fx.GraphModule, tensors: Sequence[Any], num_fwd_outputs: int, names: Sequence[str]
    ) -> None:
        """Change a joint graph of AOTAutograd in place.

        Args:
            tensors: the step's inputs, in the order of what was traced.
            num_fwd_outputs: how many outputs of the graph belong to the forward.
            names: of the inputs, as the user knows them.

        Raises:
            Unsupported: if it is not known what a gradient belongs to, and all are looked at together; or if none
                belongs to a parameter of an optimizer, or two of these share memory.
        """
        graph, output = module.graph, module.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        updates = self.updates.of_parameters()
        primal_nodes = [n for n in graph.find_nodes(op="placeholder") if _is_primal(n)]
        primals = {n.meta["desc"].idx: n for n in primal_nodes if hasattr(n.meta.get("desc"), "idx")}
        defined = [i for i in range(num_fwd_outputs, len(results)) if isinstance(results[i], fx.Node)]
        # Whose gradient each result of the backward is.
        by_gradient: dict[int, tuple[fx.Node, Update]] = {}  # by the position of the gradient
        by_storage: dict[int, int] = {}  # the position of a parameter
        flows_on = False  # a gradient, to whatever stands before the step
        for i in defined:
            # of the input; None: it stands for several that are views of one tensor
            position = getattr(getattr(output.meta["desc"][i], "grad_of", None), "idx", None)
            if position is None and self.updates.together:
                raise Unsupported(
                    "Two inputs of the step are views of one tensor, whose gradient is not that of one parameter: it "
                    "cannot be clipped or unscaled with the others. Have the step use one of them."
                )
            tensor = tensors[position] if position is not None and position < len(tensors) else None
            if position is not None and tensor is not None and id(tensor) in updates:
                by_gradient[i] = primals[position], updates[id(tensor)]
                first = by_storage.setdefault(storage(local(tensor)), position)
                if first != position:  # one is updated while the other's part of the backward may still read it
                    raise Unsupported(
                        f"{names[first]} and {names[position]} are two parameters in the memory of one tensor. A "
                        "training step updates each as soon as its gradient is there, and so needs memory of their own "
                        "for them: tie them by one parameter (b.weight = a.weight), or have one of them hold a copy "
                        "(.clone())."
                    )
            elif tensor is None or not tensor.is_leaf:
                flows_on = True
        if not flows_on:
            _refuse_unreached(self.updates, {update.optimizer for _, update in by_gradient.values()})
        # Write their updates, in the order in which the backward makes the gradients.
        order = {node: n for n, node in enumerate(graph.nodes)}
        by_gradient = {i: by_gradient[i] for i in sorted(by_gradient, key=lambda i: order[results[i]])}
        if by_gradient:
            inputs = {id(tensor): primals[i] for i, tensor in enumerate(tensors) if i in primals}
            # Refuse a backward with further collectives: ranks with other plans could order them otherwise.
            later = after_tangent(graph.nodes) if self.last and self.updates.exchange is not None else ()
            if collective := next((node for node in graph.nodes if node in later and is_collective(node)), None):
                raise Unsupported(
                    f"{where(collective)}: the backward exchanges data with other ranks itself, as SyncBatchNorm does. "
                    f"Gradients cannot be averaged within its plan. {INSTEAD}"
                )
            _Writer(self.updates, output, results, by_gradient, inputs).write(last=self.last)
        if self.last and self.updates.average is not None:
            self.updates.average.expect({update.parameter for _, update in by_gradient.values()})
        output.args = (tuple(results),)
        graph.lint()


@dataclass(frozen=True, eq=False)
class _Writer:
    what: Updates
    output: fx.Node  # of the graph
    results: list[Any]  # its results; gradients that are none any more become None
    found: Mapping[int, tuple[fx.Node, Update]]  # by the position of a gradient among these: parameter and update
    inputs: Mapping[int, fx.Node]  # of the graph, by the id of the tensor

    def write(self, *, last: bool) -> None:
        """Update each parameter by its gradient: laid out, averaged over ranks, unscaled, clipped.

        Of several micro-batches add each to its sum; the sum of the last one takes the gradient's place.
        """
        updates, results, by_gradient = self.what, self.results, self.found
        clip, scaling, exchange = updates.clipping, updates.scaling, updates.exchange
        token = self._agreed() if last else None
        for i, (parameter, update) in by_gradient.items():
            gradient, is_averaged = results[i], token is not None and update.parameter in self.averaged
            # Add it to its sum, and average that.
            if updates.sums is not None:
                updates.sums.expect(update.parameter, _strides(gradient, parameter))
                before = (token,) if is_averaged else ()
                add = operations.add(updates, update, exchanges=is_averaged)
                results[i] = self._last(add, (gradient, parameter, *before), gradient, f"{parameter.name}_sum")
                token = results[i] if is_averaged else token
                continue
            # Lay it out as autograd stores it.
            val = gradient.meta["val"]
            if not obeys_layout(val, parameter.meta["val"]):
                layout = tuple(val.shape), _strides(gradient, parameter), val.dtype
                results[i] = gradient = self._next(lay_out, (gradient, *layout), "stored")
            # Average it over all ranks, after the previous one.
            if exchange is not None and is_averaged:
                average = operations.exchange(exchange, update.parameter)
                both = self._last(average, (gradient, parameter, token), gradient, f"{gradient.name}_exchange")
                results[i] = self._last(operator.getitem, (both, 0), gradient, f"{gradient.name}_mean")
                token = self._last(operator.getitem, (both, 1), gradient, f"{gradient.name}_sent")
        if not last:
            results[:] = [None if i in by_gradient else result for i, result in enumerate(results)]
            return
        before = (token,) if token is not None and updates.sums is not None else ()  # sums of others are averaged then
        # With a scaled loss, decide whether each optimizer's updates are skipped.
        reached = {update.parameter for _, update in by_gradient.values()}
        skips: dict[optim.Optimizer, fx.Node] = {}
        if scaling is not None:
            largest: dict[optim.Optimizer, list[fx.Node]] = defaultdict(list)
            for i, (_, update) in by_gradient.items():
                largest[update.optimizer].append(self._next(largest_of, (results[i],), "largest"))
            for optimizer, nodes in largest.items():
                decide = operations.decide(updates, optimizer, reached)
                skips[optimizer] = self._last(decide, (nodes, *before), nodes[-1], "skips")
        # Find the factor that clips all gradients.
        if clip.most is not None:
            if scaling is not None:
                for i in by_gradient:
                    results[i] = self._next(operations.unscale(scaling), (results[i],), "unscaled")
            norms = [self._next(norm_of, (results[i], clip.order), "norm") for i in by_gradient]
            coefficient = operations.coefficient(updates, [update.parameter for _, update in by_gradient.values()])
            factor = self._last(coefficient, (norms, *before), norms[-1], "clip")
        # Unscale, clip and update by each.
        for i, (parameter, update) in by_gradient.items():
            gradient = results[i]
            if scaling is not None and clip.most is None:
                gradient = self._last(operations.unscale(scaling), (gradient,), gradient, f"{gradient.name}_unscaled")
            if clip.value is not None:
                for op, limit in ((aten.clamp_min.default, -clip.value), (aten.clamp_max.default, clip.value)):
                    gradient = self._last(op, (gradient, limit), gradient, f"{gradient.name}_clipped")
            if clip.most is not None:
                clipped, dtype = f"{gradient.name}_clipped", gradient.meta["val"].dtype
                product = self._last(aten.mul.Tensor, (gradient, factor), gradient, clipped)
                if product.meta["val"].dtype != dtype:  # a single number in half precision takes the factor's type
                    product = self._last(aten.to.dtype, (product, dtype), gradient, f"{clipped}_stored")
                gradient = product
            results[i] = gradient if updates.keep and updates.sums is None else None
            self._update(operations.update(updates, update), gradient, parameter, update, skips.get(update.optimizer))

    @cached_property
    def averaged(self) -> set[torch.Tensor]:  # the parameters whose gradients are averaged over ranks
        return set() if self.what.exchange is None else {*self.what.exchange.parameters()}

    def _agreed(self) -> fx.Node | None:
        """Make ranks that average gradients agree on their set and order."""
        if self.what.exchange is None:
            return None
        order = [update.parameter for _, update in self.found.values() if update.parameter in self.averaged]
        i, (parameter, _) = next(iter(self.found.items()))
        agree = operations.agree(self.what, order)
        return self._last(agree, (self.results[i], parameter), self.results[i], "agreed")

    def _update(
        self, op: Callable[..., Any], read: fx.Node, parameter: fx.Node, update: Update, skip: fx.Node | None = None
    ) -> None:
        """Write an update; it overwrites the parameter, and its average if the step reads that."""
        average, cost_key = self.what.average, update.about
        followed = None if average is None else average.pairs.get(update.parameter)
        if average is not None and followed is not None:
            cost_key += f", {average.about}"
        args = (read, parameter, cost_key, self.inputs.get(id(followed)), skip)
        with self.output.graph.inserting_before(self.output):
            node = self.output.graph.create_node("call_function", op, args, name=f"{parameter.name}_update")
        node.meta = {key: value for key, value in read.meta.items() if key != "tensor_meta"} | {"val": None}

    def _next(self, target: Callable[..., Any], args: tuple[Any, ...], suffix: str) -> fx.Node:
        """Write a node right after its first argument."""
        with self.output.graph.inserting_after(args[0]):
            return call(args[0], target, args, f"{args[0].name}_{suffix}")

    def _last(self, target: Callable[..., Any], args: tuple[Any, ...], origin: fx.Node, name: str) -> fx.Node:
        """Write a node after all others."""
        with self.output.graph.inserting_before(self.output):
            return call(origin, target, args, name)


def _refuse_unreached(updates: Updates, reached: Collection[optim.Optimizer]) -> None:
    """Refuse an optimizer without a parameter in the step: it was made for other tensors."""
    for n, optimizer in enumerate(updates.optimizers, start=1):
        if optimizer not in reached:
            parameters = parameters_of([optimizer])
            which = f"this {type(optimizer).__name__}{f' (number {n})' if len(updates.optimizers) > 1 else ''}"
            why = (
                "the loss does not depend on them. It may have been made of another model or a copy of it"
                if any(p.requires_grad for p in parameters)
                else "all of them have requires_grad=False"
            )
            raise Unsupported(
                f"The step reaches none of the {len(parameters)} parameters of {which}: {why}. Nothing was updated. "
                "Make it of the parameters that loss_fn uses; or leave it out, and have a step of its own for it."
            )


def _strides(gradient: fx.Node, parameter: fx.Node) -> tuple[int, ...]:
    """The strides of a parameter's gradient as autograd stores it."""
    val, like = gradient.meta["val"], parameter.meta["val"]
    if obeys_layout(val, like):
        return tuple(val.stride())
    dense = aten.is_non_overlapping_and_dense(like)
    return tuple(like.stride() if dense else torch.empty(like.shape, device="meta").stride())
