"""Guards on data: evaluate ``if mask.any():`` before the step runs, and plan the step once for each set of answers.

While a step is captured, each such condition is evaluated by running what it depends on, on the tensors of that call,
and the capture goes on with the answer. It stands in the captured graph as a call of `guard_on`. At each later call the
guards are evaluated again, in order and before anything else runs. If one fails, nothing has changed yet, and
`capture_cache` takes another capture of the same step, or makes one.

A condition is not evaluated, and the step refused, where the answer cannot be had beforehand or would cost too much: it
depends on inputs that the step has overwritten in a way that is not followed, on a product of matrices, a convolution,
attention, a recurrent layer or batch norm, or on random numbers, unless these leave no doubt (``torch.rand(()) < 0``).
All else is a pass over its tensors. What the step writes to an input before the condition is written to a copy.
`patches.data_dependence` finds the conditions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from checkmate.capture.around import Around
from checkmate.capture.autocast import ENTER, EXIT, autocast_as_found
from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.nodes import is_write, memory_of, needed_by, target_name, up_to, written_by
from checkmate.capture.patches.results.strides import copied, written
from checkmate.capture.provenance import where
from checkmate.capture.random_draws import draws
from checkmate.errors import Unsupported
from checkmate.host import is_stand_in
from checkmate.torch_internals.running import HigherOrderOperator, TorchDispatchMode

WITHOUT_TENSORS = (torch.equal, torch.allclose, torch.is_nonzero)  # noqa: TID251  # no graph may hold their bools
_NO_DATA = "it depends on tensors that have no data here, fake, on the meta device, or at home on the CPU with device="
_OVERWRITTEN = "it depends on a tensor that the step has overwritten before, in a way that is not followed"
_COSTLY = ("batch_norm", "rnn", "lstm", "gru", "attention")  # in the names of ops; batch norm writes as well


class CannotTellError(Exception):
    """A condition cannot be evaluated before the step runs. The message gives the reason, as the end of a sentence."""


class GuardFailed(Unsupported):
    """A condition had another value when the step was captured. Nothing of this call has run."""

    def __init__(self, where: str, was: Any, now: Any, place: int | None = 0) -> None:
        super().__init__(
            f"{where}: the step asks for the value of a tensor, which was {was} when the step was captured and is "
            f"{now} now. checkmate.compile plans a step for each answer; a backend that torch.compile calls by its "
            "name sees one of them only."
        )
        self.where, self.was, self.now = where, was, now
        self.place = place  # among the guards of the step; None: it is of an array that is drawn, its shape


def guard_on(value: Any, answer: bool | int) -> None:
    """Mark a value that the captured step branched on, taken as constant."""


def _compare(value: Any, captured: bool | int, place: int, where: str) -> None:
    """Compare the present value of a guard with the one taken as constant; a node of the program of all guards."""
    now = type(captured)(value)
    if now != captured:
        raise GuardFailed(where, captured, now, place)


def program(ends: Sequence[fx.Node], attributes: Mapping[str, Any]) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Extract a module that computes some nodes of a captured graph, up to the last of them.

    Args:
        ends: in a graph that Dynamo captured or captures, in order. `guard_on` becomes a comparison.
        attributes: what the graph's ``get_attr`` nodes stand for.

    Returns:
        The module, and its node for each of the graph's: of an input that is written to, its copy.

    Raises:
        CannotTellError: if it depends on what is no op.
    """
    needed = set[fx.Node]().union(*(needed_by(end, _reads) for end in ends))
    overwritten = {place for n in needed if is_write(n) for a in written_by(n) for place in memory_of(a)}
    graph, copies, held = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for n in up_to(ends[-1]):
        if n.target in (ENTER, EXIT):
            copies[n] = graph.node_copy(n, copies.__getitem__)
        elif n.target is guard_on and n in needed:
            value, captured = n.args
            place = sum(end.target is guard_on for end in ends[: ends.index(n)])
            copies[n] = graph.call_function(_compare, (copies[value], captured, place, where(n)))  # type: ignore[index]
        elif n in needed:
            if n.op == "call_module" or isinstance(n.target, HigherOrderOperator):
                raise CannotTellError(f"it depends on {target_name(n)}, which cannot run on its own")
            if (sizes := _sizes(n)) is not None:
                numbers = [graph.call_method("size", (copies[size[0]], size[1])) if size else n for n, size in sizes]
                copies[n] = graph.call_function(_size_of, (numbers, isinstance(n.meta["example_value"], torch.Size)))
                continue
            copies[n] = graph.node_copy(n, copies.__getitem__)
            if n.op == "get_attr" and isinstance(n.target, str):
                held[n.target] = attributes[n.target]
            if n.op in ("placeholder", "get_attr") and memory_of(n) & overwritten:
                copies[n] = graph.call_function(copied, (copies[n],))  # for what is asked to write to
    graph.output(copies[ends[-1]])
    if not torch.cuda.is_available():
        _on_cpu(graph)
    return fx.GraphModule(held, graph), copies


