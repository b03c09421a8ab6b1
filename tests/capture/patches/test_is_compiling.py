"""Code that asks whether it is compiled computes what it does in plain PyTorch, or a warning says that it may not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import checkmate
from checkmate.capture.patches import is_compiling as asking
from checkmate.capture.patches.is_compiling import plain_if_possible
from checkmate.capture.patches.only_our_captures import Answer
from tests.support.bits import assert_same_bits

ASKING = [
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._dynamo.is_compiling,
    torch._utils.is_compiling,
]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    asking._said.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def weight() -> Tensor:
    return torch.linspace(1, 2, 3).requires_grad_()


def _compiled(step: Any) -> Any:
    return checkmate.compile(step, budget="1 MB", time_limit=1, profile="roofline:h100")


def _uncaptured(x: Tensor) -> bool:
    torch._dynamo.graph_break()
    return bool((x > 0).all())


@pytest.mark.parametrize("is_compiling", ASKING, ids=lambda asked: f"{asked.__module__}.{asked.__name__}")
@pytest.mark.filterwarnings("ignore:.*is_compiling:UserWarning", "ignore::FutureWarning")
def test_the_answer_is_that_of_plain_pytorch(is_compiling: Callable[[], bool], weight: Tensor) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * x * (3 if is_compiling() else 1)).sum()

    x = torch.ones(3)
    expected = step(x)
    assert_same_bits(_compiled(step)(x), expected)
    if is_compiling is not torch.compiler.is_exporting:
        assert_same_bits(torch.compile(step, backend="aot_eager")(x), 3 * expected)  # others are told what they were


def test_what_is_traced_has_the_ops_of_plain_pytorch(weight: Tensor) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * x).exp().sum() if torch.compiler.is_compiling() else (weight * x).tanh().sum()

    targets = {op.target for op in checkmate.trace(step, torch.ones(3), profile="roofline:h100").graph.ops}
    assert "aten.tanh.default" in targets
    assert "aten.exp.default" not in targets


def test_the_backend_that_is_found_by_name_tells_the_same(weight: Tensor, found_by_name: None) -> None:
    def step(x: Tensor) -> Tensor:
        return (weight * x * (3 if torch.compiler.is_compiling() else 1)).sum()

    def looking(x: Tensor) -> Tensor:
        y = weight * x
        return step(y) if torch.compiler.is_compiling() or _uncaptured(y) else step(-y)

    options = {"budget": "1 MB", "profile": "roofline:h100"}
    compiled = torch.compile(step, backend="checkmate", options=options, dynamic=False)
    assert_same_bits(compiled(torch.ones(3)), step(torch.ones(3)))
    words = r"asks at .*test_is_compiling\.py:\d+ in looking"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(looking, backend="checkmate", options=options, dynamic=False)(torch.ones(3))


def test_who_cannot_be_captured_otherwise_is_told_yes_and_nobody_else(
    weight: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def step(x: Tensor) -> Tensor:
        y = weight * x
        if torch.compiler.is_compiling() or _uncaptured(x):
            y = y * 2
        return y.exp().sum() if torch.compiler.is_compiling() else y.sum()

    compiled, x = _compiled(step), torch.ones(3)
    with caplog.at_level(logging.WARNING, logger="checkmate.capture.patches.is_compiling"):
        assert_same_bits(compiled(x), step(x))
        compiled(x)
        compiled(torch.ones(2, 3))  # another graph, of which all is known
        _compiled(step)(x)  # whoever was told once knows
    (record,) = caplog.records
    said = record.getMessage()
    assert said.count("in step") == 1
    assert "test_is_compiling.py" in said
    assert "may compute other numbers" in said


def test_what_cannot_be_captured_at_all_is_refused_without_a_warning(
    weight: Tensor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def asks(x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_compiling() else x

    def step(x: Tensor) -> Tensor:
        y = asks(weight * x) + asks(x)
        return y * 2 if _uncaptured(y) else y

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: tries.append(1) or run(*args)

    monkeypatch.setattr("checkmate.backends.capture_cache.with_recurrent_modules", counted)
    compiled = _compiled(step)
    with pytest.raises(checkmate.Unsupported, match="_uncaptured"):
        compiled(torch.ones(3))
    assert len(tries) == 2
    assert not caplog.records
    assert not compiled._backend.answer.compiled


def test_the_error_is_that_of_the_way_that_plain_pytorch_goes(weight: Tensor) -> None:
    """Told that it is compiled, the code fails where plain PyTorch never is."""

    def step(x: Tensor) -> Tensor:
        sizes: Any = None if torch.compiler.is_compiling() else [3]
        y = weight * x * sizes[0]
        return y * 2 if _uncaptured(y) else y

    with pytest.raises(checkmate.Unsupported, match="_uncaptured"):
        _compiled(step)(torch.ones(3))


def test_what_a_budget_refuses_is_not_tried_again(weight: Tensor) -> None:
    answer, tries = Answer(), []

    def run() -> None:
        tries.append(1)
        answer.asked["here"] = None
        raise torch._dynamo.exc.BackendCompilerFailed(run, checkmate.Unsupported("too large"), None)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        plain_if_possible(run, answer)()
    assert len(tries) == 1


@pytest.mark.long
def test_mamba_scans_as_in_plain_pytorch() -> None:
    """Compiled it would take an associative scan, whose loss is equal and whose gradients are not."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=11, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert config.use_associative_scan
    model, tokens = transformers.MambaForCausalLM(config), torch.randint(11, (4, 8))
    report = checkmate.verify(lambda x: model(x, labels=x).loss, tokens, budget="1 GB")
    assert report.gradients == len([*model.parameters()])


def test_who_is_told_no_may_mark_tensors_for_a_compiler(weight: Tensor) -> None:
    """As caches of transformers do: it is no op, and Dynamo refuses to be called so."""

    def step(x: Tensor) -> Tensor:
        y = x.exp()
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(y)
        return (weight * y).sum()

    x = torch.ones(3)
    assert_same_bits(_compiled(step)(x), step(x))


def test_whether_a_stream_is_recorded_can_be_asked_after_processes_were_joined(weight: Tensor) -> None:
    """`torch.distributed.init_process_group` has Dynamo forget what it knows of PyTorch's functions."""
    torch._dynamo.trace_rules.clear_lru_cache()

    def is_recorded() -> bool:
        try:
            return torch.xpu.is_current_stream_capturing()
        except Exception:  # noqa: BLE001  # a build without XPU; libraries ask like this
            return False

    def step(x: Tensor) -> Tensor:
        return (weight * (x if is_recorded() else x.exp())).sum()

    x = torch.ones(3)
    assert_same_bits(_compiled(step)(x), step(x))
