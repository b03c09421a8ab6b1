"""Data on which a step's course depends: conditions such as ``if x.sum() > 0:``, numbers, and the sizes of ``x[mask]``.

Conditions are evaluated during capture, where Dynamo would stop. A condition is a jump (``if``, ``while``, ``and``,
``assert``), ``bool(tensor)``, a number that Python needs (``range(tensor.item())``, ``sizes[int(tensor.item())]``),
`torch.equal` and its like, or one of PyTorch's own checks (`torch._check_tensor_all`). What `guards.evaluate` cannot
tell is refused with its reason. A number that ops take is followed, whatever it is, unless a capture has failed so. An
``assert`` is a jump as any other, and raises what it says.

``x[mask]`` is as large as the mask has elements that are true, which a plan must know. Where the mask depends only on
inputs and buffers, or on random numbers, as with adapters that are chosen by the language of a sample, that number is
asked before each call, and each other number gets a plan of its own. The step then indexes by the places of these
elements: what eager PyTorch makes of a mask as well, so that the kernels that follow are the same. So is an integer
that the step reads, ``int(self.pointer)``, which a slice or a size may depend on. ``x[mask].sum()`` is captured for any
mask, and ``x * count.item()`` for any number, so this is done only where a capture has failed without
(`knowing_selections`).
"""

from __future__ import annotations

import dis
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from checkmate.capture.guards import WITHOUT_TENSORS, CannotTellError, depends_on_inputs, evaluate, guard_on
from checkmate.capture.patches.only_our_captures import (
    Answer,
    answer_now,
    follow,
    follow_function,
    follow_method,
    only_ours,
)
from checkmate.capture.provenance import where
from checkmate.torch_internals.capturing import (
    BuiltinVariable,
    InstructionTranslator,
    InstructionTranslatorBase,
    ListVariable,
    NumpyNdarrayVariable,
    ObservedException,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    UnspecializedPythonVariable,
    Unsupported,
    ValueMutationNew,
    VariableTracker,
    get_raised_exception,
    proxy_args_kwargs,
    raise_observed_exception,
    unimplemented,
    wrap_fx_proxy,
)
from checkmate.torch_internals.names import put_in_place
from checkmate.torch_internals.running import _assert, _check, _check_tensor_all, _check_tensor_all_with, _check_with

ASKS = "The step asks for the value of a tensor"
RAISED: WeakSet[Any] = WeakSet()  # exceptions that the captured code raises as plain PyTorch does
_COMPARE = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
_JUMP = re.compile(r"JUMP.*_IF_(TRUE|FALSE)")
_OF_DATA = re.compile(
    r"depends? on data|[Dd]ata.dependent|asked of a size|a number is read from|only concrete integers|cannot be told"
)


def value_now(tx: Any, node: torch.fx.Node) -> Any:
    """Evaluate a node on the tensors of this call, or raise `CannotTellError`."""
    tracer = tx.output.current_tracer
    if tracer.parent is not None or node.graph is not tracer.graph:
        raise CannotTellError("it is asked within a checkpointed part or another function that is captured by itself")
    # The tensors of this call, and how often the step has written to each so far.
    values, writes = {}, {}
    versions = iter(getattr(tracer, "_input_versions_at_beginning", ()))
    for n in node.graph.find_nodes(op="placeholder"):
        described, argument = n.meta.get("example_value"), n.meta.get("grapharg")
        writes[n] = described._version - next(versions, 0) if isinstance(described, torch.Tensor) else 0
        values[n] = None if argument is None else argument.example
    context = tx.output.tracing_context.global_context
    before = context.global_state  # in which the graph is compiled later; asked within no_grad(), it would be no_grad()
    try:
        with tx.output.restore_global_state():
            return evaluate(node, values, tx.output.nn_modules, writes)
    finally:
        context.global_state = before


