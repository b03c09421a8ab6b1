"""Let ops write over inputs that die there, as planned, if nothing else can see it.

A plan's modules are functional: an op that writes over an input stands there as in the captured graph, with a mark.
Whatever makes another module of one, for gradients that are not defined or are handed out in pieces, copies the marks.
When code is written, a marked op becomes a call that writes, where nothing in this very module reads the storage
afterwards. That is told by the storages of the fake tensors, not by the plan.

What else could see a write is looked for at each call. Saved tensors are another's too where the graph is retained for
a second backward, a hook of the user's keeps what is saved, or somebody has asked autograd's graph for it: then the
backward writes over none of them. Modes that watch each op may keep what it made: under them nothing is written over,
nor where a batch of gradients is handed in as one. Bits are the same in each case; only bytes are not.

Nothing is freed by a write, so streams of a device need not be told of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from checkmate.capture.fusion.kernels import Kernel
from checkmate.capture.inplace.rules import call_over, positions
from checkmate.capture.nodes import is_view, storages
from checkmate.codegen.boxed import Boxed, Calls, Detached, boxed, takes_one_list, when_asked
from checkmate.errors import SolverError
from checkmate.torch_internals.running import (
    NAMES,
    DeviceContext,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _storage_Use_Count,
    functorch,
)

aten = torch.ops.aten
_AOT_AUTOGRAD = "torch._functorch._aot_autograd.runtime_wrappers"
OVER = "writes_over"  # in a node's meta data: the position of the argument that its op writes over
IN_PLACE_OF = "in_place_of"  # in a node's: storages of sums that are only this term, where the others are undefined
OWN = "is_own"  # in a placeholder's: what the forward has made for the backward alone
_SAVED = "writes_over"  # in a module's, all of whose marked ops can write: positions of the inputs that they write over
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and NAMES.has("_storage_Use_Count")


def refuse_unwritable(module: fx.GraphModule) -> None:
    """Raise a `SolverError` if an op is marked to overwrite a value that is still read, or not the step's own."""
    allowed, module.meta[_SAVED] = _writes_and_saved(module.graph)
    for node in module.graph.nodes:
        if OVER in node.meta and node not in allowed:
            over = node.args[node.meta[OVER]]
            raise SolverError(f"The plan has {node.name} write over {over}, which is needed afterwards.")


def prepare(module: fx.GraphModule) -> None:
    """Make what a module's marked ops need, before a step: AOTAutograd may lower the backward within one."""
    for node in module.graph.nodes:
        if OVER in node.meta and isinstance(node.target, Kernel):
            node.target.compiled(node.meta[OVER])
    _alone()


def _numbered_storages(graph: fx.Graph) -> dict[fx.Node, dict[int, int]]:
    """Number the storages of each node's tensors: an op that runs twice makes two, though its fake result is one."""
    numbered: dict[fx.Node, dict[int, int]] = {}
    input_numbers: dict[int, int] = {}
    numbers = itertools.count()
    for node in graph.nodes:
        number_of = {key: number for n in node.all_input_nodes for key, number in numbered[n].items()}
        if node.op != "call_function":
            number_of = input_numbers
        keys = [] if node.op == "output" else storages(node)
        numbered[node] = {key: number_of[key] if key in number_of else next(numbers) for key in keys}
        numbered[node] |= {key: n for key in node.meta.get(IN_PLACE_OF, ()) for n in [*numbered[node].values()]}
        if node.op != "call_function":
            input_numbers |= numbered[node]
    return numbered


def writes_of(graph: fx.Graph, *, spare: bool = False) -> dict[fx.Node, int]:
    """The marked ops that can write over their argument, with its position; ``spare``: the module's inputs."""
    return _writes(graph, _numbered_storages(graph), spare=spare)


