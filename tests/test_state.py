"""What a step can reach is found and named, and comes back as it was."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from checkmate.state import names_of, same_bits, tensors_within, unchanged


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
    assert all(map(torch.equal, [*net.state_dict().values(), x], before))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


def test_bits_tell_apart_what_numbers_do_not() -> None:
    nan, zero = torch.tensor(float("nan")), torch.zeros(2)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, None)


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
