"""Hand over the gradients of a weight that is used several times one by one, in plain PyTorch's order.

A weight that a step uses twice gets two contributions to its gradient, a and b, and the backward of the step hands
over their sum. Plain PyTorch computes that, too, unless something else, c, has come before: then it has (c + a) + b, in
place of c + (a + b). So it is where the step is called twice before one backward, or a weight is used after the step.

Tracing is watched to learn which inputs get several contributions. Each such input is passed to the step through a node
of autograd that leads to it as often as plain PyTorch's graph does (`Fan`). In a backward in which something else
contributes first, the step's backward returns the contributions themselves, and that node hands them on in their order.
In any other backward it hands on the sum, and takes no memory.

Autograd runs a backward in the order of descending sequence numbers: what was computed last comes first. So the
question is whether a node of a higher number leads to the same gradient and is a part of this backward. From a node
only what follows can be reached, not what leads to it; what leads to it is found from where the backward began, and
that is found on the stack, in the call of PyTorch that runs the engine. If it is not found, all contributions are
handed over, which are there at once then: a weight that is used twelve times takes twelve times its bytes.

Plain PyTorch completes the gradients of a step one after the other; a compiled step returns all at once. Who listens to
single gradients (hooks that draw, `DistributedDataParallel`) is called in plain PyTorch's order (`hand_over_in_order`).
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import compress
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.autograd.graph import get_gradient_edge

from checkmate.capture.around import Around
from checkmate.capture.nodes import input_position, is_mutating, is_view, leaf_nodes, storages
from checkmate.capture.rewrite import without_dead_code
from checkmate.codegen.boxed import ANEW, Boxed, takes_one_list, when_asked
from checkmate.codegen.emit import Modules
from checkmate.codegen.transfers import as_made
from checkmate.codegen.undefined_gradients import before_backward, compiled_functions, without
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import ForwardTokenAOTInput, _is_primal, _is_tangent
from checkmate.torch_internals.running import (
    AccumulateGrad,
    _current_autograd_node,
    _current_graph_task_id,
    _engine_run_backward,
    _will_engine_execute_node,
    functorch,
)

Edge = tuple[Any, int]  # a node of autograd, and which of its inputs
FIRST = float("inf")  # sequence number of the beginning of a backward
LAST = 2**64 - 1  # autograd's highest sequence number, that of each node that accumulates a gradient
aten = torch.ops.aten
_BATCH = (  # ATen's should_fold, by which a batch of products becomes one product or stays a batch
    "A batch of gradients (is_grads_batched=True, or vectorize=True) of a compiled step: PyTorch runs its products one "
    "way or another by which saved tensors require a gradient, and those of a plan do not, so that the last digits "
    "may differ from plain PyTorch. Take the gradients one after another, or those of the plain step."
)
# In the meta data of a backward's output node:
_ARRIVED = "arrived"  # how its gradients came when it was traced
_APART = "apart"  # how many contributions they have, of those that autograd can get singly


def verdicts(fan: Any) -> tuple[int, ...]:
    """The slots of a `Fan` to which something else contributes first; all slots if unknown."""
    task = _current_graph_task_id()
    # One walk through what is differentiated decides for all of them in it, and is kept for this backward.
    if getattr(fan, "verdict", (None,))[0] != task:
        fan.verdict = task, tuple(range(len(fan.counts)))
        numbers, nodes = arrivals(fan) or ({}, ())
        for f in nodes:
            if type(f) is type(fan):
                edges = [f.next_functions[sum(f.counts[:slot])] for slot in range(len(f.counts))]
                f.verdict = task, tuple(slot for slot, edge in enumerate(edges) if is_before(numbers, edge, f))
    slots: tuple[int, ...] = fan.verdict[1]
    return slots if slots and _will_engine_execute_node(fan) else ()


def is_before(numbers: dict[Edge, list[float]], edge: Edge, node: Any) -> bool:
    """Tell whether another node contributes to an edge before this one."""
    return max(numbers.get(edge, ()), default=-1) > created(node)


def created(node: Any) -> int:
    """The sequence number with which a node was created; `hand_over_in_order` changes those of ours."""
    number: int = getattr(node, "created", None) or node._sequence_nr()
    return number


def hand_over_in_order(edges: Sequence[Edge], places: Sequence[int | None]) -> None:
    """Have autograd accumulate the gradients that a node is about to return in the order of their places.

    The engine runs what is ready in the order of descending sequence numbers. Nodes that accumulate a gradient all have
    the highest one, and leave the engine's heap in no useful order: here each gets a number of its own. Nodes of ours
    on the way there (``created``, ``counts``) run before all of them.

    Args:
        edges: of the node, one for each tensor that its forward was called with.
        places: of their gradients, None without one; or of only those edges that lead anywhere.
    """
    if len(places) != len(edges):
        edges = [edge for edge in edges if edge[0] is not None]
    for (node, slot), place in zip(edges, places, strict=True):
        if place is None or node is None:
            continue
        if hasattr(node, "created"):
            node._set_sequence_nr(LAST)
            node, _ = node.next_functions[sum(node.counts[:slot])]
        if isinstance(node, AccumulateGrad):
            node._set_sequence_nr(LAST - 1 - place)


def arrivals(node: Any) -> tuple[dict[Edge, list[float]], dict[Any, None]] | None:
    """The contributions to each edge in the backward that reaches a node, and its nodes; None if unknown.

    Contributions are told by the sequence numbers of the nodes that they come from, or `FIRST`.
    """
    for roots in _beginnings():
        nodes = reachable(root for root, _ in roots)
        if node in nodes:
            numbers: dict[Edge, list[float]] = {edge: [FIRST] for edge in roots}
            for source in nodes:
                edges = [edge for edge in source.next_functions if edge[0] is not None]
                if edges and _will_engine_execute_node(source):
                    for edge in edges:
                        numbers.setdefault(edge, []).append(created(source))
            return numbers, nodes
    return None


def reachable(roots: Iterable[Any]) -> dict[Any, None]:
    """Nodes of autograd's graph: these, and all that a backward from them can reach."""
    stack = list(roots)
    seen: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions]
    return seen


