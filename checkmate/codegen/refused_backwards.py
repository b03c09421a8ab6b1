"""Refuse backwards in which autograd would use or give other gradients of a step's results than in plain PyTorch.

A captured step is one function of autograd, and its results are its ends. A step may return ``loss, logits``: in plain
PyTorch the gradient of the loss passes through the logits, hooks on them see it, ``logits.retain_grad()`` keeps it.
Here only what comes from outside passes through them. Who asks for more gets an error in the backward.

A step may return ``features`` and ``features.flatten(1)`` and go on from both. AOTAutograd returns their common base
and makes the views after the step, so that what comes through them from outside is added before all that comes from
within. Plain PyTorch adds it where the view was made. From three contributions on that may round differently: it is
refused.

A region of autocast that is entered before a step is called, and left after it, keeps the converted copy of a weight
for other uses (`checkmate.capture.autocast`). In plain PyTorch the gradients of all of them meet in the copy. A
captured step has a gradient of its own for each weight, in float32. In two backwards that is the same, in one not.

So a captured step leaves in the region, for each weight that it converts, what becomes the copy if somebody uses it
(`_Copy`), and has its backward ask whether the engine will run that of the copy, or of another step that has used it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.around import Around
from checkmate.capture.autocast import Copies, autocast_as_found, is_kept, within_region
from checkmate.capture.nodes import ancestors
from checkmate.codegen.contributions import FIRST, arrivals
from checkmate.codegen.undefined_gradients import DEPTH, before_backward, compiled_functions
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import ForwardTokenAOTOutput, _is_tangent
from checkmate.torch_internals.running import (
    TorchDispatchMode,
    _is_any_autocast_enabled,
    _make_wrapper_subclass,
    _will_engine_execute_node,
    tree_leaves,
    tree_map_only,
)

aten = torch.ops.aten
_NO_GRADIENT = {aten.detach.default, aten.alias.default}
_USERS = "checkmate: backwards of steps"  # in the meta data of a copy's node of autograd
_ANEW = "checkmate.compile captures such a call anew; a backend that torch.compile calls by its name is not asked to."


def computed_from(graph: fx.Graph, count: int) -> dict[int, tuple[int, ...]]:
    """The position of each result from which other results are computed, with theirs.

    Positions are those of autograd's node, which has no tokens of effects. What passes through ``detach`` is left out.
    """
    output: Any = graph.output_node()
    first = _tokens_of(output, count)
    position = {node: i for i, node in enumerate(output.args[0][first:count]) if isinstance(node, fx.Node)}
    detached = {n for n in graph.nodes if n.target in _NO_GRADIENT}
    users: dict[int, set[int]] = defaultdict(set)
    for node, user in position.items():
        for n in ancestors(node.all_input_nodes, detached) & position.keys():
            users[position[n]].add(user)
    return {i: tuple(sorted(positions)) for i, positions in users.items()}


def _tokens_of(output: fx.Node, count: int) -> int:
    """The number of first outputs of a joint graph that are effect tokens (of `torch.linalg`'s checks, say)."""
    return sum(isinstance(desc, ForwardTokenAOTOutput) for desc in output.meta.get("desc", ())[:count])


def refuse_watching(users: Mapping[int, tuple[int, ...]], results: Sequence[Any], functions: Sequence[Any]) -> None:
    """Refuse hooks and kept gradients of results in `computed_from`, in the backward of a call."""
    for tensor in tree_leaves(results) if users else ():
        function: Any = getattr(tensor, "grad_fn", None)
        later = users.get(tensor.output_nr) if function in functions else None
        if later:
            function.register_prehook(partial(_refuse_watched, weakref.ref(tensor), later))


def _refuse_watched(result: weakref.ref[torch.Tensor], later: tuple[int, ...], grads: Sequence[Any]) -> None:
    tensor = result()
    if tensor is None or not (tensor.retains_grad or tensor._backward_hooks):
        return
    if any(grads[i] is not None for i in later):
        raise Unsupported(
            f"A result of the compiled step, of shape {tuple(tensor.shape)}, has a hook or keeps its gradient, and "
            "another result that is differentiated is computed from it within the step. No gradient passes from "
            "one result to the other. Register the hook within the step, tensor.register_hook(...), or compute "
            "the other one outside."
        )


def added_within(graph: fx.Graph, count: int) -> dict[int, list[set[int]]]:
    """The terms that a joint graph adds to incoming gradients, by the position of the result.

    Each contribution is told by the positions of the results whose gradients it depends on. Results to whose gradients
    nothing is added are left out. ``count``: how many of the graph's outputs belong to the forward.
    """
    output: Any = graph.output_node()
    position = {desc: i for i, desc in enumerate(output.meta["desc"][_tokens_of(output, count) : count])}
    results = {n: position.get(getattr(n.meta.get("desc"), "output", None)) for n in graph.nodes if _is_tangent(n)}
    terms_by_result: dict[int, list[set[int]]] = {}
    # Follow the sum that begins with each gradient, as long as nothing else reads it.
    for tangent, result in results.items():
        total, terms = tangent, []
        while len(total.users) == 1:
            (user,) = total.users
            if user.target is not aten.add.Tensor or user.kwargs:
                break
            if user.args[0] is not total or not isinstance(user.args[1], fx.Node):
                break
            terms.append({i for n in ancestors([user.args[1]]) if (i := results.get(n)) is not None})
            total = user
        if terms and result is not None:
            terms_by_result[result] = terms
    return terms_by_result


def refuse_views(within: Mapping[int, Sequence[set[int]]], results: Sequence[Any], functions: Sequence[Any]) -> None:
    """Refuse gradients of views that plain PyTorch adds `added_within` the step, in the backward of a call."""
    views: dict[Any, dict[int, set[int]]] = {}
    for tensor in results if within else ():
        node = getattr(tensor, "grad_fn", None)
        for _ in range(DEPTH):
            if node is None or node in functions or not node.next_functions:
                break
            following, position = node.next_functions[0]
            if following in functions and position in within:
                views.setdefault(following, {}).setdefault(position, set()).add(node._sequence_nr())
            node = following
    for function, numbers in views.items():
        before_backward(function, partial(_refuse_views, numbers, within))


def _refuse_views(
    numbers: Mapping[int, set[int]], within: Mapping[int, Sequence[set[int]]], node: Any, grads: Sequence[Any]
) -> None:
    # ``numbers`` are those of the views of each result, as autograd counts its nodes.
    defined = {position for position, grad in enumerate(grads) if grad is not None}
    shown = defined.intersection(numbers)
    contributions = arrivals(node) if shown else None
    for position in shown:
        come = [*numbers[position], 0] if contributions is None else contributions[0].get((node, position), [])
        come = [number for number in come if number != FIRST]
        terms = sum(not term.isdisjoint(defined) for term in within[position])
        if terms and numbers[position].intersection(come) and len(come) + terms > 2:
            raise Unsupported(
                "Results of the compiled step are views of one value, of shape "
                f"{tuple(grads[position].shape)}, which the step goes on from too, and gradients come to them from "
                "outside. Plain PyTorch adds them between those from within the step; here they come first, which "
                "rounds differently. Return one of these results, and make the view of it outside."
            )


def watch_backward(result: Any) -> None:
    """Raise a clear error in a backward that has no plan: a differentiable one, or one under autocast."""
    tensors = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
    functions = {t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None}
    for function in functions:
        function.register_prehook(_check_backward)


def _check_backward(grads: Any) -> None:
    if torch.is_grad_enabled():
        raise Unsupported(
            "create_graph=True: the backward of a compiled step cannot itself be differentiated. "
            "Compute this loss with the plain model, which shares its parameters with the compiled one."
        )
    if _is_any_autocast_enabled():
        raise Unsupported(
            "backward() was called within torch.autocast, where plain PyTorch computes other gradients than outside of "
            "it. Call it after the block, as PyTorch advises."
        )


class SharedCopies(Around):
    """Leave in an autocast region within which a step is called what becomes the copies of its weights."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def before(self, inputs: list[Any]) -> dict[str, Any]:
        """The nodes of autograd in which gradients of weights meet in this region, by the name of the weight."""
        copies = self._copies
        if copies.kept != [*map(is_kept, inputs)]:
            raise Unsupported(
                "Autocast keeps the converted copy of an input that is a leaf, and an input was one when the step was "
                f"captured and is none now, or the other way round. {_ANEW}"
            )
        if copies.within not in (None, within_region()):
            raise Unsupported(
                "The step enters autocast, and was captured within another region of it, which keeps the converted "
                f"weights, and is called outside of one now, or the other way round. {_ANEW}"
            )
        nodes: dict[str, Any] = {}
        if not (within_region() and torch.is_grad_enabled()):
            return nodes
        with autocast_as_found():
            torch.set_autocast_cache_enabled(True)
            for i, dtype in copies.converted.items():
                weight, name = inputs[i], copies.names[i]
                torch.set_autocast_enabled(weight.device.type, True)
                torch.set_autocast_dtype(weight.device.type, dtype)
                with _Lookup(name) as lookup:
                    torch.mm(weight, weight)  # which autocast gives copies
                copy = lookup.copy
                if isinstance(copy, _Copy):
                    is_present = copy.version == weight._version
                else:  # it has the bits of the present weight, then
                    now = weight.detach().to(copy.dtype)
                    is_present = bool((now.view(torch.int16) == copy.detach().view(torch.int16)).all())
                if not is_present:
                    raise _changed(name)
                nodes[name] = copy.grad_fn
        return nodes

    def after(self, note: dict[str, Any], args: Sequence[Any], results: Any) -> Any:
        """Register, for each backward, the question whether it runs these nodes or other steps that used them."""
        for function in compiled_functions(results, args) if note else ():
            for node in note.values():
                node.metadata.setdefault(_USERS, []).append(weakref.ref(function))
            before_backward(function, partial(_refuse_shared, note))
        return results


def _refuse_shared(nodes: dict[str, Any], function: Any, grads: Any) -> None:
    for name, node in nodes.items():
        steps = [user() for user in node.metadata[_USERS] if user() not in (None, function)]
        if any(map(_will_engine_execute_node, (node, *steps))):
            raise Unsupported(
                f"{name} is used by a compiled step and once more in the same region of autocast, and this "
                "backward computes the gradients of both. Plain PyTorch adds them in half precision; those within "
                "the step are added before. Enter torch.autocast within the step, or anew for each call, or "
                "compile all that uses the weight as one step."
            )


class _Copy(torch.Tensor):
    """The copy of a weight that autocast keeps before its first use: it is converted then."""

    weight: Callable[[], Any]
    version: int  # of the weight, when it would have been converted
    called: str
    made: torch.Tensor | None = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_Copy, _Copy.converted, (args, kwargs or {}))
        return func(*args, **kwargs)

    def converted(self) -> torch.Tensor:
        if self.made is None:
            weight = self.weight()
            if weight._version != self.version:
                raise _changed(self.called)
            self.made = weight.detach().to(self.dtype)
        return self.made


def _changed(name: str) -> Unsupported:
    return Unsupported(
        f"{name} was changed in a region of autocast in which it had been converted: plain PyTorch goes on with the "
        "copy of what it was. Update parameters after the block of torch.autocast."
    )


class _Lookup(TorchDispatchMode):
    """Looks up the copy of a weight that autocast keeps, or gives it a `_Copy`; computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.copy: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._to_copy.default:
            weight, layout = args[0], {"dtype": kwargs["dtype"], "device": args[0].device}
            copy: _Copy = _make_wrapper_subclass(_Copy, weight.shape, weight.stride(), **layout)
            copy.weight, copy.version, copy.called = weakref.ref(weight), weight._version, self.name
            return copy
        self.copy = args[0]
        return torch.empty(0)
