"""The backward of a step where some of its results have no gradient.

A step may return more than is differentiated: ``loss, logits``. Plain PyTorch then leaves out what only the logits
need. AOTAutograd hands in zeros instead, which are not the same: a parameter that only they reach gets a gradient of
zeros in place of none, zero times infinity is not a number, and minus zero plus zero is plus zero. Here autograd is
told to hand in None, and the backward runs without the ops that depend on nothing else, in no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

import torch
import torch.fx as fx
from torch._functorch.partitioners import _is_tangent
from torch.utils._pytree import tree_leaves

from checkmate.capture.rewrite import without
from checkmate.codegen.boxed import takes_one_list

DEPTH = 3  # views between a result and what the compiled function returned


def with_undefined(
    module: fx.GraphModule, boxed: Callable[[fx.GraphModule], Callable[[list[Any]], Any]]
) -> Callable[[list[Any]], Any]:
    """The function of a module, of which gradients that are handed in may be None."""
    whole = boxed(module)
    names = [node for node in module.graph.nodes if node.op == "placeholder"]
    tangents = [i for i, node in enumerate(names) if _is_tangent(node)]
    if not tangents:
        return whole

    @cache
    def without_some(missing: tuple[int, ...]) -> Callable[[list[Any]], Any]:
        return boxed(without(module, [names[i].name for i in missing]))

    @takes_one_list
    def run(inputs: list[Any]) -> Any:
        missing = tuple(i for i in tangents if inputs[i] is None)
        return without_some(missing)(inputs) if missing else whole(inputs)

    return run


def keep_undefined(run: Callable[..., Any]) -> Callable[..., Any]:
    """Have autograd hand None to a compiled function's backward where a result has no gradient, and not zeros."""
    own: set[type] = set()  # of the nodes of its calls: each compiled function has a type of its own

    @wraps(run)
    def keeping(*args: Any) -> Any:
        results = run(*args)
        direct = _functions(results)
        if not own or not all(f is None or type(f) in own for f in direct):  # the first call, or views of results
            direct = set(compiled_functions(results, args))
            own.update(map(type, direct))
        for function in direct:
            if function is not None:
                function.set_materialize_grads(False)
        return results

    return keeping


def _functions(results: Any) -> set[Any]:
    leaves = results if isinstance(results, (list, tuple)) else tree_leaves(results)
    return {t.grad_fn for t in leaves if isinstance(t, torch.Tensor)}


def compiled_functions(results: Any, args: Iterable[Any]) -> Iterator[Any]:
    """The autograd node of a compiled call, from its results and what it was called with."""
    front = _functions(results)
    given = {id(arg.grad_fn) for arg in args if isinstance(arg, torch.Tensor)}
    for _ in range(DEPTH):
        front = {f for f in front if f is not None and id(f) not in given}
        yield from filter(is_compiled, front)
        front = {following for f in front for following, _ in f.next_functions}


def is_compiled(function: Any) -> bool:
    """Whether this is the autograd node of a compiled call."""
    return hasattr(getattr(function, "_forward_cls", None), "_aot_id")