def _writes(graph: fx.Graph, numbered: Mapping[fx.Node, Mapping[int, int]], *, spare: bool) -> dict[fx.Node, int]:
    last_read = {number: n for n in graph.nodes for a in n.all_input_nodes for number in numbered[a].values()}
    # A result that belongs to another, or whose base is not known, must not be written over.
    locked = set[int]()
    for n in graph.nodes:
        of_unknown = any(a.op == "call_function" and a.meta.get("val") is None for a in n.all_input_nodes)
        if of_unknown if n.op == "call_function" else spare or OWN not in n.meta:
            locked.update(numbered[n].values())
    writes: dict[fx.Node, int] = {}
    for node in graph.nodes:
        position = node.meta.get(OVER)
        if position is None or position not in positions(node):
            continue
        over = {*numbered[node.args[position]].values()}
        reads: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), reads.append)
        once = sum(not over.isdisjoint(numbered[n].values()) for n in reads) == 1
        if len(over) == 1 and once and over.isdisjoint(locked) and all(last_read[number] is node for number in over):
            writes[node] = position
    return writes


def _writes_and_saved(graph: fx.Graph) -> tuple[dict[fx.Node, int], list[int]]:
    """The marked ops as in `writes_of`, and the positions of the graph's inputs that they write over."""
    numbered = _numbered_storages(graph)
    writes = _writes(graph, numbered, spare=False)
    over = {number for node, i in writes.items() for number in numbered[node.args[i]].values()}  # type: ignore[index]
    inputs = enumerate(graph.find_nodes(op="placeholder") if over else ())
    return writes, [i for i, node in inputs if not over.isdisjoint(numbered[node].values())]


def calls_over(writes: Mapping[fx.Node, int]) -> Calls:
    """The calls of ops that write over the argument at a position."""
    calls = {}
    for node, position in writes.items():
        args: list[Any] = [*node.args]
        if is_view(args[position]):
            args[position] = Detached(args[position])
        calls[node] = call_over(node.target, tuple(args), node.kwargs, position)
    return calls


def run_over(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Any:
    """Run an op over the argument at a position."""
    args = (*args[:position], args[position].detach(), *args[position + 1 :])
    target, args, kwargs = call_over(target, args, kwargs, position)
    return target(*args, **kwargs)


def writing_over(module: fx.GraphModule) -> Boxed:
    """The function of a module whose marked ops write over their arguments if only this call can see it."""
    if (saved := module.meta.get(_SAVED)) is None:
        writes, saved = _writes_and_saved(module.graph)
    else:
        writes = {node: node.meta[OVER] for node in module.graph.nodes if OVER in node.meta}
    if not writes:
        return boxed(module)
    whole, again = boxed(module, calls_over(writes)), when_asked(module)

    @cache
    def sparing() -> Boxed:
        module = again()
        return boxed(module, calls_over(writes_of(module.graph, spare=True)))

    @cache
    def plain() -> Boxed:
        return boxed(again())

    @takes_one_list
    def run(inputs: list[Any]) -> Any:
        # A mode of the user's that sees each op may keep results: not that of the default device, nor that by which
        # AOTAutograd looks at custom ops in a first run.
        dispatch = _get_current_dispatch_mode_stack() if _len_torch_dispatch_stack() else ()
        function = _get_current_function_mode_stack() if _len_torch_function_stack() else ()
        if (
            functorch.maybe_current_level() is not None
            or any(type(mode).__module__ != _AOT_AUTOGRAD for mode in dispatch)
            or any(type(mode) is not DeviceContext for mode in function)
        ):
            return plain()(inputs)
        # Something else may hold one of the saved tensors, or another tensor in its storage.
        is_shared = bool(saved) and not _CAN_COUNT
        if saved and _CAN_COUNT:
            alone = _alone()
            is_shared = any(n > own for i in saved for n, own in zip(_holders(inputs, i), alone, strict=True))
        return (sparing() if is_shared else whole)(inputs)

    return run


def _holders(inputs: list[Any], i: int) -> tuple[int, int, int]:
    """Count the holders of a list entry: of the Python object, the C++ tensor, and its storage."""
    tensor_storage = inputs[i].untyped_storage()._cdata
    return sys.getrefcount(inputs[i]), inputs[i]._use_count(), _storage_Use_Count(tensor_storage)


@cache
def _alone() -> tuple[int, int, int]:
    return _holders([torch.empty(1, device="cpu")], 0)
