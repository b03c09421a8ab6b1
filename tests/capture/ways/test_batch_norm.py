"""A batch norm whose sums are there: PyTorch's result to the bit, and its gradient but for rounding."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from checkmate.capture.ways.batch_norm import call_of, gradient_of_input, in_two_halves, is_result, normalized
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten
BACKWARD = aten.native_batch_norm_backward.default
EPS = 1e-5
LAST: dict[str, Any] = {"memory_format": torch.channels_last}
TYPES = [  # of the input, and of weight and bias
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, None),
]


def _drawn(shape: tuple[int, ...], kinds: Any, layout: dict[str, Any], seed: int) -> tuple[Any, ...]:
    """An input, a gradient, weight and bias."""
    draw = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(shape, generator=draw).contiguous(**layout).to(kinds[0]) for _ in range(2))
    weight, bias = (torch.randn(shape[1], generator=draw) for _ in range(2))
    own = (None, None) if kinds[1] is None else (weight.to(kinds[1]), bias.to(kinds[1]))
    return 3 * x + 1, grad, *own


@pytest.mark.parametrize("kinds", TYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((8, 16, 14, 14), {}), ((8, 16, 14, 14), LAST), ((3, 5, 7, 5), LAST), ((16, 64), {}), ((2, 3, 4, 5, 6), {})],
)
def test_of_given_sums_the_result_has_pytorchs_bits_and_the_gradient_is_off_by_rounding(
    shape: tuple[int, ...], layout: dict[str, Any], kinds: Any
) -> None:
    for seed in range(3):
        x, grad, weight, bias = _drawn(shape, kinds, layout, seed)
        made, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, EPS)
        assert_same_bits(normalized(x, weight, bias, mean, invstd), made)
        for i in range(shape[0]):  # parts by images
            assert_same_bits(normalized(x[i : i + 1], weight, bias, mean, invstd), made[i : i + 1])

        about = weight, None, None, mean, invstd, True, EPS, [True, True, True]
        whole, of_weight, of_bias = aten.native_batch_norm_backward(grad, x, *about)
        count = x.numel() // shape[1]
        found = gradient_of_input(grad, x, weight, mean, invstd, of_weight, of_bias, count)
        assert found.stride() == whole.stride()
        assert found.dtype == whole.dtype
        off = (found.double() - whole.double()).abs().max() / whole.double().abs().max()
        assert off <= 4 * torch.finfo(whole.dtype).eps


def _face(node: fx.Node, i: int) -> fx.Node:
    face = node.graph.call_function(operator.getitem, (node, i))
    face.meta["val"] = node.meta["val"][i]
    return face


def _graph(mask: list[bool], *, training: bool = True) -> tuple[fx.GraphModule, fx.Node, tuple[Tensor, ...]]:
    """A batch norm's backward of which all results are returned that there are."""
    x, grad, weight, bias = _drawn((4, 6, 5, 5), TYPES[0], {}, 0)
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, EPS)
    inputs = grad, x, weight, mean, invstd
    graph = fx.Graph()
    names = [graph.placeholder(name) for name in ("grad", "x", "weight", "mean", "invstd")]
    grad_, x_, weight_, *statistics = names
    given: list[Any] = statistics if training else []
    node = graph.call_function(
        BACKWARD, (grad_, x_, weight_, *(given or statistics), *statistics, training, EPS, mask), {}
    )
    node.meta["val"] = BACKWARD(grad, x, weight, mean, invstd, mean, invstd, training, EPS, mask)
    graph.output(tuple(_face(node, i) for i, wanted in enumerate(mask) if wanted))
    return fx.GraphModule({}, graph), node, inputs


def test_a_backward_in_two_halves_has_the_sums_of_the_whole() -> None:
    module, node, inputs = _graph([True, True, True])
    whole = module(*inputs)
    halves = in_two_halves(module.graph, node)
    assert halves is not None
    assert [half.target for half in halves] == [BACKWARD, gradient_of_input]
    assert halves[0].args[-1] == [False, True, True]
    assert node not in module.graph.nodes
    module.graph.lint()
    module.recompile()
    of_input, *sums = module(*inputs)
    assert_same_bits(sums, whole[1:])
    assert (of_input - whole[0]).abs().max() <= 1e-6 * whole[0].abs().max()


@pytest.mark.parametrize(
    ("mask", "training"), [([True, False, False], True), ([False, True, True], True), ([True, True, True], False)]
)
def test_other_backwards_stay_whole(mask: list[bool], training: bool) -> None:
    module, node, _ = _graph(mask, training=training)
    assert in_two_halves(module.graph, node) is None
    assert node in module.graph.nodes


def test_a_batch_norm_is_made_of_its_statistics_where_somebody_has_them() -> None:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    target = aten._native_batch_norm_legit_functional.default
    training, evaluating = (graph.call_function(target, (*given, kind, 0.1, EPS)) for kind in (True, False))
    for norm in (training, evaluating):
        norm.meta["val"] = (torch.zeros(2, 3, 4, 4), *[torch.zeros(3)] * 4)
    result, mean = _face(training, 0), _face(training, 1)
    assert is_result(result)
    assert not is_result(mean)
    assert not is_result(_face(evaluating, 0))
    assert call_of(result) is None  # nobody has the deviation
    invstd = _face(training, 2)
    assert call_of(result) == (*given[:3], mean, invstd)
