"""Calls that log and print are left out of a compiled step; what it raises leaves it as in plain PyTorch.

The assertions of the models here are compared as Python makes them: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkmate
from checkmate.backends.tensor_state import same_bits

logger = logging.getLogger("tests.model")
_SPEAKS = re.compile(r"^ +(logger\.(warn|info|log)|logging\.|print|warnings|    logger)")
X = torch.linspace(-1, 2, 16).view(4, 4)


@pytest.fixture(autouse=True)
def _forgotten(one_thread: None) -> Any:
    yield
    torch._dynamo.reset()


def _compiled(step: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")


weight = torch.linspace(1, 2, 4).requires_grad_()


def speaking(x: Tensor) -> Tensor:
    """Says what models say, in each way that they do."""
    logger.warning("rows %d", x.shape[0])
    logger.info(f"mean {x.mean():.3f}, {x.sum().item():.1f}")
    logger.info(f"{x.sum().item():.1f}")
    logger.info("above %d of %s", (x > 0).sum().item(), x)
    logger.log(logging.ERROR, "at its own level")
    logging.getLogger("tests.other").error("of another")
    logging.warning("of the root")
    if logger.isEnabledFor(logging.INFO):
        logger.info("enabled")
    print("rows", x.shape[0], [x.sum()], sep=": ")  # noqa: T201
    warnings.warn("an old setting", FutureWarning, stacklevel=1)
    return (weight * x).tanh().sum()


LINES = [number for number, line in enumerate(inspect.getsource(speaking).splitlines()) if _SPEAKS.search(line)]


def _by_name(x: Tensor) -> Any:
    options = {"budget": "1 MB", "profile": "roofline:h100"}
    return torch.compile(speaking, backend="checkmate", options=options, dynamic=False)(x)


CAPTURING: dict[str, Callable[[Tensor], Any]] = {
    "compile": lambda x: _compiled(speaking)(x),
    "trace": lambda x: checkmate.trace(speaking, x, profile="roofline:h100"),
    "explain": lambda x: checkmate.explain(speaking, x, profile="roofline:h100").problem,
    "by name": _by_name,
}


def _left_out(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The lines of `speaking` of which checkmate says that they are left out; nobody else has said anything."""
    first, said = speaking.__code__.co_firstlineno, [record.getMessage() for record in caplog.records]
    assert not [record for record in caplog.records if not record.name.startswith("checkmate")]
    found = (re.match(rf"{re.escape(__file__)}:(\d+) in speaking: .* leaves out", text) for text in said)
    return [int(one[1]) - first for one in found if one]


@pytest.mark.parametrize("way", CAPTURING)
def test_it_is_left_out_and_that_is_said_once(
    way: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], found_by_name: None
) -> None:
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as warned:
        assert CAPTURING[way](X) is not None
    assert _left_out(caplog) == LINES
    levels = {record.getMessage().rpartition(" ")[2]: record.levelname for record in caplog.records}
    assert [(who, level) for who, level in levels.items() if level == "WARNING"] == [("print", "WARNING")]
    assert "rows" not in capsys.readouterr().out
    assert not [w for w in warned if w.category is FutureWarning]


@pytest.mark.filterwarnings("ignore:an old setting")
def test_a_compiled_step_is_silent_and_its_numbers_are_plain_ones(caplog: pytest.LogCaptureFixture) -> None:
    compiled = _compiled(speaking)
    with caplog.at_level(logging.INFO):
        compiled(X)
        caplog.clear()
        found = compiled(X).detach()
        compiled(X[:3])  # is captured anew
        assert _left_out(caplog) == []
        assert same_bits(found, speaking(X).detach())


def test_a_number_that_changes_is_no_reason_to_capture_again_where_it_is_only_logged() -> None:
    class Counting(nn.Linear):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            logger.info("call %d", self.count)
            return super().forward(x)

    model = Counting(4, 4)
    compiled = _compiled(model)
    for count in range(3):
        compiled.count = count
        compiled(X)
    assert len(compiled.plans) == 1


class Refusal(ValueError):
    """An exception of the user's own, which hands another text on."""

    def __init__(self, rows: int, *, why: str) -> None:
        super().__init__(f"{rows} rows: {why}")
        self.rows = rows


class Model(nn.Module):
    """Raises in each way that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        self.calls.add_(1)
        assert x.shape[0] <= 4, f"{x.shape[0]} rows are too many"
        if way == "an error":
            raise ValueError("no such way", 3)
        if way == "of the user's own":
            raise Refusal(x.shape[0], why="because")
        if way == "without words":
            raise NotImplementedError
        if way == "from another":
            try:
                self.nonesuch()
            except AttributeError as error:
                raise RuntimeError("no such part") from error
        if way == "of tensors":
            assert (x < 1).all(), f"up to {x.max()}, {x.sum().item():.3f}"
        if way == "a check":
            torch._check_tensor_all(x < 1, lambda: f"of {x.shape[0]} rows")
        loss: Tensor = self.linear(x).sum()
        return loss


WAYS = ["an error", "of the user's own", "without words", "from another", "of tensors", "a check"]


def _raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one, is the question
        call()
    return caught.value


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_comes_through_as_it_is(way: str) -> None:
    model = Model()
    compiled = _compiled(model)
    expected, twin = _raised(lambda: copy.deepcopy(model)(X, way)), copy.deepcopy(model)
    found = _raised(lambda: compiled(X, way))
    assert type(found) is type(expected)
    assert found.args == expected.args
    assert str(found) == str(expected)
    assert getattr(found, "rows", None) == getattr(expected, "rows", None)
    assert repr(found.__cause__) == repr(expected.__cause__)
    assert all(same_bits(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


def test_a_right_call_works_before_and_after() -> None:
    model = Model()
    compiled, twin = _compiled(model), copy.deepcopy(model)
    for _ in range(2):
        assert same_bits(compiled(X).detach(), twin(X).detach())
        with pytest.raises(AssertionError) as caught:
            compiled(torch.cat([X, X]))
        assert str(caught.value) == "8 rows are too many"
        assert "test_logging_calls.py" in "".join(getattr(caught.value, "__notes__", ["test_logging_calls.py"]))
    assert same_bits(model.calls, twin.calls)
    assert len(compiled.plans) == 1


def test_an_exception_that_the_step_handles_is_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        try:
            raise Refusal(x.shape[0], why="because")
        except Refusal as error:
            return (weight * x).sum() * error.rows

    assert same_bits(_compiled(step)(X).detach(), step(X).detach())


def test_what_python_raises_is_refused_with_its_text() -> None:
    with pytest.raises(
        checkmate.Unsupported, match=r"KeyError: .*missing.* is raised here(.|\n)*test_logging_calls\.py"
    ):
        _compiled(lambda x: (weight * x).sum() * {}["missing"])(X)


def test_explain_says_what_is_raised() -> None:
    found = checkmate.explain(Model(), X, "an error", profile="roofline:h100")
    assert not found.can_be_planned
    assert "no such way" in found.reason