def _beginnings() -> Iterator[list[Edge]]:
    """The roots of the running backwards, this thread's innermost first; the engine has more threads."""
    for innermost in (sys._getframe(), *sys._current_frames().values()):
        for frame, _ in walk_stack(innermost):
            if frame.f_code is _engine_run_backward.__code__:
                roots = frame.f_locals["t_outputs"]
                edges = (get_gradient_edge(root) if isinstance(root, torch.Tensor) else root for root in roots)
                yield [(edge.node, edge.output_nr) for edge in edges]


@dataclass(frozen=True)
class Shared:
    """An input whose gradient a step sums from several contributions."""

    position: int  # among what the compiled function is called with
    gradient: int  # position among what the backward returns
    count: int  # contributions
    name: str  # as the user knows it


UNKNOWN = Shared(-1, -1, 2, "An input")  # some input or other


class Arrival(NamedTuple):
    """The way of a gradient to an input of a traced step."""

    contributions: int
    place: int | None  # in the order in which gradients were complete; None: there is no gradient
    # Of a step with several results, the edges that lead here: their nodes' sequence numbers, their slots there, and
    # the results from which a backward comes to them, as bits.
    steps: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Sharing:
    """The inputs with several contributions, split by whether autograd gets these one by one."""

    apart: tuple[Shared, ...] = ()
    together: tuple[Shared, ...] = ()


class Fan(torch.autograd.Function):
    """Alias inputs of a step so that autograd has an edge for each contribution to their gradients."""

    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], *inputs: torch.Tensor) -> Any:
        """Make an alias of each input."""
        ctx.counts, ctx.created = counts, ctx._sequence_nr()
        ctx.terms = {}  # by slot: the contributions in their order, from the step's backward to this one
        ctx.set_materialize_grads(False)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        return tuple(inputs[i].detach() for i in firsts)

    @staticmethod
    def backward(ctx: Any, *sums: Any) -> Any:
        """The contributions that the step's backward left here, or the sums that it returned."""
        terms, ctx.terms = ctx.terms, {}
        grads: list[Any] = [None]
        for slot, count in enumerate(ctx.counts):
            grads += terms.get(slot) or [sums[slot], *[None] * (count - 1)]
        return tuple(grads)