def decide(tx: Any, question: VariableTracker, kind: type[bool] | type[int] = bool) -> bool | int:
    """Answer for this call, and add a guard for later calls."""
    proxy = question.as_proxy()
    try:
        value = value_now(tx, proxy.node)
    except CannotTellError as reason:
        sized = _where_sized(question)
        origin = f" It is asked of a size, which depends on data since {sized}." if sized else ""
        unimplemented(
            gb_type=ASKS,
            context=str(reason),
            explanation=f"What it asks is answered before the step runs, and this cannot be: {reason}.{origin}",
            hints=[],
        )
    try:
        answer = kind(value)
    except RuntimeError as error:  # of more than one element: plain PyTorch says the same
        raise_as_users(tx, RuntimeError, [str(error)])
    tx.output.create_proxy("call_function", guard_on, (proxy, answer), {})
    return answer


def raise_as_users(tx: Any, kind: type[Exception], args: list[Any]) -> Any:
    """Raise this in the captured code, as the same call would in plain PyTorch."""
    try:
        raise_observed_exception(kind, tx, args=args)
    except ObservedException:
        RAISED.add(get_raised_exception(tx.exn_vt_stack))
        raise


def _where_sized(question: VariableTracker) -> str | None:
    """The place where a tensor of this size was first made; None for a number read from a tensor."""
    if not isinstance(question, SymNodeVariable):
        return None
    symbols = free_unbacked_symbols(question.sym_num)
    for node in question.as_proxy().node.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value) & symbols:
            return where(node)
    return None


def is_question(value: VariableTracker | None) -> bool:
    """Tell whether the truth of this depends on a tensor's data."""
    if isinstance(value, SymNodeVariable):
        return bool(free_unbacked_symbols(value.sym_num))
    return isinstance(value, TensorVariable) and not isinstance(value, NumpyNdarrayVariable)


def _jump(plain: Callable[..., Any], self: Any, inst: Any) -> None:
    """Jump by the answer, which replaces the question on the stack."""
    value: Any = self.stack[-1].realize()
    if not is_question(value):
        plain(self, inst)
        return
    try:
        self.stack[-1] = VariableTracker.build(self, decide(self, value))
    except Unsupported:
        if self.one_graph:
            raise
        plain(self, inst)  # Dynamo breaks the graph here and goes on after it
        return
    depth = len(self.stack)
    plain(self, inst)
    if len(self.stack) == depth:  # ``a or b``: what was asked is the value
        self.stack[-1] = value


def _truth(plain: Callable[..., Any], self: Any, tx: Any) -> Any:
    """Answer ``bool(tensor)``, also of a number from a tensor."""
    return VariableTracker.build(tx, decide(tx, self)) if is_question(self) else plain(self, tx)


def _number(plain: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Make a Python number of a symbol that comes from a tensor."""
    if not is_question(self) or isinstance(self.sym_num, torch.SymFloat):
        return plain(self, *args)
    kind = bool if isinstance(self.sym_num, torch.SymBool) else int
    return decide(InstructionTranslator.current_tx(), self, kind)


def _item(plain: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Follow ``tensor.item()`` as a number; it becomes a guard once Python or a size needs it."""
    shape_env = tx.output.shape_env  # of this capture: torch.compile allows it with fullgraph=True only
    shape_env.settings = replace(shape_env.settings, allow_scalar_outputs=True)
    return _known_number(tx, self)


def _known_number(tx: Any, tensor: TensorVariable) -> VariableTracker | None:
    """The number in a one-element tensor, if sizes are asked; a float only if it is constant; else None."""
    answer: Any = answer_now()
    answer.may_ask_sizes = True
    if not answer.asks_sizes or tensor.dtype.is_complex:
        return None
    node = tensor.as_proxy().node
    try:
        value = value_now(tx, node)
    except CannotTellError:
        return None
    if value.numel() != 1:
        return None  # plain PyTorch has an error of its own
    if not tensor.dtype.is_floating_point:
        return VariableTracker.build(tx, decide(tx, tensor, bool if tensor.dtype is torch.bool else int))
    return None if depends_on_inputs(node) else VariableTracker.build(tx, value.item())


def _numbers(plain: Callable[..., Any], self: Any, tx: Any) -> Any:
    """Answer ``tensor.tolist()``, if `_known_number` knows each element."""
    if self.ndim != 1 or not isinstance(self.size[0], int):
        return plain(self, tx)
    numbers = []
    for i in range(self.size[0]):
        element = self.call_method(tx, "__getitem__", [VariableTracker.build(tx, i)], {})
        if (number := _known_number(tx, element)) is None:
            return plain(self, tx)
        numbers.append(number)
    return ListVariable(numbers, mutation_type=ValueMutationNew())


def _element(plain: Callable[..., Any], self: Any, tx: Any, place: Any) -> Any:
    """Take an element of a list or tuple; an index that is a tensor is guarded."""
    place = place.realize()
    if is_question(place) and _is_index(place):
        place = VariableTracker.build(tx, decide(tx, place, int))
    return plain(self, tx, place)


def _is_index(value: VariableTracker) -> bool:
    """Tell whether Python uses a tensor, or a number from one, as an index."""
    if isinstance(value, SymNodeVariable):
        return isinstance(value.sym_num, torch.SymInt)
    return not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool)


