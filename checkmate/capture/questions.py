"""What a step asks of its tensors, ``if mask.any():``, decided before it runs: one plan for each set of answers.

While a step is captured, each question is answered by running what it depends on, on the tensors of that call, and the
capture goes on with the answer. It stands in the captured graph as a call of `decided`. At each later call the
questions are asked again, in order and before anything else runs; on another answer nothing has changed yet, and
`captures` takes another capture of the same step, or makes one.

A question is not answered, and the step refused, where the answer cannot be had beforehand or would cost too much: it
depends on random numbers of the step, on values that the step has overwritten, or on a product of matrices, a
convolution, attention, a recurrent layer or batch norm. All else is a pass over its tensors. `predicates` asks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.fx as fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from checkmate.capture.meta_tensors import is_fake
from checkmate.capture.provenance import where
from checkmate.errors import Unsupported

WITHOUT_TENSORS = (torch.equal, torch.allclose, torch.is_nonzero)  # noqa: TID251  # no graph may hold their bools
_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_NO_DATA = "it depends on tensors that have no data here, fake or on the meta device"
_COSTLY = ("batch_norm", "rnn", "lstm", "gru", "attention")  # in the names of ops; batch norm writes as well


class AnotherAnswer(Unsupported):
    """A question was answered otherwise when the step was captured. Nothing of this call has run."""

    def __init__(self, where: str, was: bool | int, now: bool | int) -> None:
        super().__init__(
            f"{where}: the step asks for the value of a tensor, which was {was} when the step was captured and is "
            f"{now} now. checkmate.compile plans a step for each answer; a backend that torch.compile calls by its "
            "name sees one of them only."
        )
        self.where, self.was, self.now = where, was, now


class CannotTellError(Exception):
    """Why a question has no answer before the step runs: the end of a sentence."""


def decided(value: Any, answer: bool | int) -> None:
    """In a captured graph: the step asked for this value, and was captured as if it were always the answer."""


def program(node: fx.Node, attributes: Mapping[str, Any]) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """All that a node of a captured graph depends on, as a module of its own that ends with it.

    Args:
        node: in a graph that Dynamo captured or captures.
        attributes: what the graph's ``get_attr`` nodes stand for.

    Returns:
        The module, and its node for each of the graph's.

    Raises:
        CannotTellError: if it depends on what is no op: a module called as a whole, a checkpointed part.
    """
    earlier = [*_until(node)]
    needed = _needed(node, earlier)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    open_regions: list[fx.Node] = []
    for n in earlier:
        if n.target in (_ENTER, _EXIT):
            copies[n] = graph.node_copy(n, copies.__getitem__)
            open_regions = [*open_regions, copies[n]] if n.target is _ENTER else open_regions[:-1]
        elif n in needed:
            if n.op == "call_module" or isinstance(n.target, torch._ops.HigherOrderOperator):
                raise CannotTellError(f"it depends on {n.target}, which cannot run on its own")
            copies[n] = graph.node_copy(n, copies.__getitem__)
    for region in reversed(open_regions):
        graph.call_function(_EXIT, (region,))
    graph.output(copies[node])
    held = {n.target: attributes[n.target] for n in copies if n.op == "get_attr" and isinstance(n.target, str)}
    return fx.GraphModule(held, graph), copies


def _until(node: fx.Node) -> Iterable[fx.Node]:
    for n in node.graph.nodes:
        yield n
        if n is node:
            return


def _needed(node: fx.Node, earlier: Sequence[fx.Node]) -> set[fx.Node]:
    """The node, what it is computed from, and what writes to any of that before."""
    needed, memory = set[fx.Node](), set[int]()
    todo = [node]
    while todo:
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                memory.update(_memory(n))
                todo += n.all_input_nodes
        todo = [n for n in earlier if n not in needed and _writes(n) and any(_memory(a) & memory for a in _written(n))]
    return needed


def _writes(node: fx.Node) -> bool:
    """Whether the name of a function or method says that it writes. What else writes is found in `answer`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        node.target is operator.setitem
        or (getattr(operator, name, None) is node.target and name.startswith("i"))  # iadd
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("out") is not None
        or bool(node.kwargs.get("inplace"))
    )


def _written(node: fx.Node) -> list[fx.Node]:
    out = tree_leaves(node.kwargs.get("out"))
    return [a for a in (*node.args[:1], *out) if isinstance(a, fx.Node)]


def _memory(node: fx.Node) -> set[int]:
    """The memory behind the tensors of a node, by the description that Dynamo keeps of them."""
    tensors = [t for t in tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}


