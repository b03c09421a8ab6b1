"""The certificate passes what is right and catches what is wrong."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate
from checkmate.capture import rewrite
from checkmate.codegen import boxed as runtime
from checkmate.codegen.boxed import takes_one_list
from checkmate.errors import VerificationError
from checkmate.memory import MemoryUse
from checkmate.verification import compare as verification
from checkmate.verification.compare import StepState, compare_with_spread, distance, names_that_differ
from tests.support.bits import assert_same_bits

Patch = pytest.MonkeyPatch
Step = Callable[..., Tensor]
Run = Callable[[list[Any]], Any]
Change = Callable[[Run, list[Any], bool], Any]  # runs a module's code otherwise; whether it is a backward
REDRAWN = lambda mask, p, dtype: torch.rand(mask.shape).lt(p).to(dtype).div_(p)  # noqa: E731
SCALED_OTHERWISE = lambda mask, p, dtype: mask.to(dtype).div_(p - 0.1)  # noqa: E731
X, Y = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 4


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))


@pytest.fixture
def step(net: nn.Module) -> Step:
    return lambda x, y: F.cross_entropy(net(x), y)


def _tight(step: Step) -> int:
    return checkmate.min_budget(checkmate.trace(step, X, Y)).peak


@pytest.mark.slow
def test_passes_and_leaves_no_trace(net: nn.Module, step: Step) -> None:
    twin = copy.deepcopy(net)
    compiled = checkmate.compile(step, budget=_tight(step), verify=True)
    torch.manual_seed(5)
    compiled(X, Y).backward()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    F.cross_entropy(twin(X), Y).backward()
    assert_same_bits(torch.get_rng_state(), state)
    assert_same_bits((p.grad for p in net.parameters()), (p.grad for p in twin.parameters()))
    assert_same_bits(net.buffers(), twin.buffers())


def _run_instead(monkeypatch: Patch, change: Change) -> None:
    """Have each module run otherwise."""
    boxed = runtime.boxed

    def changed(module: torch.fx.GraphModule) -> Run:
        run = boxed(module)
        is_backward = any(node.meta.get("autograd_backward") for node in module.graph.nodes)
        return takes_one_list(lambda inputs: change(run, inputs, is_backward))

    monkeypatch.setattr("checkmate.backends.compilation.writing_over", changed)


def _with_gradients(wrong: Callable[[Tensor], Tensor | None]) -> Change:
    spoiled = lambda grads: tuple(grad if grad is None else wrong(grad) for grad in grads)  # noqa: E731
    return lambda run, inputs, is_backward: spoiled(run(inputs)) if is_backward else run(inputs)


def _next_bit(grad: Tensor) -> Tensor:
    return torch.nextafter(grad, torch.full_like(grad, 9.0))


def _beside(make: Callable[[], Any]) -> Change:
    """Make something first, and keep it until the code has run."""
    return lambda run, inputs, is_backward: (make(), run(inputs))[1]


OUTSIDE = r"gradient of 4\.weight of shape \(4, 32\) .* outside the graph"
FIRST = r"first value that differs is native_dropout_\w+ of .*3 \(Dropout, test_compare.py:\d+\)"
CHANGED = r"native_dropout_product of aten.mul.Tensor \(3 \(Dropout.*captured as another computation"


@pytest.mark.parametrize(
    ("change", "budget", "words"),
    [
        pytest.param(_with_gradients(_next_bit), "1 MB", OUTSIDE, id="one bit off"),
        pytest.param(_with_gradients(lambda grad: None), "1 MB", "gradient", id="missing"),
        pytest.param(_beside(lambda: torch.zeros(200_000)), "500 kB", "peak", id="above the budget"),
        pytest.param(
            _beside(lambda: torch.zeros(20_000)), "10 MB", "above the predicted one", id="above the prediction"
        ),
        pytest.param(_beside(np.random.rand), "1 MB", "draws from NumPy's global gen.*Draw with torch", id="NumPy"),
        pytest.param(_beside(random.random), "1 MB", "draws from Python's random.*Draw with torch", id="Python"),
    ],
)
def test_what_a_module_does_otherwise_is_caught(
    change: Change, budget: str, words: str, step: Step, monkeypatch: Patch
) -> None:
    """`verify`, which runs the first call of a step, names it and leaves no trace in generators."""
    _run_instead(monkeypatch, change)
    state, kept = random.getstate(), np.random.get_state()  # noqa: NPY002
    with pytest.raises(VerificationError, match=words):
        checkmate.verify(step, X, Y, budget=budget)
    assert random.getstate() == state
    assert all(map(np.array_equal, np.random.get_state(), kept))  # noqa: NPY002


@pytest.mark.parametrize(
    ("scale_mask", "tight", "words"),
    [
        pytest.param(REDRAWN, True, FIRST, id="the first op that the plan spoils"),
        pytest.param(SCALED_OTHERWISE, False, CHANGED, id="the first op that the capture changed"),
    ],
)
def test_what_is_computed_otherwise_is_named(
    scale_mask: Any, tight: bool, words: str, step: Step, monkeypatch: Patch
) -> None:
    """Noise that is drawn again when it is computed again, in a plan that does so; another scale than PyTorch's."""
    monkeypatch.setattr(rewrite, "scale_mask", scale_mask)
    with pytest.raises(VerificationError, match=words):
        checkmate.compile(step, budget=_tight(step) if tight else "1 MB", verify=True)(X, Y)


