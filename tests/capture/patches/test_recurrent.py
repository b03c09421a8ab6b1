"""`nn.RNN`, `nn.GRU` and `nn.LSTM` run what eager PyTorch runs, in the memory that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from tests.support.bits import assert_same_bits
from tests.support.plainly import verify_to_the_byte
from tests.support.sampling import few, long, slow

pytestmark = pytest.mark.usefixtures("one_thread")
TWO_WAYS = {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}
CASES = [
    *((nn.GRU, TWO_WAYS), (nn.LSTM, TWO_WAYS)),
    *few(3, [(kind, options) for kind in (nn.RNN, nn.GRU, nn.LSTM) for options in ({}, {"bias": False})]),
    *(long(nn.RNN, TWO_WAYS), slow(nn.RNN, {"nonlinearity": "relu"}), slow(nn.LSTM, {"proj_size": 3})),
]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_same_bits_as_eager(kind: type[nn.RNNBase], options: dict[str, Any], precision: torch.dtype) -> None:
    model = kind(5, 17, **options).to(precision)
    layers = model.num_layers * (1 + model.bidirectional)
    hidden = torch.randn(layers, 3, model.proj_size or 17, dtype=precision)
    cell, x = torch.randn(layers, 3, 17, dtype=precision), torch.randn(3, 3, 5, dtype=precision)

    def step(x: Tensor) -> Tensor:
        return model(x, (hidden, cell) if kind is nn.LSTM else hidden)[0].sin().sum()

    assert verify_to_the_byte(step, x, budget="1 MB").gradients == len([*model.parameters()])


def test_a_layer_of_an_lstm_leaves_no_graph() -> None:
    """The layer runs with gradients enabled, for the workspace, on parameters that require them."""
    model = nn.LSTM(4, 4)
    compiled = checkmate.compile(model, budget="1 MB")
    output, (hidden, cell) = compiled(torch.randn(2, 3, 4))
    assert {type(t.grad_fn).__name__ for t in (output, hidden, cell)} <= {"CompiledFunctionBackward", "ViewBackward0"}
    with torch.no_grad():
        assert_same_bits(compiled(torch.ones(2, 3, 4))[0], model(torch.ones(2, 3, 4))[0])


def test_an_lstm_without_data_is_planned() -> None:
    with torch.device("meta"):
        model, x = nn.LSTM(4, 8, num_layers=2), torch.randn(2, 3, 4)
    estimated = checkmate.trace(lambda x: model(x)[0].sum(), x, profile="roofline:laptop")
    assert [op.target for op in estimated.graph.ops].count("checkmate.lstm_layer") == 2


def test_the_workspaces_of_an_lstm_are_planned() -> None:
    """They are most of what it keeps for its backward."""
    model, x = nn.LSTM(32, 64, num_layers=4), torch.randn(20, 4, 32)
    problem = checkmate.trace(lambda x: model(x)[0].sin().sum(), x)
    smallest = checkmate.min_budget(problem).peak
    assert verify_to_the_byte(lambda x: model(x)[0].sin().sum(), x, budget=smallest).measured_peak == smallest
    assert smallest < 0.7 * problem.keep_all_peak