def _compare(function: Any, plain: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer a function of tensors that gives a Python bool; ``self`` is a tensor for a method."""
    arguments = (self, *args) if isinstance(self, TensorVariable) else args
    proxy = tx.output.create_proxy("call_function", function, *proxy_args_kwargs(arguments, kwargs))
    return VariableTracker.build(tx, decide(tx, SymNodeVariable(proxy, None)))


def _compare_draws(plain: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Compare draws of Python's generator, as PyTorch 2.13 does by itself; other operators are Dynamo's."""
    if self.fn not in _COMPARE or not any(isinstance(a, UnspecializedPythonVariable) for a in args):
        return plain(self, tx, args, kwargs)
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", self.fn, *proxy_args_kwargs(args, kwargs)))


def _check_tensor(function: Any, plain: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluate one of PyTorch's checks, whose condition may be a tensor or a number from one."""
    names = ("error_type", "cond", "message") if function.__name__.endswith("_with") else ("cond", "message")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    condition = arguments.get("cond", arguments.get("condition"))
    if condition is None or not is_question(condition := condition.realize()):
        return plain(self, tx, *args, **kwargs)
    if condition.is_tensor() and "tensor_all" in function.__name__:
        condition = condition.call_method(tx, "all", [], {})
    elif condition.is_tensor() and function is not _assert:
        return plain(self, tx, *args, **kwargs)  # no bool: an error of its own
    if decide(tx, condition):
        return VariableTracker.build(tx, None)
    # It fails: raise what it raises in plain PyTorch.
    error = arguments["error_type"].as_python_constant() if "error_type" in arguments else RuntimeError
    message = arguments.get("message", VariableTracker.build(tx, "Expected cond to be True, but got False"))
    if function is _assert:
        return raise_as_users(tx, AssertionError, [message])
    text = message if message.python_type() is str else message.call_function(tx, [], {})
    return raise_as_users(tx, error, [text])


def _translators(kind: Any = InstructionTranslatorBase) -> Iterator[Any]:
    yield kind
    for special in kind.__subclasses__():
        yield from _translators(special)


def _install() -> None:
    for translator in _translators():
        table = translator.dispatch_table
        for code, (name, handler) in enumerate(zip(dis.opname, table, strict=False)):  # past it are the compiler's own
            if _JUMP.search(name):
                table[code] = only_ours(_jump, handler)


put_in_place("branches on data", _install)
follow("_detect_and_normalize_assert_statement", lambda plain, *args: False)  # an assert is a jump as any other
follow("TensorVariable.nb_bool_impl", _truth)
follow("SymNodeVariable.nb_bool_impl", _truth)
follow("SymNodeVariable.evaluate_expr", _number)
follow("BuiltinVariable._handle_insert_op_in_graph", _compare_draws)
follow("BaseListVariable.getitem_const", _element)
follow_method("item", _item)
follow_method("tolist", _numbers)
for function in WITHOUT_TENSORS:
    follow_function(function, partial(_compare, function))
    follow_method(function.__name__, partial(_compare, function))
for check in (_check, _check_with, _check_tensor_all, _check_tensor_all_with, _assert):
    follow_function(check, partial(_check_tensor, check))


def knowing_selections(run: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    """Make captures that fail ask for the sizes of selections, and for integers that are read."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        # First without: most of it is captured for any mask.
        answer.may_ask_sizes = False
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if answer.asks_sizes or not answer.may_ask_sizes or not _OF_DATA.search(str(error)):
                raise
            refused = error
        # Then with these questions; if that fails too, the first error stands.
        answer.asks_sizes = True
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if _OF_DATA.search(str(error)):
                raise refused from None
            raise
        finally:
            answer.asks_sizes = False

    return running


def _is_mask(value: Any) -> bool:
    return value.is_tensor() and value.dtype is torch.bool and bool(value.ndim)


def _places(tx: Any, mask: Any, as_tuple: bool = True) -> Any:
    """The nonzero places of a tensor, int64 (places, dimensions), or their columns; None if unknown."""
    if not mask.ndim:
        return None
    try:
        value_now(tx, mask.as_proxy().node)
    except CannotTellError:
        return None
    answer: Any = answer_now()
    answer.may_ask_sizes = True
    if not answer.asks_sizes:
        return None
    size = decide(tx, mask.call_method(tx, "count_nonzero", [], {}), int)
    proxy = tx.output.create_proxy("call_function", torch.nonzero_static, (mask.as_proxy(),), {"size": size})
    places = wrap_fx_proxy(tx, proxy)
    return places.call_method(tx, "unbind", [VariableTracker.build(tx, 1)], {}) if as_tuple else places


def _by_place(tx: Any, key: Any) -> Any:
    """An index with places instead of masks; None if it has no known mask."""
    key = key.realize()
    indices: list[Any] = []
    has_mask = False
    for index in [item.realize() for item in (key.items if isinstance(key, TupleVariable) else [key])]:
        columns = _places(tx, index) if _is_mask(index) else None
        has_mask = has_mask or columns is not None
        indices += [index] if columns is None else columns.items
    return TupleVariable(indices) if has_mask else None


def _call_operator(plain: Callable[..., Any], self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is operator.getitem and args[0].is_tensor():  # ``x[index]``
        args = [args[0], _by_place(tx, args[1]) or args[1]]
    return plain(self, tx, args, kwargs)


def _set(plain: Callable[..., Any], self: Any, tx: Any, key: Any, value: Any) -> Any:
    """Assign ``x[mask] = y``; if y has an element for each true one, by their places."""
    value = value.realize()
    if value.is_tensor() and value.ndim:
        key = _by_place(tx, key) or key
    return plain(self, tx, key, value)


def _select(tx: Any, x: Any, mask: Any) -> Any:
    """Trace ``x.masked_select(mask)``, unless its backward lays out gradients otherwise."""
    if x.requires_grad or not _is_mask(mask.realize()) or x.size != mask.realize().size:
        return None
    places = _by_place(tx, mask)
    return None if places is None else x.call_method(tx, "__getitem__", [places], {})


def _place(tx: Any, mask: Any, as_tuple: Any = None) -> Any:
    """``mask.nonzero()``."""
    return _places(tx, mask.realize(), as_tuple is not None and as_tuple.as_python_constant())


def _place_of_true(tx: Any, mask: Any, *values: Any) -> Any:
    """``torch.where(mask)``."""
    return None if values else _places(tx, mask)


def _called(
    handler: Callable[..., Any], plain: Callable[..., Any], self: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call one of these functions; ``self`` is a tensor where it is called as its method."""
    arguments = [self, *args] if isinstance(self, TensorVariable) else [args[0].realize(), *args[1:]] if args else []
    is_known = arguments and "out" not in kwargs and arguments[0].is_tensor()
    result = handler(tx, *arguments, **kwargs) if is_known else None
    return plain(self, tx, *args, **kwargs) if result is None else result


follow("BuiltinVariable._handle_insert_op_in_graph", _call_operator)
put_in_place("x[mask]", lambda: BuiltinVariable.call_function_handler_cache.clear())  # of methods as they were
follow_method("__setitem__", _set)
follow_function(torch.where, partial(_called, _place_of_true))
for name, handler in (("masked_select", _select), ("nonzero", _place)):
    follow_function(getattr(torch, name), partial(_called, handler))
    follow_method(name, partial(_called, handler))
