"""Code that asks whether it is compiled computes what it does in plain PyTorch, or a warning says that it may not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import checkmate
from checkmate.capture.patches import is_compiling as asking
from checkmate.capture.patches.is_compiling import plain_if_possible
from checkmate.capture.patches.only_our_captures import Answer
from checkmate.errors import Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_as_plain, compiled

weight = torch.linspace(1, 2, 3).requires_grad_()
X = torch.ones(3)


@pytest.fixture(autouse=True)
def _unsaid(forgotten: None) -> None:
    asking._said.clear()


def _uncaptured(x: Tensor) -> bool:
    torch._dynamo.graph_break()
    return bool((x > 0).all())


@pytest.mark.parametrize(
    "is_compiling",
    [
        *(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting),
        *(torch._dynamo.is_compiling, torch._utils.is_compiling),
    ],
    ids=lambda asked: f"{asked.__module__}.{asked.__name__}",
)
@pytest.mark.filterwarnings("ignore:.*is_compiling:UserWarning", "ignore::FutureWarning")
def test_the_answer_is_that_of_plain_pytorch(is_compiling: Callable[[], bool]) -> None:
    def step(x: Tensor) -> Tensor:
        return ((weight * x).exp() if is_compiling() else (weight * x).tanh()).sum()

    assert_as_plain(step, X, leaves=[weight])
    targets = {op.target for op in checkmate.trace(step, X, profile="roofline:h100").graph.ops}
    assert {"aten.tanh.default", "aten.exp.default"} & targets == {"aten.tanh.default"}
    if is_compiling is not torch.compiler.is_exporting:  # others are told what they were
        assert_same_bits(torch.compile(step, backend="aot_eager")(X), (weight * X).exp().sum())


def test_the_backend_that_is_found_by_name_tells_the_same(found_by_name: None) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * x * (3 if torch.compiler.is_compiling() else 1)).sum()

    def looking(x: Tensor) -> Tensor:
        y = weight * x
        return step(y) if torch.compiler.is_compiling() or _uncaptured(y) else step(-y)

    options = {"budget": "1 MB", "profile": "roofline:h100"}
    run = torch.compile(step, backend="checkmate", options=options, dynamic=False)
    assert_as_plain(step, X, run=run, leaves=[weight])
    words = r"asks at .*test_is_compiling\.py:\d+ in looking"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(looking, backend="checkmate", options=options, dynamic=False)(X)


def test_who_cannot_be_captured_otherwise_is_told_yes_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        y = weight * x
        if torch.compiler.is_compiling() or _uncaptured(x):
            y = y * 2
        return y.exp().sum() if torch.compiler.is_compiling() else y.sum()

    run = compiled(step)
    with caplog.at_level(logging.WARNING, logger="checkmate.capture.patches.is_compiling"):
        assert_as_plain(step, X, run=run, leaves=[weight])
        run(X)
        run(torch.ones(2, 3))  # another graph, of which all is known
        compiled(step)(X)  # whoever was told once knows
    (record,) = caplog.records
    said = record.getMessage()
    assert said.count("in step") == 1
    assert all(words in said for words in ("test_is_compiling.py", "may compute other numbers"))


def _asking_twice(x: Tensor) -> Tensor:
    y = _doubled_if_compiled(weight * x) + _doubled_if_compiled(x)
    return y * 2 if _uncaptured(y) else y


def _doubled_if_compiled(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_compiling() else x


def _failing_if_compiled(x: Tensor) -> Tensor:
    """Told that it is compiled, the code fails where plain PyTorch never is."""
    sizes: Any = None if torch.compiler.is_compiling() else [3]
    y = weight * x * sizes[0]
    return y * 2 if _uncaptured(y) else y


@pytest.mark.parametrize("step", [_asking_twice, _failing_if_compiled])
def test_what_cannot_be_captured_at_all_is_refused_without_a_warning(
    step: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the way that plain PyTorch goes."""
    tries: list[int] = []
    monkeypatch.setattr(
        "checkmate.backends.capture_cache.with_recurrent_modules",
        lambda run: lambda *args: tries.append(1) or run(*args),
    )
    run = compiled(step)
    with pytest.raises(Unsupported, match="_uncaptured"):
        run(X)
    assert len(tries) == 2
    assert not caplog.records
    assert not run._run.backend.answer.compiled


def test_what_a_budget_refuses_is_not_tried_again() -> None:
    answer, tries = Answer(), []

    def run() -> None:
        tries.append(1)
        answer.asked["here"] = None
        raise torch._dynamo.exc.BackendCompilerFailed(run, Unsupported("too large"), None)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        plain_if_possible(run, answer)()
    assert len(tries) == 1


def _is_recorded() -> bool:
    try:
        return torch.xpu.is_current_stream_capturing()
    except Exception:  # noqa: BLE001  # a build without XPU; libraries ask like this
        return False


def _asking_for_a_stream(x: Tensor) -> Tensor:
    return (weight * (x if _is_recorded() else x.exp())).sum()


def _marking(x: Tensor) -> Tensor:
    """For a compiler, as caches of transformers do: it is no op, and Dynamo refuses to be called so."""
    y = x.exp()
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(y)
    return (weight * y).sum()


@pytest.mark.parametrize("step", [_marking, _asking_for_a_stream])
def test_who_is_told_no_may_do_what_is_for_plain_pytorch_only(step: Callable[[Tensor], Tensor]) -> None:
    """Holds also after processes were joined, by which Dynamo forgets what it knows of PyTorch's functions."""
    torch._dynamo.trace_rules.clear_lru_cache()
    assert_as_plain(step, X, leaves=[weight])
