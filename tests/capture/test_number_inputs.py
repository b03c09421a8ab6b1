"""Sizes that depend on data are refused with the line of the code, as soon as they are known to matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import checkmate
from checkmate.backends import compilation, passes
from checkmate.errors import Unsupported
from tests.support.plainly import assert_refused

Step = Callable[[Tensor, Tensor], Tensor]
X, Y = torch.arange(1.0, 9.0), torch.tensor([1.0, -1.0] * 4)
W = torch.nn.Parameter(torch.ones(8))


def _positive(y: Tensor) -> Tensor:
    """A mask made by a product of matrices, which no question is asked of."""
    return (torch.outer(y, y) @ y[:, None])[:, 0] > 0


def _written(x: Tensor, y: Tensor) -> Tensor:
    table, places = torch.full((3, 8), -1), torch.nonzero(_positive(y)).flatten()
    table[0, : places.numel()] = places
    return (W * x).sum() + (table > 0).sum()


SIZES_OF_DATA: dict[str, Step] = {
    "selected": lambda x, y: (W * x)[_positive(y)].exp().sum(),
    "selected beside": lambda x, y: (W * x).sum() + y[_positive(y)].exp().sum(),
    "selected by draws": lambda x, y: (W * x)[torch.rand(8) < 0.5].exp().sum(),
    "written": _written,
}


@pytest.mark.parametrize("before", [True, False], ids=["before the joint graph is traced", "of the joint graph"])
@pytest.mark.parametrize("name", SIZES_OF_DATA)
def test_they_are_refused(name: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused as soon as Dynamo has captured the step; sizes that it let pass, where the joint graph holds them."""

    def trace(**options: Any) -> Any:
        raise AssertionError("AOTAutograd traces what is refused")

    if before:
        monkeypatch.setattr(compilation, "aot_autograd", trace)
    else:
        monkeypatch.setattr(passes, "refuse_sizes_of_data", lambda module: None)
    with pytest.raises(Unsupported, match=r"^test_number_inputs\.py:\d+: .* depends on data.*torch\.where"):
        checkmate.trace(SIZES_OF_DATA[name], X, Y)


def _asked(x: Tensor, y: Tensor) -> Tensor:
    """No result is computed with them."""
    torch.nonzero(y > 0)  # read by nobody
    if y[y > 0].shape[0] < 3:  # a question
        x = x + 1
    return (W * x).type_as(x[y > 0].double()).sum()


@pytest.mark.parametrize("step", [_asked, lambda x, y: (W * x).sum() + y[y > 0].sum()], ids=["asked", "added up"])
def test_what_is_fine(step: Step) -> None:
    assert checkmate.verify(step, X, Y, budget="1 MB", time_limit=1).repeats


def test_a_step_without_gradients_may_have_them() -> None:
    options: dict[str, Any] = {"backend": "checkmate", "options": {"budget": "1 MB"}}
    with torch.no_grad():
        found = torch.compile(lambda x, y: x[y > 0] + 1, fullgraph=True, **options)(X, Y)
    assert found.tolist() == [2.0, 4.0, 6.0, 8.0]


def test_a_size_of_data_that_must_be_another_is_refused() -> None:
    """Added to a tensor of six numbers, those that a mask selects must be six as well: Dynamo goes on with that."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (w[0] + y[y > 0]).sum()

    words = r"test_number_inputs\.py:\d+: the size of index depends on data"
    assert_refused(step, torch.ones(6), torch.ones(6, 6, requires_grad=True), words=words)