def _size_of(numbers: list[int], is_shape: bool) -> Any:
    """The number, or the shape of all numbers."""
    return torch.Size(numbers) if is_shape else numbers[0]


def _sizes(node: fx.Node) -> list[tuple[Any, tuple[fx.Node, int] | None]] | None:
    """The numbers of a size or shape, each with the input and dimension that has it if it is no constant.

    None for what is no size, or one that is computed: so what has a shape need not be computed for it.
    """
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, (torch.SymInt, torch.Size)):
        return None
    inputs = ((n, n.meta.get("example_value")) for n in node.graph.find_nodes(op="placeholder"))
    shapes: list[tuple[fx.Node, int, Any]] = [
        (n, dim, size) for n, x in inputs if isinstance(x, torch.Tensor) for dim, size in enumerate(x.shape)
    ]
    sources = {size.node.expr: (n, dim) for n, dim, size in shapes if isinstance(size, torch.SymInt)}
    numbers: list[Any] = [*value] if isinstance(value, torch.Size) else [value]
    symbols = [n.node.expr for n in numbers if isinstance(n, torch.SymInt)]
    if not sources.keys() >= {*symbols}:
        return None
    return [(n, sources[n.node.expr] if isinstance(n, torch.SymInt) else None) for n in numbers]


def _reads(node: fx.Node) -> list[fx.Node]:
    """The nodes that a guard computes a node from."""
    sizes = _sizes(node)
    return node.all_input_nodes if sizes is None else [size[0] for _, size in sizes if size]


def evaluate(
    node: fx.Node, arguments: Mapping[fx.Node, Any], attributes: Mapping[str, Any], writes: Mapping[fx.Node, int]
) -> Any:
    """Evaluate a node of the graph that is being captured on the tensors of this call.

    Args:
        node: of Dynamo's graph, as far as it is; attributes: what its ``get_attr`` nodes stand for.
        arguments: what this call has for each placeholder; writes: how often the step has written to each so far.

    Raises:
        CannotTellError: if it cannot be told before the step runs.
    """
    # LayerDrop with p = 0: whatever `torch.rand(())` draws, from 0 to below 1, ``< p`` has one answer.
    draw, p = node.args if node.target is operator.lt else (None, None)
    drawn = draw.meta["example_value"] if isinstance(draw, fx.Node) and draw.target is torch.rand else None
    if drawn is not None and isinstance(p, (int, float)) and drawn.numel() == 1 and not 0 < p < 1:
        return torch.tensor(p > 0)

    # Take the program of all that it depends on; it is not followed where a write would be lost.
    module, copies = program([node], attributes)
    inputs = [n for n in copies if n.op == "placeholder"]
    without = [n for n in inputs if is_fake(arguments[n]) or is_stand_in(arguments[n])]
    if any(any(user.target != "size" for user in copies[n].users) for n in without):
        raise CannotTellError(_NO_DATA)
    # Batch norms before the node write to what they keep, without a trace.
    norms = [
        n
        for n in up_to(node)
        if n not in copies and re.search("batch_norm|instance_norm", getattr(n.target, "__name__", str(n.target)))
    ]
    statistics = {place for n in norms for a in n.all_input_nodes if a not in n.args[:1] for place in memory_of(a)}
    replayed = [n for n in inputs if copies[n].op != "placeholder"]
    is_lost = any((writes[n] and n not in replayed) or memory_of(n) & statistics for n in inputs)
    shares = any(memory_of(n) & memory_of(other) for n in replayed for other in inputs if other is not n)
    if is_lost or shares:  # copies would not share memory
        raise CannotTellError(_OVERWRITTEN)
    # Run it, and refuse where writes went otherwise than in the capture.
    values = [arguments[n] for n in inputs]
    run = fx.Interpreter(module, garbage_collect_values=False)
    run.extra_traceback = False  # errors are one sentence
    with torch.no_grad(), autocast_as_found(), _Watch(values):
        result = run.run(*values)
    if is_fake(result):
        raise CannotTellError(_NO_DATA)
    if any(run.env[copies[n]]._version - 1 != writes[n] for n in replayed):  # the first write makes the copy
        raise CannotTellError(_OVERWRITTEN)
    of_inputs = {place for n in inputs for place in memory_of(n)}
    for n, copy in copies.items():
        both: list[Any] = [run.env.get(copy), n.meta.get("example_value")]
        versions = [t._version for t in both if isinstance(t, torch.Tensor)]
        if len({*versions}) == 2 and not memory_of(n) & of_inputs:
            raise CannotTellError("it depends on a tensor that the step writes to, in a way that is not followed")
    return result


