"""The tensors and random states that a step can change are found and named, and come back as they were."""

from __future__ import annotations

import random
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkmate.backends.tensor_state import differing, names_of, same_bits, tensors_within, unchanged
from tests.support.bits import assert_same_bits


def test_all_that_a_step_reaches_comes_back() -> None:
    net, x = nn.BatchNorm1d(4), torch.ones(3, 4)

    def step(y: Tensor) -> Tensor:
        return net(x * y)

    assert {id(t) for t in tensors_within(step)} >= {id(t) for t in [*net.parameters(), *net.buffers()]}
    before = [t.clone() for t in [*net.state_dict().values(), x]]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with unchanged((step, x)):
        step(torch.randn(3, 4))
        x.add_(random.random() + np.random.rand())  # noqa: NPY002
    assert_same_bits([*net.state_dict().values(), x], before)
    assert_same_bits(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


def test_what_a_function_holds_is_reached() -> None:
    """Tensors are defaults, arguments given already, of the object whose method it is, or of names of its module."""
    net, other = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def step(x: Tensor, net: nn.Module = net, *, other: nn.Module = other) -> Tensor:
        return other(net(x))

    class Trainer:
        def __init__(self) -> None:
            self.net = net

        def loss(self, x: Tensor, other: nn.Module = other) -> Tensor:
            return other(self.net(x))

    everything = {id(t) for t in (*net.parameters(), *net.buffers(), *other.parameters())}
    for given in (step, partial(lambda net, other, x: other(net(x)), net, other=other), Trainer().loss):
        assert {id(t) for t in tensors_within(given)} == everything
    assert {id(t) for t in tensors_within(other.forward)} == {id(t) for t in other.parameters()}


def test_bits_tell_apart_what_numbers_do_not() -> None:
    """Tensors that are only marked as conjugate, negative or zero are read as they are seen."""
    nan, zero, z = torch.tensor(float("nan")), torch.zeros(2), torch.randn(3, dtype=torch.complex64)
    same = [(nan, nan.clone()), (z.conj(), z.conj().resolve_conj()), (z.conj().imag, -z.imag)]
    for a, b in [*same, (torch._efficientzerotensor(3), torch.zeros(3))]:
        assert same_bits(a, b)
    for a, b in [(zero, -zero), (zero, zero.double()), (zero, None), (z.conj(), z)]:
        assert not same_bits(a, b)


@pytest.mark.parametrize("x", [torch.arange(6.0)[::2], torch.ones(4)[::2][:1], torch.ones(3, 4).T, torch.ones(0)])
def test_bits_of_any_strides_are_compared(x: Tensor) -> None:
    before = x.clone()
    assert same_bits(x, before)
    assert same_bits(x, -x) == (x.numel() == 0)
    with unchanged((x,)):
        x.mul_(2).add_(1)
    assert same_bits(x, before)


def test_what_differs_in_a_tree_is_named() -> None:
    zero, nan = torch.zeros(2), float("nan")
    tree = {"loss": zero, "others": [zero, None, nan, 0.0, np.zeros(2), "text"]}
    assert differing(tree, {"others": (zero.clone(), None, nan, 0.0, np.zeros(2), "text"), "loss": zero.clone()}) == []
    assert differing(tree, {**tree, "loss": -zero}) == ["['loss']"]
    for i, other in enumerate((zero.double(), zero, 1.0, -0.0, -np.zeros(2), "texts")):
        others = [other if k == i else leaf for k, leaf in enumerate(tree["others"])]
        assert differing(tree, {"loss": zero, "others": others}) == [f"['others'][{i}]"]
    assert differing(iter([zero]), iter([zero, zero])) == ["[1]"]
    with pytest.raises(AssertionError, match=re.escape("not the same bits: ['loss']")):
        assert_same_bits(tree, {**tree, "loss": -zero})


def test_tensors_are_called_as_their_modules_call_them() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
    other, x = nn.Linear(4, 2), torch.ones(1)
    scale = {"weight": nn.Parameter(torch.ones(2))}
    state = [*net.parameters(), *net.buffers(), *other.parameters(), scale["weight"], x]
    both = lambda x: other(net(x))  # noqa: E731
    names = list(names_of(state, (both, x, net[0], scale)).values())
    assert names[:3] == ["0.weight", "0.bias", "1.weight"]
    assert names[9:] == ["weight", "bias", "tensor 11", "tensor 12"]
    twice = names_of([*other.parameters(), *net[0].parameters()], (other, net[0]))
    assert list(twice.values()) == ["weight (tensor 0)", "bias (tensor 1)", "weight (tensor 2)", "bias (tensor 3)"]