def answer(node: fx.Node, given: Mapping[fx.Node, Any], attributes: Mapping[str, Any], untouched: set[fx.Node]) -> Any:
    """What a node of a graph that is being captured gives, on the tensors of this call.

    Args:
        node: of Dynamo's graph, as far as it is.
        given: what this call has for each placeholder.
        attributes: what the graph's ``get_attr`` nodes stand for.
        untouched: placeholders that the step has not written to so far.

    Raises:
        CannotTellError: if it cannot be told before the step runs.
    """
    module, copies = program(node, attributes)
    inputs = [n for n in copies if n.op == "placeholder"]
    if any(is_fake(given[n]) for n in inputs):
        raise CannotTellError(_NO_DATA)
    statistics = {*_statistics(node, copies)}
    if any(n not in untouched or _memory(n) & statistics for n in inputs):
        raise CannotTellError("it depends on a tensor that the step has overwritten before")
    values = [given[n] for n in inputs]
    run = fx.Interpreter(module, garbage_collect_values=False)
    with torch.no_grad(), _Watch(values):
        found = run.run(*values)
    if is_fake(found):
        raise CannotTellError(_NO_DATA)
    of_inputs = {place for n in inputs for place in _memory(n)}
    if any(_versions_differ(n, run.env.get(copied)) for n, copied in copies.items() if not _memory(n) & of_inputs):
        raise CannotTellError("it depends on a tensor that the step writes to, in a way that is not followed")
    return found


def _versions_differ(node: fx.Node, value: Any) -> bool:
    """Whether a node's value was written to more or less often than the step has written to what it describes."""
    described = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(described, torch.Tensor):
        return False
    return value._version != described._version


def _statistics(node: fx.Node, needed: Mapping[fx.Node, Any]) -> Iterable[int]:
    """The memory of what batch norms before a node keep: they write to it without a trace."""
    for n in _until(node):
        if n not in needed and re.search("batch_norm|instance_norm", getattr(n.target, "__name__", str(n.target))):
            for argument in n.all_input_nodes:
                if argument not in n.args[:1]:
                    yield from _memory(argument)


class _Watch(TorchDispatchMode):
    """Stop before an op that draws, that writes to these tensors, or that costs more than a pass over its tensors."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        strided = [t for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        self.memory = {t.untyped_storage().data_ptr() for t in strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, or refuse to."""
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotTellError("it depends on random numbers that the step draws")
        if func._overloadpacket in flop_registry or any(word in name for word in _COSTLY):
            raise CannotTellError(f"it depends on {name}, which costs too much to run once more before the step")
        if func._schema.is_mutable:
            self._check_writes(func, args, kwargs or {})
        return func(*args, **kwargs or {})

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            for t in tree_leaves(written):
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self.memory:
                    raise CannotTellError("it depends on a tensor that the step overwrites")


@dataclass(frozen=True)
class Question:
    """What a captured step asks before it runs."""

    module: fx.GraphModule
    inputs: tuple[int, ...]  # positions among the step's
    answer: bool | int  # when it was captured
    where: str

    def ask(self, inputs: Sequence[Any]) -> bool | int:
        """The answer for these inputs of the step."""
        with torch.no_grad():
            return type(self.answer)(self.module(*[inputs[i] for i in self.inputs]))

    def check(self, inputs: Sequence[Any]) -> None:
        """Ask.

        Raises:
            AnotherAnswer: if the step was captured for another one.
        """
        now = self.ask(inputs)
        if now != self.answer:
            raise AnotherAnswer(self.where, self.answer, now)


def taken_out(module: fx.GraphModule) -> list[Question]:
    """The questions of a captured graph, which has none afterwards; the same ones where they were taken before."""
    found: list[Question] | None = module.meta.get("questions")
    if found is None:
        found = module.meta["questions"] = _take(module)
    return found


def _take(module: fx.GraphModule) -> list[Question]:
    position = {n: i for i, n in enumerate(module.graph.find_nodes(op="placeholder"))}
    attributes = {n.target: _attribute(module, n.target) for n in module.graph.find_nodes(op="get_attr")}
    questions = []
    for marker in module.graph.find_nodes(op="call_function", target=decided):
        node, known = marker.args
        asked, copies = program(node, attributes)
        inputs = tuple(position[n] for n in copies if n.op == "placeholder")
        if inputs:  # else the answer is always the same
            questions.append(Question(asked, inputs, known, where(marker)))
        module.graph.erase_node(marker)
    for node in reversed(module.graph.nodes):
        if not node.users and (_is_number(node) or _is_certain(node)):
            module.graph.erase_node(node)
    module.recompile()
    return questions


def _attribute(module: fx.GraphModule, target: Any) -> Any:
    return operator.attrgetter(target)(module)


def _is_number(node: fx.Node) -> bool:
    """Whether a node makes a Python number from a tensor, or from such numbers: nobody may want it any more."""
    kind = node.meta.get("example_value")
    numbers = (torch.SymBool, torch.SymInt, torch.SymFloat)
    return node.target in WITHOUT_TENSORS or (node.op != "placeholder" and isinstance(kind, numbers))


def _is_certain(node: fx.Node) -> bool:
    """Whether a node checks what Dynamo itself knows of a number from a tensor, such as that a truth is 0 or 1."""
    return node.target is torch.ops.aten._assert_scalar.default and str(node.args[1]).startswith("Runtime assertion")


def asking_first(run: Callable[..., Any], questions: Sequence[Question]) -> Callable[..., Any]:
    """A compiled function that first asks its questions, and runs only where all answers are as captured."""
    if not questions:
        return run

    @wraps(run)
    def asking(*inputs: Any) -> Any:
        for question in questions:
            question.check(inputs)
        return run(*inputs)

    return asking