def _on_cpu(graph: fx.Graph) -> None:
    """Make on the CPU the constants that a graph makes for a GPU that is not here; inputs have no data anyway.

    A region of `torch.autocast` stays that of its device.
    """

    def moved(arg: Any) -> Any:
        is_there = isinstance(arg, (str, torch.device)) and str(arg).partition(":")[0] == "cuda"
        return torch.device("cpu") if is_there else arg

    for n in graph.nodes:
        if n.target is not ENTER:
            n.args, n.kwargs = fx.node.map_aggregate(n.args, moved), fx.node.map_aggregate(n.kwargs, moved)


class _Watch(TorchDispatchMode):
    """Stop before an op that writes to these tensors, that draws, or that costs more than a pass over its tensors."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        strided = [t for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        self.memory = {t.untyped_storage().data_ptr() for t in strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if draws(func, args, kwargs or {}):
            raise CannotTellError("it depends on random numbers that the step draws")
        if func._overloadpacket in flop_registry or any(word in name for word in _COSTLY):
            raise CannotTellError(f"it depends on {name}, which costs too much to run once more before the step")
        for t in written(func, args, kwargs or {}):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self.memory:
                raise CannotTellError("it depends on a tensor that the step overwrites")
        return func(*args, **kwargs or {})


@dataclass(frozen=True)
class DataGuards(Around):
    """The guards of a captured step, in order, which are checked before each call."""

    module: fx.GraphModule
    inputs: tuple[int, ...] = ()  # positions among the step's
    answers: tuple[bool | int, ...] = ()  # when it was captured
    places: tuple[str, ...] = ()  # in the user's code

    def before(self, inputs: Sequence[Any]) -> None:
        """Evaluate the guards in order for these inputs; raise `GuardFailed` for the first that fails."""
        with torch.no_grad(), autocast_as_found():
            self.module(*[inputs[i] for i in self.inputs])


def take_guards(module: fx.GraphModule) -> DataGuards:
    """Take the guards out of a captured graph; if they were taken before, give the same ones."""
    taken: DataGuards | None = module.meta.get("guards")
    if taken is not None:
        return taken
    # Guards that depend on inputs become one program; the markers go.
    markers = module.graph.find_nodes(op="call_function", target=guard_on)
    questions = [marker for marker in markers if depends_on_inputs(marker)]
    guards = DataGuards(fx.GraphModule({}, fx.Graph()))
    if questions:
        position = {n: i for i, n in enumerate(module.graph.find_nodes(op="placeholder"))}
        held: list[Any] = [n.target for n in module.graph.find_nodes(op="get_attr")]
        pairs: Any = [marker.args for marker in questions]
        run, copies = program(questions, {target: operator.attrgetter(target)(module) for target in held})
        guards = DataGuards(
            module=run,
            inputs=tuple(position[n] for n in copies if n.op == "placeholder"),
            answers=tuple(answer for _, answer in pairs),
            places=tuple(map(where, questions)),
        )
    for marker in markers:
        module.graph.erase_node(marker)

    # Nobody may want any more a Python number made from a tensor, or from such numbers, nor a check of what Dynamo
    # itself knows of it, such as that a truth is 0 or 1.
    numbers = (torch.SymBool, torch.SymInt, torch.SymFloat)
    for node in reversed(module.graph.nodes):
        is_made = node.op != "placeholder" and isinstance(node.meta.get("example_value"), numbers)
        is_check = node.target is torch.ops.aten._assert_scalar.default
        is_certain = is_check and str(node.args[1]).startswith("Runtime assertion")
        if not node.users and (is_made or is_certain or node.target in WITHOUT_TENSORS):
            module.graph.erase_node(node)
    module.recompile()
    module.meta["guards"] = guards
    return guards


def depends_on_inputs(node: fx.Node) -> bool:
    """Tell whether a node of a graph is computed from its inputs."""
    return any(n.op == "placeholder" for n in needed_by(node, _reads))
