"""The backward of a step some of whose results have no gradient, without the ops that only those need.

A step may return more than is differentiated: ``loss, logits``. Plain PyTorch then leaves out what only the logits
need. AOTAutograd hands in zeros instead, which are not the same: a parameter that only they reach gets a gradient of
zeros in place of none, zero times infinity is not a number, and minus zero plus zero is plus zero. Here autograd is
told to hand in None, and the backward runs without the ops that depend on nothing else, in no more memory.

Nor does plain PyTorch come to an input that a step reads and never differentiates. A node of autograd that leads there
would call its hooks with None, so this one does not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.around import Around
from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.nodes import leaf_nodes, storages, written
from checkmate.capture.patches.small_changes import here
from checkmate.capture.rewrite import without_dead_code
from checkmate.codegen.writing_over import IN_PLACE_OF
from checkmate.errors import Unsupported
from checkmate.torch_internals.capturing import InputMutationAOTOutput, PlainAOTInput, TangentAOTInput, _is_tangent
from checkmate.torch_internals.running import OpOverload, tree_leaves

aten = torch.ops.aten
_OVERWRITTEN = (
    "A call of the compiled step reads an input that an earlier call has overwritten with what needs a gradient. It "
    "leads back into that call, whose backward has run. Detach what is written, buffer.copy_(value.detach()), or "
    "write under torch.no_grad()."
)
_WRITTEN = re.compile(r"modified by an inplace operation: (?:\[(\S+) (\[.*?\])\])?")  # as autograd says it
_Copy = tuple[fx.Node | None, bool]  # replacement, None: undefined; depends on a gradient
DEPTH = 3  # views between a result and what the compiled function returned


def keep_undefined(own: set[type], results: Sequence[Any], functions: Sequence[Any]) -> None:
    """Make autograd pass None, not zeros, to a call's backward for results without a gradient."""
    for function in functions:
        if type(function) not in own:  # each compiled function has a type of its own
            own.add(type(function))
            _need_nothing_for_nothing(function._forward_cls)
        function.set_materialize_grads(False)


def _need_nothing_for_nothing(compiled: Any) -> None:
    """Return Nones from a compiled backward if all incoming gradients are None, without touching saved tensors."""
    # So autograd comes to a step that has overwritten an input of the next one, of which nothing needs the gradient.
    # Where something does, the step's backward would run once more: plain PyTorch goes through those of its ops that
    # saved nothing.
    backward, count = compiled.backward, compiled.metadata.num_mutated_inp_runtime_indices
    shapes: list[torch.Size] = []  # of gradients that were laid out anew

    def unless_undefined(ctx: Any, *grads: Any) -> Any:
        defined = [i for i, grad in enumerate(tree_leaves(grads)) if grad is not None]  # and no tensor: it is held here
        if not defined:
            return (None,) * len(ctx.needs_input_grad)
        before, here.told = getattr(here, "told", None), shapes
        try:
            return backward(ctx, *grads)
        except RuntimeError as error:
            if match := _WRITTEN.search(str(error)):
                kind, shape = match.groups()
                which = f", a {kind} of shape {shape}," if kind else ""
                raise Unsupported(
                    f"A tensor that the backward needs{which} was written to between the step and its backward. Call "
                    "backward() before it is written to, before optimizer.step() for example; or have the step compute "
                    "from a copy, x.clone(). A plan that runs ops of the forward again needs tensors that plain "
                    "PyTorch does not: a larger budget may keep what is made of this one."
                ) from error
            if "second time" not in str(error) or max(defined) >= count:
                raise
            raise Unsupported(_OVERWRITTEN) from error
        finally:
            here.told = before

    compiled.backward = staticmethod(unless_undefined)


def unreached(joint: fx.GraphModule, results: int) -> list[int]:
    """Positions of inputs that a step reads but never differentiates, writes to, or returns undetached.

    ``results``: how many of the outputs of the joint graph are of the forward.
    """
    output = joint.graph.output_node()
    outputs: Any = output.args[0]
    descs = zip(outputs, output.meta["desc"], strict=True)
    reached = [getattr(d, "grad_of", None) for grad, d in [*descs][results:] if isinstance(grad, fx.Node)]
    if not all(isinstance(desc, PlainAOTInput) for desc in reached):  # of a tensor that several inputs are views of
        return []
    # What it returns is seen, but for views of a detached tensor.
    seen = {*storages(*(a for n in joint.graph.nodes for a in written(n)))}
    for n in leaf_nodes(outputs[:results]):
        root = n
        while isinstance(root.target, OpOverload) and root.target.is_view and root.target != aten.detach.default:
            root = root.all_input_nodes[0]
        if root.target != aten.detach.default:
            seen.update(storages(n))
    inputs = [n for n in joint.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("desc"), PlainAOTInput)]
    without_gradient = [n for n in inputs if n.meta["desc"] not in reached]
    return [n.meta["desc"].idx for n in without_gradient if seen.isdisjoint(storages(n))]


