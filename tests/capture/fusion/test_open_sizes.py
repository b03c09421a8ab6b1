"""Kernels whose sizes are inputs: terms of sizes, and what a kernel of several sizes has to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from torch import Tensor

from checkmate.capture.fusion import compiling, open_sizes
from checkmate.capture.fusion.groups import is_part
from checkmate.capture.fusion.kernels import Kernel, kernel_of
from checkmate.capture.fusion.open_sizes import DEGREE, Term, may_run, note, term
from checkmate.torch_internals.capturing import FakeTensorMode
from tests.support.bits import assert_same_bits
from tests.support.kernels import compiles_from_now_on

aten = torch.ops.aten
SIZES = st.integers(2, 500)


@given(
    st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3),
    st.integers(-9, 4096),
    st.integers(1, 64),
    st.lists(st.integers(0, 2), max_size=DEGREE),
)
@settings(max_examples=300, deadline=None, database=None)
def test_a_term_gives_the_numbers_that_it_is_made_of(
    pairs: list[tuple[int, int]], constant: int, coefficient: int, factors: list[int]
) -> None:
    first, second = map(tuple, zip(*pairs, strict=True))
    truth = Term(constant, coefficient, tuple(sorted(i % len(pairs) for i in factors)))
    a, b = truth(first), truth(second)
    if a != b:
        found = term(first, second, a, b)
        assert found is not None
        assert (found(first), found(second)) == (a, b)
    else:
        assert term(first, second, a, b) == Term(a)


def test_what_no_product_of_sizes_makes_is_no_term() -> None:
    assert term((10,), (14,), 3, 4) is None
    assert term((10, 3), (10, 5), 7, 11) == Term(1, 2, (1,))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of Inductor from now on, when nothing is known."""
    return compiles_from_now_on(monkeypatch)


def _kernel(write: Callable[[fx.Graph, list[fx.Node]], list[fx.Node]], *shapes: tuple[int, ...]) -> Kernel:
    """The kernel of a group of pointwise ops of tensors of these shapes."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    with FakeTensorMode() as mode:
        for node, shape in zip(nodes, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
        graph.output(tuple(write(graph, nodes)))
        ops = [node for node in graph.nodes if node.op == "call_function"]
        for node in ops:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
        graph.output_node().meta["val"] = None
    return kernel_of([node for node in ops if not is_part(node)])[0]


def _chain(n: int, width: int = 8) -> Callable[[fx.Graph, list[fx.Node]], list[fx.Node]]:
    def write(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
        x, y = nodes
        doubled = graph.call_function(aten.mul.Tensor, (x, 2.0))
        flat = graph.call_function(aten.view.default, (doubled, [3 * n, width]))
        return [graph.call_function(aten.add.Tensor, (flat, y))]

    return write


def _at(n: int, width: int = 8) -> Kernel:
    return _kernel(_chain(n, width), (3, n, width), (3 * n, width))


def _may_run(kernel: Kernel, length: int) -> bool:
    return may_run(kernel, (length,), anew=True)


def _check(kernel: Kernel) -> None:
    args = [torch.randn(t.shape) for t in kernel.like]
    assert_same_bits(kernel(*args), kernel.ops(*args))
    assert kernel.written is not None
    for place in kernel.written.positions:
        again = [arg.clone() for arg in args]
        (made, *_) = kernel.over(*again, over=again[place])
        assert made is again[place]
        assert_same_bits(made, kernel(*args)[0])


def test_a_group_is_compiled_at_its_first_size_and_for_all_sizes_at_its_second(compiles: list[Any]) -> None:
    for length, count in ((16, 1), (12, 2), (7, 2), (2, 2), (300, 2)):
        kernel = _at(length)
        assert _may_run(kernel, length)
        kernel.compiled()
        assert len(compiles) == count
        assert (kernel.key in compiling._bound) == (length != 16)
        note(kernel, (length,), is_good=True)
    others = len(compiles)
    for length in (12, 7, 300):
        _check(_at(length))
    assert len(compiles) - others <= 2  # the variants that write over an argument


def test_a_kernel_of_other_numbers_is_another_one(compiles: list[Any]) -> None:
    for length, width in ((16, 8), (16, 6), (12, 8), (12, 6), (9, 6), (9, 8)):
        kernel = _at(length, width)
        assert _may_run(kernel, length)
        note(kernel, (length,), is_good=True)
        _check(kernel)
    names = {len(open_sizes._open[pattern]) for pattern in open_sizes._open}
    assert max(names) <= 2
    assert not _may_run(_at(9, 5), 9)  # no two sizes of this width were met, and none shows what it is at others
    assert compiles


def test_a_group_that_is_not_good_at_one_size_is_compiled_for_no_other(compiles: list[Any]) -> None:
    first, second, third = map(_at, (16, 12, 9))
    assert _may_run(first, 16)
    first.compiled()
    note(first, (16,), is_good=False)
    assert not _may_run(second, 12)
    assert not _may_run(third, 9)
    assert len(compiles) == 1


def test_a_kernel_that_is_not_good_at_its_first_trial_is_left(compiles: list[Any]) -> None:
    first, second, third = map(_at, (16, 12, 9))
    for kernel, length in ((first, 16), (second, 12)):
        assert _may_run(kernel, length)
        kernel.compiled()
        note(kernel, (length,), is_good=length == 16)
    assert not _may_run(third, 9)
    assert len(compiles) == 2


def test_what_was_assumed_of_a_size_has_to_hold(compiles: list[Any]) -> None:
    """Between a size and one less, which is one element at two: it is broadcast there, by other code."""

    def at(n: int) -> Kernel:
        def write(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
            x, y = nodes
            shown = graph.call_function(aten.expand.default, (x, [n - 1, 8]))
            return [graph.call_function(aten.add.Tensor, (graph.call_function(aten.mul.Tensor, (shown, 3.0)), y))]

        return _kernel(write, (n - 1, 8), (n - 1, 8))

    results = dict[int, Tensor]()
    for length in (16, 12, 5, 2):
        kernel = at(length)
        if _may_run(kernel, length):
            note(kernel, (length,), is_good=True)
            _check(kernel)
            results[length] = kernel(*[torch.ones(t.shape) for t in kernel.like])[0]
    assert {16, 12, 5} <= results.keys()
    assert all(result.shape == (length - 1, 8) for length, result in results.items())


def test_what_cannot_be_compiled_with_open_sizes_is_told(compiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = map(_at, (16, 12, 9))
    assert _may_run(first, 16)
    first.compiled()
    note(first, (16,), is_good=True)

    def fail(*args: object, **kwargs: object) -> None:
        raise TypeError("no such size")

    monkeypatch.setattr(open_sizes, "compiled_at_open_sizes", fail)
    with pytest.raises(RuntimeError, match="with open sizes, no such size"):
        _may_run(second, 12)
    assert not _may_run(second, 12)
    assert not _may_run(third, 9)
    assert compiles