@contextmanager
def noted_arrivals() -> Iterator[list[list[Arrival]]]:
    """Note, while a step is traced, how each gradient arrives that `torch.autograd.grad` returns.

    Gives a list that holds, for each call of this thread in the order of their ends, an `Arrival` for each input. What
    `torch.func` differentiates within the step is left out.
    """
    arrived: list[list[Arrival]] = []
    grad = torch.autograd.grad
    thread = threading.get_ident()

    @wraps(grad)
    def counting(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return grad(outputs, inputs, *args, **kwargs)
        roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        leaves = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        # At a level of `torch.func` autograd's graph is not that of the step.
        ends = [t for t in (*roots, *leaves) if isinstance(t, torch.Tensor)]
        if any(functorch.is_gradtrackingtensor(t) or functorch.is_batchedtensor(t) for t in ends):
            return grad(outputs, inputs, *args, **kwargs)
        # Count what reaches each leaf from now on, and note in which order their gradients are complete.
        counts = [0] * len(leaves)
        order: dict[int, int] = {}
        position = {tuple(get_gradient_edge(leaf)[:2]): i for i, leaf in enumerate(leaves)}

        def count(reached: list[tuple[int, int]], outgoing: Any, incoming: Any) -> None:
            for j, i in reached:
                counts[i] += outgoing[j] is not None

        def note(i: int, grad: torch.Tensor) -> None:
            order.setdefault(i, len(order))

        handles: list[Any] = [leaf.register_hook(partial(note, i)) for i, leaf in enumerate(leaves)]
        steps: list[list[tuple[int, int, int]]] = [[] for _ in leaves]
        beginnings = [get_gradient_edge(root).node for root in roots]
        led_from = defaultdict[Any, int](int)  # results from which a backward comes to a node, as bits
        for bit, node in enumerate(beginnings):
            led_from[node] |= 1 << bit
        for node in sorted(reachable(beginnings), key=created, reverse=True):
            reached = [(j, position[edge]) for j, edge in enumerate(node.next_functions) if edge in position]
            if reached:
                handles.append(node.register_hook(partial(count, reached)))
            for j, i in reached if len(roots) > 1 else ():
                steps[i].append((created(node), j, led_from[node]))
            for following, _ in node.next_functions if len(roots) > 1 else ():
                led_from[following] |= led_from[node]
        # Differentiate as it was asked.
        try:
            results = grad(outputs, inputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        places = [None if result is None else order.get(i) for i, result in enumerate(results)]
        arrived.append([*map(Arrival, counts, places, map(tuple, steps))])
        return results

    torch.autograd.grad = counting
    try:
        yield arrived
    finally:
        torch.autograd.grad = grad


def by_gradient(arrived: Sequence[Arrival], gradients: Sequence[Any]) -> dict[int, Arrival] | Sequence[Arrival]:
    """The arrivals by position among the gradients of a joint graph, as traced; or as they are.

    They stay as they are where gradients of subclasses of tensors are several in the graph.
    """
    positions = [i for i, grad in enumerate(gradients) if isinstance(grad, fx.Node)]
    defined = [arrival for arrival in arrived if arrival.place is not None]
    return dict(zip(positions, defined, strict=True)) if len(positions) == len(defined) else arrived


def sharing_of(
    arrived: Mapping[int, Arrival] | Sequence[Arrival],
    results: int,
    names: Sequence[str],
    shards: Collection[int],
    modules: Modules,
) -> Sharing:
    """Find the inputs with several contributions, and mark in the backward which of them autograd can get singly.

    Mark the order, too, in which autograd is to hand over the gradients.

    Args:
        arrived: how the gradients came when the joint graph was traced, from `by_gradient`.
        modules: of its plan.
        results: how many of the forward's outputs belong to the step; the others are saved tensors.
        names: of the inputs, by position.
        shards: positions of those whose gradients become those of a `DTensor`, which one sum does.
    """
    forward, output = modules.forward, modules.backward.graph.output_node()
    gradients: Any = output.args[0]
    positions = [i for i, grad in enumerate(gradients) if isinstance(grad, fx.Node)]
    if not isinstance(arrived, Mapping):
        output.meta[_ARRIVED] = arrived
        return Sharing(together=(UNKNOWN,) if any(arrival.contributions > 1 for arrival in arrived) else ())
    primals = filter(_is_primal, forward.graph.find_nodes(op="placeholder"))
    inputs = [n for n in primals if not isinstance(n.meta.get("desc"), ForwardTokenAOTInput)]
    is_tensor = [isinstance(n.meta["val"], torch.Tensor) for n in inputs]
    output.meta[_ARRIVED] = [arrived.get(i, Arrival(0, None)) for i in compress(range(len(inputs)), is_tensor)]
    # The positions of inputs that the step overwrites or returns a view of.
    outputs: Any = forward.graph.output_node().args[0]
    descs: Any = forward.graph.output_node().meta["desc"]
    visible = {getattr(getattr(desc, "mutated_input", None), "idx", None) for desc in descs[:results]}
    shown = {*storages(*(n for n in leaf_nodes(outputs[:results]) if n.op != "placeholder"))}
    for node in forward.graph.find_nodes(op="placeholder"):
        is_written = any(is_mutating(user) and user.args[0] is node for user in node.users)
        if is_written or not shown.isdisjoint(storages(node)):
            visible.add(input_position(node))
    visible.discard(None)
    # Autograd gets the others' contributions one by one, if the gradient is their sum.
    apart: list[Shared] = []
    together: list[Shared] = []
    for i in positions:
        count = arrived[i].contributions
        position = getattr(getattr(output.meta["desc"][i], "grad_of", None), "idx", None)
        # One that may belong to a view of the input is a sum, too: plain PyTorch sums those of the view first.
        total = as_made(gradients[i])
        while position in visible and is_view(total):
            total = as_made(total.all_input_nodes[0])
        if count < 2 and not (position in visible and total.target is aten.add.Tensor):
            continue
        if position is None:  # it stands for several inputs that are views of one tensor
            together.append(UNKNOWN)
            continue
        shared = Shared(position, i, count, names[position] if position < len(names) else f"input {position}")
        fits = position not in visible and position not in shards and terms_of(gradients[i], count) is not None
        (apart if fits else together).append(shared)
    output.meta[_APART] = {shared.gradient: shared.count for shared in apart}
    return Sharing(tuple(apart), tuple(together))


def terms_of(total: fx.Node, count: int) -> list[fx.Node] | None:
    """Take apart ``((a + b) + c) + ...``, autograd's sum of this many terms; None if it is none."""
    terms: list[fx.Node] = []
    for _ in range(count - 1):
        total = as_made(total)
        if total.target is not aten.add.Tensor or total.kwargs or len(total.args) != 2:
            return None
        total, term = total.args  # type: ignore[assignment]
        if not (isinstance(total, fx.Node) and isinstance(term, fx.Node)):
            return None
        terms.append(term)
    return [total, *reversed(terms)]


def places_of(arrived: Sequence[Arrival], mask: int) -> list[int | None]:
    """The places of gradients in plain PyTorch's order where the results in a mask of bits alone are differentiated."""
    # A backward runs its nodes in the order of descending sequence numbers; the last of a gradient's completes it.
    # What one node completes leaves the engine's heap in the order of slots; of three and more this is not certain.
    last = {
        i: min(steps)
        for i, arrival in enumerate(arrived)
        if arrival.place is not None
        and (steps := [(number, -slot) for number, slot, results in arrival.steps if results & mask])
    }
    place = {i: n for n, i in enumerate(sorted(last, key=lambda i: last[i], reverse=True))}
    return [place.get(i) for i in range(len(arrived))]


def lowered(module: fx.GraphModule, lower: Callable[[fx.GraphModule], Boxed]) -> Boxed:
    """The function of a module; of a backward for any subset of given and of requested gradients.

    Those handed in may be None; a batch of them is refused. A `Fan` gets contributions one by one where it needs them.
    """
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    counts: dict[int, int] = output.meta.get(_APART, {})
    tangents = [i for i, node in enumerate(placeholders) if _is_tangent(node)]
    whole, again, is_anew = lower(module), when_asked(module), ANEW in module.meta
    if not counts and not tangents:
        return whole
    gradients, length = tuple(counts), len(output.args[0])  # type: ignore[arg-type]
    arrived: Sequence[Arrival] = output.meta.get(_ARRIVED, ())

    def part(wanted: tuple[int, ...], missing: tuple[int, ...]) -> fx.GraphModule:
        backward = handing_over(again(), wanted) if wanted else again()
        if missing:
            placeholders = backward.graph.find_nodes(op="placeholder")
            backward = without(backward, [placeholders[i].name for i in missing])
        if is_anew:
            backward.meta[ANEW] = partial(part, wanted, missing)
        return backward

    @cache
    def variant(wanted: tuple[int, ...], missing: tuple[int, ...]) -> Boxed:
        return lower(part(wanted, missing))

    @cache
    def places(missing: tuple[int, ...]) -> list[int | None]:
        if not missing:
            return [arrival.place for arrival in arrived]
        return places_of(arrived, sum(1 << bit for bit, i in enumerate(tangents) if i not in missing))

    @takes_one_list
    def run(inputs: list[Any]) -> Any:
        if any(isinstance(inputs[i], torch.Tensor) and functorch.is_legacy_batchedtensor(inputs[i]) for i in tangents):
            raise Unsupported(_BATCH)
        # The node that hands on contributions one by one; None outside of autograd.
        following = getattr(_current_autograd_node(), "next_functions", ())
        fan: Any = next((f for f, _ in following if isinstance(f, Fan._backward_cls)), None) if counts else None
        wanted = tuple(gradients[slot] for slot in verdicts(fan)) if fan is not None else ()
        missing = tuple(i for i in tangents if inputs[i] is None)
        results = (variant(wanted, missing) if wanted or missing else whole)(inputs)
        if following and arrived:
            hand_over_in_order(following, places(missing))
        if not wanted:
            return results
        # Leave the contributions with that node.
        results = [*results]
        further_terms = iter(results[length:])
        for i in wanted:
            terms = [results[i], *(next(further_terms) for _ in range(counts[i] - 1))]
            results[i] = next((term for term in terms if term is not None), None)
            fan.terms[gradients.index(i)] = terms
        return results[:length]

    return run


def handing_over(module: fx.GraphModule, gradients: Sequence[int]) -> fx.GraphModule:
    """Make a backward return the first term of some sums in their place, and the further terms at the end."""
    graph, output = fx.Graph(), module.graph.output_node()
    copies: dict[fx.Node, Any] = {}
    graph.graph_copy(module.graph, copies)
    results: Any = list(output.args[0])  # type: ignore[arg-type]
    further_terms: list[fx.Node] = []
    for i in gradients:
        terms = terms_of(results[i], output.meta[_APART][i])
        assert terms is not None
        results[i] = terms[0]
        further_terms += terms[1:]
    outputs = tuple(copies[n] if isinstance(n, fx.Node) else n for n in (*results, *further_terms))
    graph.output(outputs).meta = output.meta
    return without_dead_code(module, graph)


class FanOut(Around):
    """Pass inputs with several contributions to a compiled function as aliases, to hand these over one by one.

    Where they cannot, and something else contributes first, the backward is refused.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def before(self, inputs: list[Any]) -> Any:
        """Pass inputs through a `Fan`; note them, and the edges to those whose contributions come as a sum."""
        if not torch.is_grad_enabled():
            return None
        apart, together = self._sharing.apart, self._sharing.together
        originals = [inputs[shared.position] for shared in apart]
        repeated = [tensor for tensor, shared in zip(originals, apart, strict=True) for _ in range(shared.count)]
        aliases = Fan.apply(tuple(shared.count for shared in apart), *repeated) if repeated else ()
        for shared, alias in zip(apart, aliases, strict=True):
            inputs[shared.position] = alias
        edges = [get_gradient_edge(inputs[s.position])[:2] for s in together if s is not UNKNOWN]  # a write moves them
        return {id(alias): original for alias, original in zip(aliases, originals, strict=True)}, edges

    def after(self, note: Any, args: Sequence[Any], results: Any) -> Any:
        """Give originals for aliases; refuse, in the backward, what cannot be handed over one by one."""
        if note is None:
            return results
        original, edges = note
        if self._sharing.together:
            for function in compiled_functions(results, args):
                before_backward(function, partial(_refuse_together, self._sharing.together, edges))
        return type(results)(original.get(id(result), result) for result in results)


def _refuse_together(together: Sequence[Shared], edges: Sequence[Any], node: Any, grads: Any) -> None:
    unknown = node.next_functions if UNKNOWN in together else ()
    inputs = [s for s in together if s is not UNKNOWN] + [UNKNOWN] * len(unknown)
    contributions = arrivals(node)
    before = [contributions is None or is_before(contributions[0], edge, node) for edge in (*edges, *unknown)]
    if shared := next((s for s, yes in zip(inputs, before, strict=True) if yes), None):
        raise Unsupported(
            f"{shared.name} is used more than once within the compiled step, and once more after it, in this "
            "backward. Plain PyTorch adds all these contributions to its gradient one after the other; here those "
            "of the step are known only as a sum, because the step overwrites its memory or returns a view of it. "
            "Write to a copy or return a copy, x.clone(), or compute the other part within the step."
        )