class Unreached(Around):
    """Keep a step's backward from inputs without a gradient: neither their hooks nor their makers run."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = {*positions}

    def before(self, inputs: list[Any]) -> None:
        """Detach them, unless no input would need a gradient then: results still need one."""
        needing = [i for i, tensor in enumerate(inputs) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
        if not self._positions.issuperset(needing):
            for i in self._positions.intersection(needing):
                inputs[i] = inputs[i].detach()


def compiled_functions(results: Any, args: Iterable[Any]) -> Iterator[Any]:
    """The autograd nodes of a compiled call, from its results and arguments."""
    leaves = results if isinstance(results, (list, tuple)) else tree_leaves(results)
    front: set[Any] = {t.grad_fn for t in leaves if isinstance(t, torch.Tensor)}
    argument_ids = {id(arg.grad_fn) for arg in args if isinstance(arg, torch.Tensor)}
    for _ in range(DEPTH):
        front = {f for f in front if f is not None and id(f) not in argument_ids}
        yield from (f for f in front if hasattr(getattr(f, "_forward_cls", None), "_aot_id"))
        front = {following for f in front for following, _ in f.next_functions}


class Watches(Around):
    """Give these the results and autograd nodes of each call."""

    def __init__(self, *watches: Callable[[Sequence[Any], list[Any]], None]) -> None:
        self._watches = watches

    def after(self, note: None, args: Sequence[Any], results: Any) -> Any:
        """Call them."""
        functions = [*compiled_functions(results, args)]
        for watch in self._watches:
            watch(results, functions)
        return results


def before_backward(function: Any, check: Callable[[Any, Any], None]) -> None:
    """Call ``check(node, gradients)`` before an autograd node runs; the hook does not keep the node alive."""
    node = weakref.ref(function)
    function.register_prehook(lambda grads: check(node(), grads))


def drop_gradients_of_writes(joint: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Remove from a joint graph gradients that autograd never passes in, and ops that need only these.

    They belong to new values of leaves, such as a parameter whose ``.data`` is clamped: AOTAutograd traces the step as
    if the new value had a gradient of its own, and writes it back where autograd does not see it. ``inputs`` are what
    the step is called with, in the order of what was traced.
    """
    names = set[str]()
    for n in joint.graph.find_nodes(op="placeholder"):
        desc = n.meta.get("desc")
        if isinstance(desc, TangentAOTInput) and isinstance(desc.output, InputMutationAOTOutput):
            new = desc.output.mutated_input
            if isinstance(new, PlainAOTInput) and inputs[new.idx].is_leaf and inputs[new.idx].requires_grad:
                names.add(n.name)
    if names:
        joint.graph = without(joint, names).graph
        for n in joint.graph.find_nodes(op="placeholder"):
            n.meta |= {"val": None} if n.name in names else {}


def without(module: fx.GraphModule, missing: Iterable[str]) -> fx.GraphModule:
    """A backward as autograd runs it if the gradients in these placeholders are undefined.

    What depends on none but undefined ones is undefined; a sum with one is its other term; any other op that reads both
    kinds reads zeros, as autograd's own do.
    """
    names, graph = set(missing), fx.Graph()
    copies: dict[fx.Node, _Copy] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copy = graph.node_copy(node)
        copies[node] = None if node.name in names else copy, _is_tangent(node)
    _copy_defined(module.graph, graph, copies)
    output: Any = module.graph.output_node()
    results = tuple(copies[n][0] if isinstance(n, fx.Node) else n for n in output.args[0])
    graph.output(results).meta = output.meta
    return without_dead_code(module, graph)


def _copy_defined(ops: fx.Graph, graph: fx.Graph, copies: dict[fx.Node, _Copy]) -> None:
    """Copy the ops of a graph that run if some of what they read is undefined, as ``copies`` tells of its arguments."""
    for node in ops.nodes:
        if node.op in ("placeholder", "output") or node in copies:
            continue
        gradients = [n for n in node.all_input_nodes if copies[n][1]]
        # autograd adds two gradients here; that of `torch.round` depends on none that is handed in
        is_sum = node.target is aten.add.Tensor and node.meta.get("is_gradient_acc")
        needed = node.all_input_nodes if is_sum else gradients
        if gradients and all(copies[n][0] is None for n in needed):
            copies[node] = None, True
            continue
        # A sum of two gradients, one of which is undefined, is the other; it does not broadcast or convert that.
        defined = [n for n in node.all_input_nodes if copies[n][0] is not None]
        if isinstance(node.target, Kernel) and len(defined) < len(node.all_input_nodes):
            # The ops of a group run one by one: some of its results may be undefined, and others a term of a sum.
            inner = node.target.ops.graph
            args: Any = zip(inner.find_nodes(op="placeholder"), node.args, strict=True)
            within: dict[fx.Node, _Copy] = {placeholder: copies[arg] for placeholder, arg in args}
            _copy_defined(inner, graph, within)
            results: Any = inner.output_node().args[0]
            copies[node] = None, True
            copies.update({user: within[results[user.args[1]]] for user in node.users})
            continue
        copy = None
        if node.target is aten.add.Tensor and not node.kwargs and (len(node.all_input_nodes), len(defined)) == (2, 1):
            term, total = defined[0].meta["val"], node.meta["val"]
            copy = copies[defined[0]][0] if (term.shape, term.dtype) == (total.shape, total.dtype) else None
        if copy is not None:
            copy.meta[IN_PLACE_OF] = {*copy.meta.get(IN_PLACE_OF, ()), *storages(node)}
        copies[node] = copy or graph.node_copy(node, lambda n: copies[n][0] or _zeros(graph, n)), bool(gradients)


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    val = like.meta["val"]
    kind = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
    return graph.call_function(aten.full.default, (list(val.shape), 0), kind)