def test_state_comes_back_where_the_plain_step_fails(net: nn.Module, step: Step) -> None:
    """A plain step that stops half way has changed the statistics of batch norm: they are put back."""
    before = [tensor.clone() for tensor in net.buffers()]
    calls = itertools.count()

    @torch.library.custom_op("checkmate_tests::fails_later", mutates_args=())
    def fails_later(x: Tensor) -> Tensor:
        if next(calls):
            raise RuntimeError("half way")
        return x.clone()

    fails_later.register_fake(torch.empty_like)
    fails_later.register_autograd(lambda ctx, grad: grad)
    failing = lambda x, y: fails_later(step(x, y))  # noqa: E731
    with pytest.raises(RuntimeError, match="half way"):
        checkmate.compile(failing, budget="1 MB", verify=True, profile="roofline:h100")(X, Y)
    assert next(calls) == 2  # the compiled step, which plans, and the plain one
    assert_same_bits(net.buffers(), before)


def _wavering_sum(monkeypatch: Patch, off: float = 0.0) -> Callable[[Tensor], Tensor]:
    """A sum that comes out otherwise at each call, as one added atomically does; ``off`` more where it is compiled."""
    compiled = {"running": False}
    turns = itertools.cycle([0.0, 1e-4, -1e-4, 2e-4])

    @torch.library.custom_op("checkmate_tests::wavering_sum", mutates_args=())
    def wavering_sum(x: Tensor) -> Tensor:
        return x.sum() + next(turns) + off * compiled["running"]

    wavering_sum.register_fake(lambda x: x.new_empty(()))
    wavering_sum.register_autograd(
        lambda ctx, grad: grad.expand(ctx.shape).clone(),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
    )

    def mark(run: Run, inputs: list[Any], is_backward: bool) -> Any:
        compiled["running"] = True
        try:
            return run(inputs)
        finally:
            compiled["running"] = False

    _run_instead(monkeypatch, mark)
    return wavering_sum


def _verify_as_on_cuda(monkeypatch: Patch) -> None:
    """Compare as for a step on CUDA."""
    monkeypatch.setattr(verification, "may_waver", lambda device: True)


def test_only_cuda_may_waver_and_not_when_told_to_be_deterministic() -> None:
    assert not verification.may_waver(torch.device("cpu"))
    assert verification.may_waver(torch.device("cuda", 0))
    torch.use_deterministic_algorithms(True)
    try:
        assert not verification.may_waver(torch.device("cuda", 0))
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert verification.may_waver(torch.device("cuda", 0))
    finally:
        torch.use_deterministic_algorithms(False)


