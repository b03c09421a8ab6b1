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
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, assert_refused, compiled

pytestmark = pytest.mark.usefixtures("forgotten", "one_thread")

logger = logging.getLogger("tests.model")
_SPEAKS = re.compile(r"^ +(logger\.(warn|info|log)|logging\.|print|warnings|    logger)")
X = torch.linspace(-1, 2, 16).view(4, 4)
weight = torch.linspace(1, 2, 4).requires_grad_()


def speaking(x: Tensor) -> Tensor:
    """Log, print and warn in each way that models do."""
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
OPTIONS = {"budget": "1 MB", "profile": "roofline:h100"}
CAPTURING: dict[str, Callable[[Tensor], Any]] = {
    "compile": lambda x: compiled(speaking)(x),
    "trace": lambda x: checkmate.trace(speaking, x, profile="roofline:h100"),
    "explain": lambda x: checkmate.explain(speaking, x, profile="roofline:h100").problem,
    "by name": lambda x: torch.compile(speaking, backend="checkmate", options=OPTIONS, dynamic=False)(x),
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
    run = compiled(speaking)
    with caplog.at_level(logging.INFO):
        run(X)
        caplog.clear()
        found = run(X)
        run(X[:3])  # is captured anew
        assert _left_out(caplog) == []
        assert_same_bits(found, speaking(X))


class Refusal(ValueError):
    """An exception of the user's own, which hands another text on."""

    def __init__(self, rows: int, *, why: str) -> None:
        super().__init__(f"{rows} rows: {why}")
        self.rows = rows


class Model(nn.Linear):
    """Counts its calls, logs their number and raises, in each way that models do."""

    count = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, way: str = "") -> Tensor:
        self.calls.add_(1)
        logger.info("call %d", self.count)
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
        return super().forward(x).sum()


def _raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one, is the question
        call()
    return caught.value


@pytest.mark.parametrize(
    "way", ["an error", "of the user's own", "without words", "from another", "of tensors", "a check"]
)
def test_an_exception_comes_through_as_it_is(way: str) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    errors = _raised(lambda: copy.deepcopy(model)(X, way)), _raised(lambda: compiled(model)(X, way))
    expected, found = ((type(e), e.args, str(e), getattr(e, "rows", None), repr(e.__cause__)) for e in errors)
    assert found == expected
    assert_same_bits(model.state_dict(), twin.state_dict())


def test_a_right_call_works_before_and_after() -> None:
    """A number that is only logged may change, without another plan."""
    model = Model()
    run, twin = compiled(model), copy.deepcopy(model)
    for count in range(3):
        run.count = count
        assert_same_bits(run(X), twin(X))
        with pytest.raises(AssertionError) as caught:
            run(torch.cat([X, X]))
        assert str(caught.value) == "8 rows are too many"
        assert "test_logging_calls.py" in "".join(getattr(caught.value, "__notes__", ["test_logging_calls.py"]))
    assert_same_bits(model.calls, twin.calls)
    assert len(run.plans) == 1


def test_an_exception_that_the_step_handles_is_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        try:
            raise Refusal(x.shape[0], why="because")
        except Refusal as error:
            return (weight * x).sum() * error.rows

    assert_as_plain(step, X, leaves=[weight])


def test_what_python_raises_is_refused_with_its_text_and_explained() -> None:
    words = r"KeyError: .*missing.* is raised here(.|\n)*test_logging_calls\.py"
    assert_refused(lambda x: (weight * x).sum() * {}["missing"], X, words=words)
    found = checkmate.explain(Model(), X, "an error", profile="roofline:h100")
    assert not found.can_be_planned
    assert "no such way" in found.reason
