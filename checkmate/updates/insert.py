"""Put updates into a traced step: each parameter's gradient goes to its update, and is no result of the step.

gradient -> as autograd stores it -> (times the factor that clips it) -> update
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import optim
from torch._functorch.partitioners import _is_primal
from torch.utils._python_dispatch import _disable_current_modes

from checkmate.capture.patches.strides import lay_out, obeys_layout
from checkmate.updates.clipping import coefficient_of, norm_of, order_of
from checkmate.updates.one_parameter import Update, about

aten = torch.ops.aten


@dataclass(eq=False)
class Updates:
    """What a training step does with its gradients.

    Args:
        optimizers: those whose parameters are updated, as `checkmate.updates.supported.checked` gives them.
        clip_norm: the largest norm of all gradients; None: they are as they are.
        norm_type: the order of the norm.
        keep: gradients are results of the step as well.
    """

    optimizers: Sequence[optim.Optimizer]
    clip_norm: float | None = None
    norm_type: float = 2.0
    keep: bool = False
    done: int = field(default=0, init=False)  # updates so far
    norm: torch.Tensor | None = field(default=None, init=False)  # of all gradients of the last step, before clipping

    def of_parameters(self) -> dict[int, Update]:
        """The update of each parameter that the optimizers have now, by its id."""
        groups = ((o, i, group) for o in self.optimizers for i, group in enumerate(o.param_groups))
        return {id(p): Update(o, i, p) for o, i, group in groups for p in group["params"]}

    @property
    def signature(self) -> list[tuple[str, list[int]]]:
        """What a plan holds for: which parameters are updated, in what groups, and how."""
        groups = ((o, group) for o in self.optimizers for group in o.param_groups)
        return [(about(o, group), [id(p) for p in group["params"]]) for o, group in groups]

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, from the first step on."""
        return sum(update.state_bytes for update in self.of_parameters().values())

    def all_at_once(self) -> None:
        """Do what is done with gradients as plain PyTorch does, where a plain step has left them in ``.grad``."""
        parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        if self.clip_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm, self.norm_type)
        for optimizer in self.optimizers:
            optimizer.step()
            if not self.keep:
                optimizer.zero_grad(set_to_none=True)

    def insert(self, module: fx.GraphModule, given: Sequence[Any], num_fwd_outputs: int) -> set[int]:
        """Put the updates into a joint graph of AOTAutograd.

        Args:
            module: is changed in place.
            given: the step's inputs, in the order of what was traced.
            num_fwd_outputs: how many outputs of the graph belong to the forward.

        Returns:
            Which of the gradients that are not None are results no more, by their position among these.
        """
        graph, output = module.graph, module.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        updates, primals = self.of_parameters(), _primals(graph)
        defined = [i for i in range(num_fwd_outputs, len(results)) if isinstance(results[i], fx.Node)]
        found: dict[int, tuple[fx.Node, Update]] = {}  # by the position of the gradient
        for i, position in _inputs_of(output, defined):
            if position < len(given) and id(given[position]) in updates:
                found[i] = primals[position], updates[id(given[position])]
        made = {node: n for n, node in enumerate(graph.nodes)}
        for i in sorted(found, key=lambda i: made[results[i]]):  # as the backward makes them, and may make them again
            found[i] = found.pop(i)
            results[i] = _as_stored(graph, results[i], found[i][0])
        factor = None
        if self.clip_norm is not None and found:
            order = {id(update): n for n, update in enumerate(updates.values())}
            factor = self._factor(output, [results[i] for i in sorted(found, key=lambda i: order[id(found[i][1])])])
        for i, (parameter, update) in found.items():
            with graph.inserting_before(output):
                if factor is not None:
                    results[i] = _call(graph, results[i], aten.mul.Tensor, (results[i], factor), "clipped")
                args = results[i], parameter, update.about
                node = graph.create_node("call_function", self._op(update), args, name=f"{parameter.name}_update")
                node.meta = _meta(results[i], None)
            if not self.keep:
                results[i] = None
        output.args = (tuple(results),)
        graph.lint()
        return set() if self.keep else {n for n, i in enumerate(defined) if i in found}

    def _factor(self, output: fx.Node, gradients: Sequence[fx.Node]) -> fx.Node:
        """What gradients are to be multiplied by; they are in the order of the parameters."""
        graph, norms = output.graph, []
        for gradient in gradients:
            with graph.inserting_after(gradient):
                norms.append(_call(graph, gradient, norm_of, (gradient, self.norm_type), "norm"))
        with _disable_current_modes():
            places = order_of([torch.empty(0, dtype=g.meta["val"].dtype) for g in gradients])
        with graph.inserting_before(output):
            args = [norms[n] for n in places], self.clip_norm, self.norm_type
            return _call(graph, norms[-1], coefficient_of(self._note), args, "clip")

    def _note(self, norm: torch.Tensor) -> None:
        self.norm = norm

    def _op(self, update: Update) -> Callable[..., None]:
        """A function for a node: of a gradient, the parameter, and what the costs of an update depend on."""

        def update_parameter(gradient: torch.Tensor, parameter: torch.Tensor, about: str) -> None:
            update(gradient)
            self.done += 1

        update_parameter.updates = 1  # type: ignore[attr-defined]  # the position of what it overwrites
        update_parameter.rehearsal = update.rehearsal  # type: ignore[attr-defined]  # to measure it
        update_parameter.moved_bytes = 2 * update.state_bytes + update.parameter.nbytes  # type: ignore[attr-defined]
        return update_parameter


def _primals(graph: fx.Graph) -> Mapping[int, fx.Node]:
    """The inputs of a step, by their position in what was traced."""
    nodes = (n for n in graph.find_nodes(op="placeholder") if _is_primal(n))
    return {n.meta["desc"].idx: n for n in nodes if hasattr(n.meta.get("desc"), "idx")}


def _inputs_of(output: fx.Node, gradients: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For gradients among the outputs of a joint graph, the positions of the inputs that they belong to."""
    for i in gradients:
        position = getattr(getattr(output.meta["desc"][i], "grad_of", None), "idx", None)
        if position is not None:  # else it stands for several inputs that are views of one tensor
            yield i, position


def _as_stored(graph: fx.Graph, gradient: fx.Node, parameter: fx.Node) -> fx.Node:
    """A gradient in the layout in which autograd stores it for a parameter."""
    val, like = gradient.meta["val"], parameter.meta["val"]
    if obeys_layout(val, like):
        return gradient
    dense = aten.is_non_overlapping_and_dense(like)
    strides = like.stride() if dense else torch.empty(like.shape, device="meta").stride()
    with graph.inserting_after(gradient):
        return _call(graph, gradient, lay_out, (gradient, tuple(val.shape), tuple(strides), val.dtype), "stored")


def _call(graph: fx.Graph, origin: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], suffix: str) -> fx.Node:
    """A node with the provenance of another, and its fake result."""
    node = graph.create_node("call_function", target, args, name=f"{origin.name}_{suffix}")
    with origin.meta["val"].fake_mode, torch.no_grad():
        node.meta = _meta(origin, target(*fx.node.map_arg(args, lambda n: n.meta["val"])))
    return node


def _meta(origin: fx.Node, val: Any) -> dict[str, Any]:
    return {**{key: what for key, what in origin.meta.items() if key not in ("val", "tensor_meta")}, "val": val}