def test_where_plain_pytorch_does_not_repeat_itself_its_spread_is_allowed_and_told(
    net: nn.Module, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    _verify_as_on_cuda(monkeypatch)
    wavering_sum = _wavering_sum(monkeypatch)
    compiled = checkmate.compile(lambda x: wavering_sum(net(x).tanh()), budget="1 MB", verify=True)
    with caplog.at_level(logging.WARNING, logger="checkmate.verification"):
        compiled(X)
    (record,) = caplog.records
    for said in ("Plain PyTorch does not repeat its own numbers", "output 0 by 0.0003", "within that spread"):
        assert said in record.getMessage()


@pytest.mark.parametrize(
    ("off", "on_cuda", "words"),
    [
        (0.0, False, r"output 0 .* does not give the same bits twice.*wavering_sum"),
        (0.01, True, r"output 0 .* runs of it differ by 0.0003 at most"),
    ],
    ids=["on the CPU any", "more than the spread"],
)
def test_a_spread_is_caught(off: float, on_cuda: bool, words: str, net: nn.Module, monkeypatch: Patch) -> None:
    if on_cuda:
        _verify_as_on_cuda(monkeypatch)
    wavering_sum = _wavering_sum(monkeypatch, off=off)
    compiled = checkmate.compile(lambda x: wavering_sum(net(x).tanh()), budget="1 MB", verify=True)
    with pytest.raises(VerificationError, match=words):
        compiled(X)


@pytest.mark.slow
def test_what_plain_pytorch_repeats_must_be_equal_beside_what_it_does_not(net: nn.Module, monkeypatch: Patch) -> None:
    _verify_as_on_cuda(monkeypatch)
    wavering_sum = _wavering_sum(monkeypatch)
    monkeypatch.setattr(rewrite, "scale_mask", SCALED_OTHERWISE)
    compiled = checkmate.compile(lambda x: (wavering_sum(x), net(x)), budget="1 MB", verify=True)
    with pytest.raises(VerificationError, match=r"repeats its own bits"):
        compiled(X.clone().requires_grad_())


def _runs(gradients: dict[str, list[float]], output: float = 1.0) -> list[StepState]:
    """States after steps whose gradients have these largest elements, run by run."""
    return [
        StepState(
            outputs={"output 0": torch.tensor(output)},
            gradients={f"the gradient of {name}": torch.tensor([1.0, most]) for name, most in run.items()},
            state={},
            random={},
            use=MemoryUse(0, 0, None),
        )
        for run in (dict(zip(gradients, run, strict=True)) for run in zip(*gradients.values(), strict=True))
    ]


@pytest.mark.parametrize(
    ("weight", "bias", "error"),
    [
        ([8.0], [4.0], None),
        ([8.0], [4.0 + 4 * 2**-8], None),  # which repeats, but may be off as the other may
        ([8.0], [4.0 + 4 * 2**-8 + 0.01], r"of bias .* runs of it differ by 0 at most, and 0.0156 is allowed"),
        ([8.0 + 5 * 2**-7], [4.0], None),
        ([9.0], [4.0], r"of weight .* by 0.992 at least.* differ by 0.00781 at most, and 0.0312 is allowed"),
    ],
)
def test_where_one_gradient_wavers_all_may(weight: list[float], bias: list[float], error: str | None) -> None:
    """The weight's differ by 2 ** -10 of its largest element in five plain runs, and the bias's do not."""
    plain = _runs({"weight": [8.0, 8.0, 8.0 + 2**-7, 8.0, 8.0], "bias": [4.0] * 5})
    (found,) = _runs({"weight": weight, "bias": bias})
    with nullcontext() if error is None else pytest.raises(VerificationError, match=error):
        compare_with_spread(
            names_that_differ(plain[0], found) or ["the gradient of weight"], plain, found, found.gradients
        )


def test_outputs_and_what_repeats_everywhere_must_be_the_same() -> None:
    wavers, repeats = [8.0, 8.0 + 2**-7], [8.0, 8.0]
    for gradients, output, name in ((wavers, 1.01, "output 0"), (repeats, 1.0, "the gradient of weight")):
        plain = _runs({"weight": gradients})
        (found,) = _runs({"weight": [8.0 + 2**-7 if gradients is wavers else 8.1]}, output)
        with pytest.raises(VerificationError, match=rf"^{name} .* repeats its own bits"):
            compare_with_spread(names_that_differ(plain[0], found), plain, found, found.gradients)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0.0),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 3.0]), 2.0),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.tensor([7]), torch.tensor([9]), 2.0),
        (torch.ones(2), torch.ones(3), float("inf")),
        (torch.ones(2), None, float("inf")),
    ],
)
def test_distance(a: Tensor, b: Tensor | None, expected: float) -> None:
    assert distance(a, b) == expected


@pytest.mark.slow
def test_verify_reports_what_it_compared(net: nn.Module, step: Step) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state, budget = torch.get_rng_state(), _tight(step)
    report = checkmate.verify(step, X, Y, budget=budget)
    assert (report.outputs, report.gradients, report.tensors) == (1, 6, 6 + 3 + 2)
    assert report.repeats
    assert report.spread == 0
    assert report.measured_peak <= report.predicted_peak <= report.budget == budget < report.plain_peak
    assert_same_bits(net.state_dict(), before)
    assert_same_bits(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
    lines = str(report).splitlines()
    assert lines[0] == "verified: the same bits as plain PyTorch"
    assert "6 gradients" in lines[1]
    assert lines[-2].split()[0] == "measured"


def test_verify_takes_modules_and_keywords(net: nn.Module) -> None:
    report = checkmate.verify(net, input=X, budget="1 MB")
    assert report.measured_peak is None  # the loss is outside
    assert "not compared" in str(report)
    # what needs no gradient
    report = checkmate.verify(lambda x: x * 2, torch.ones(3), budget="1 MB")
    assert (report.gradients, report.budget) == (0, None)
