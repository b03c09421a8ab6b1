"""Steps whose groups of ops are kernels by Inductor: bits, peaks, and what stays single ops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import checkmate
from checkmate.capture.fusion import compiling, kernels
from checkmate.errors import InfeasibleBudget, VerificationError
from checkmate.memory import measure_peak
from checkmate.profiling import trial
from checkmate.verification import compare
from tests.support.bits import assert_same_bits
from tests.support.sampling import long
from tests.support.stepping import left_by

SHARES = (1.0, 0.6)


class Block(nn.Module):
    """A norm, a gate and dropout, as a language model has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(width)), nn.Dropout(0.1)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        h = self.weight * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))


class Net(nn.Module):
    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.blocks, self.last = nn.Sequential(*(Block(width) for _ in range(layers))), nn.Linear(width, 7)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.blocks(x)).flatten(0, 1).float(), target.flatten())


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 64, 48, generator=generator), torch.randint(7, (16, 64), generator=generator)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def _fused_ops(problem: checkmate.Problem) -> list[str]:
    return [op.target for op in problem.graph.ops if op.target.startswith("checkmate.fused")]


def _check_budgets(net: nn.Module, step: Any, expected: Any, **options: Any) -> None:
    """At each budget the measured peak is the planned one, and all that a step leaves has the expected bits."""
    batch = _batch()
    problem = checkmate.trace(step, *batch, **options)
    assert _fused_ops(problem)
    for share in SHARES:
        budget = int(share * problem.keep_all_peak)
        compiled = checkmate.compile(step, budget=budget, time_limit=2.0, wait="best", verify=False, **options)
        left = left_by(compiled, net, *batch)
        (plan,) = compiled.plans
        use = measure_peak(lambda run=compiled: run(*batch).backward())
        net.zero_grad()
        assert problem.resident + use.peak == plan.peak <= budget
        assert_same_bits(left, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_pointwise_groups_have_the_bits_of_plain_pytorch_at_every_budget(net: Net, autocast: bool) -> None:
    def step(x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return net(x, target)

    _check_budgets(net, step, left_by(step, net, *_batch()), kernels="same-bits")


def test_groups_with_reductions_have_the_same_bits_at_every_budget(net: Net) -> None:
    batch = _batch()
    step = checkmate.compile(net, budget="1 GB", kernels="fused", verify=False)
    expected, plain = left_by(step, net, *batch), left_by(net, net, *batch)
    _check_budgets(net, net, expected, kernels="fused")
    for mine, theirs in zip(expected[1], plain[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_fewer_ops_keep_less_and_move_fewer_bytes() -> None:
    with torch.device("meta"):
        net, batch = Net(1024), (torch.empty(8, 512, 1024), torch.empty(8, 512, dtype=torch.long))
    eager, same, fused = (
        checkmate.trace(net, *batch, profile="roofline:h100", kernels=kernels)
        for kernels in ("eager", "same-bits", "fused")
    )
    assert eager.keep_all_cost > same.keep_all_cost > fused.keep_all_cost
    assert len(eager.graph.ops) > len(same.graph.ops) > len(fused.graph.ops)
    assert eager.keep_all_peak > max(same.keep_all_peak, fused.keep_all_peak)
    assert not _fused_ops(eager)
    assert len({*_fused_ops(fused)}) < len(_fused_ops(fused))  # blocks share theirs


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_groups_that_read_whole_numbers_have_the_bits_of_plain_pytorch(dtype: torch.dtype) -> None:
    """Positions, whose cosines Inductor may compute another way than PyTorch."""
    x, positions = torch.randn(64, 32, requires_grad=True), torch.arange(64).to(dtype)
    inverse, weight = 1e4 ** -torch.linspace(0, 1, 16), torch.randn(32, 32)

    def step(x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.cat([positions[:, None] * inverse] * 2, -1)
        return ((x @ weight) * angles.cos() + (weight @ x.t()).t() * angles.sin()).square().sum()

    compiled = checkmate.compile(step, budget="1 MB", kernels="same-bits", verify=False)
    mine, plain = compiled(x, positions), step(x, positions)
    assert_same_bits([mine, *torch.autograd.grad(mine, x)], [plain, *torch.autograd.grad(plain, x)])
    assert _fused_ops(compiled.plans[0].problem)


class Gate(nn.Module):
    """Two products with pointwise ops between them and the sum: few kernels, which tests of this file share."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ weight for weight in self.weights.unbind())
        return torch.relu(a * b + a).sum()


@pytest.fixture(scope="module")
def gate() -> Gate:
    torch.manual_seed(0)
    return Gate()


ROWS = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, long(torch.optim.AdamW)])
def test_a_whole_step_has_the_bits_of_plain_pytorch(kind: Any) -> None:
    states = []
    for planned in (False, True):
        torch.manual_seed(0)
        net = Gate()
        optimizer = kind(net.parameters(), lr=1e-2)
        step = checkmate.training_step(net, optimizer, budget="1 GB", kernels="same-bits", clip_norm=1.0)
        torch.manual_seed(1)
        for _ in range(3):
            if planned:
                step(ROWS)
            else:
                optimizer.zero_grad()
                net(ROWS).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
        states.append([*net.parameters()])
    assert_same_bits(*states)


@pytest.mark.parametrize("kernels", ["same-bits", "fused"])
def test_verify_compares_with_the_step_that_has_these_bits(gate: Gate, kernels: Any) -> None:
    found = checkmate.verify(gate, ROWS, budget="1 GB", kernels=kernels)
    assert found.repeats
    assert found.predicted_peak == found.measured_peak
    assert (found.plain_peak == found.measured_peak) == (kernels == "fused")  # which is compared with itself
    against = "the fused step that keeps everything" if kernels == "fused" else "plain PyTorch"
    assert str(found).startswith(f"verified: the same bits as {against}\n")


@pytest.mark.parametrize(("kernels", "transposed"), [("same-bits", False), ("fused", True)])
def test_a_gradient_that_is_undefined_stays_so_within_a_group(kernels: Any, transposed: bool) -> None:
    """The second result has none: a weight that only it reaches has none either, and minus zero stays minus zero."""
    made = [torch.randn(4, 4) for _ in range(2)]
    weights = [(t.t() if transposed else t).requires_grad_() for t in made]

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = weights
        shared = a * 0.5
        return (shared * 3 * x.t()).sum() * -0.0, shared * 2 + b * x.t()

    def left(step: Any) -> list[Tensor | None]:
        for weight in weights:
            weight.grad = None
        step(torch.ones(4, 4))[0].backward()
        return [weight.grad for weight in weights]

    compiled = checkmate.compile(step, budget="1 MB", kernels=kernels, verify=False)
    found, expected = left(compiled), left(step)
    assert _fused_ops(compiled.plans[0].problem)
    assert found[1] is expected[1] is None
    assert_same_bits(found[:1], expected[:1])


@pytest.mark.parametrize(("kernels", "against"), [("same-bits", "plain PyTorch"), ("fused", "the fused step")])
def test_an_error_says_what_was_compared(
    gate: Gate, kernels: Any, against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "names_that_differ", lambda expected, found: ["output 0"] * (expected is not found))
    with pytest.raises(VerificationError, match=f"^output 0 of the compiled step differs from {against}"):
        checkmate.verify(gate, ROWS, budget="1 GB", kernels=kernels)


def _gated(x: Tensor) -> Tensor:
    a, b = x @ x, x @ x.t()
    return torch.relu(a * b + a).sum()


@pytest.mark.parametrize("kernels", ["same-bits", "fused"])
def test_groups_that_do_not_fit_run_op_by_op(kernels: Any) -> None:
    """A group holds all that it reads and makes at once; in place, its ops hold two tensors."""
    x = torch.randn(128, 128, requires_grad=True)
    problem, grouped = checkmate.trace(_gated, x), checkmate.trace(_gated, x, kernels=kernels)
    least, of_groups = checkmate.min_budget(problem).peak, checkmate.min_budget(grouped).peak
    assert least < of_groups
    compiled = checkmate.compile(_gated, budget=least, kernels=kernels, verify=False)
    assert_same_bits(compiled(x), _gated(x))
    assert compiled.plans[0].peak <= least
    with pytest.raises(InfeasibleBudget) as refusal:
        checkmate.compile(_gated, budget=least // 2, kernels=kernels, verify=False)(x)
    assert refusal.value.min_budget == least
    assert checkmate.verify(_gated, x, budget=least, kernels=kernels).measured_peak == least


def test_only_groups_in_the_way_run_op_by_op() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        small = (y @ y * 2 + y).tanh()
        return _gated(x) + (small @ y).square().mean()

    x, y = (torch.randn(n, n, requires_grad=True) for n in (128, 48))
    eager, same = (checkmate.trace(step, x, y, kernels=kernels) for kernels in ("eager", "same-bits"))
    budget = int(1.02 * checkmate.min_budget(eager).peak)
    compiled = checkmate.compile(step, budget=budget, kernels="same-bits", verify=False)
    assert_same_bits(compiled(x, y), step(x, y))
    assert 0 < len(_fused_ops(compiled.plans[0].problem)) < len(_fused_ops(same))


def test_kernels_are_compiled_side_by_side() -> None:
    """Other processes leave them on disk."""
    x, factors = torch.randn(64, 64), range(2, 3 + compiling.FEW)
    keys, groups = [(f"times {n}", None) for n in factors], [_times(n) for n in factors]
    for key in keys:
        compiling._mark(compiling.capturing.cache_dir(), key).unlink(missing_ok=True)
    with compiling.capturing.inductor_config.patch(compile_threads=2):
        compiling.begin((key, group, [x], 1) for key, group in zip(keys, groups, strict=True))
    begun = [compiling._begun[key] for key in keys]
    results = [compiling.compiled(key, group, [x], 1, at) for (key, at), group in zip(keys, groups, strict=True)]
    assert [future.exception(timeout=0) for future in begun] == [None for _ in factors]
    assert_same_bits([run([x])[0] for run in results], [x * n for n in factors])


def test_halves_of_refused_groups_are_compiled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All halves of a round are sent to other processes before the first of them is tried."""
    events = list[str]()

    class Pool:
        def submit(self, function: object, folder: str, key: compiling.Key, *args: object) -> Future[None]:
            if key[1] is None:
                events.append("sent")
            done = Future[None]()
            done.set_result(None)
            return done

    def compile_two_ops(key: compiling.Key, ops: fx.GraphModule, *args: object) -> compiling.Boxed:
        if key[1] is None:
            events.append("tried")
        if len([node for node in ops.graph.nodes if node.op == "call_function"]) > 2:
            raise RuntimeError("three ops")
        run = compiling.alone(ops, key[1])
        return lambda inputs: run(*inputs)

    monkeypatch.setattr(compiling, "_kernels", {})
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(compiling, "_compile", compile_two_ops)
    monkeypatch.setattr(compiling.capturing, "AsyncCompile", SimpleNamespace(process_pool=cache(Pool)))
    monkeypatch.setattr(compiling.capturing, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(compiling.capturing, "cache_dir", lambda: str(tmp_path))

    def step(x: Tensor, y: Tensor) -> Tensor:
        a = ((x @ x * 2 + x).sin() * x + 1).cos()
        b = ((y @ y * 3 - y).cos() * y + 2).sin()
        return (a @ a).sum() + (b @ b).sum()

    x, y = (torch.randn(n, n, requires_grad=True) for n in (8, 9))
    fused = _fused_ops(checkmate.trace(step, x, y, kernels="same-bits"))
    # First the whole groups of both phases, then rounds of the backward, then those of the forward.
    rounds = [(event, len([*group])) for event, group in groupby(events)]
    halves = [(event, count) for count in (4, 8, 16, 7, 2, 4, 3) for event in ("sent", "tried")]
    assert rounds == [("sent", 6), ("tried", 4), *halves]
    names = (
        "add_sin add_cos sub_cos add_sin mul_add cos_mul sub_cos mul sub_sin neg_mul add_mul "
        "add add_mul sin_mul add_sin mul add_sin mul add_cos add_mul add"
    )
    assert [target.split(".")[1] for target in fused] == [f"fused_{name}" for name in names.split()]


def test_what_another_process_cannot_compile_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Future[None]()
    failed.set_exception(RuntimeError("the pool is broken"))
    monkeypatch.setitem(compiling._begun, ("times 9", None), failed)
    x = torch.randn(64, 64)
    (result,) = compiling.compiled("times 9", _times(9), [x], 1)([x])
    assert_same_bits(result, x * 9)


def _times(n: int) -> fx.GraphModule:
    graph = fx.Graph()
    product = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), n))
    graph.output((product,))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("rule", ["keep", "recompute"])
def test_a_rule_finds_a_tagged_value(rule: Any) -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        middle = checkmate.tag(torch.relu(x @ weight) * 2, "middle")
        return (torch.sin(middle) @ weight).square().mean()

    x = torch.randn(64, 32)
    compiled = checkmate.compile(step, budget="1 MB", kernels="fused", rules={"middle": rule}, verify=False)
    loss = compiled(x)
    loss.backward()
    tagged = [k for k, op in enumerate(compiled.plans[0].problem.graph.ops) if op.tags]
    assert len(tagged) == 1
    assert _fused_ops(compiled.plans[0].problem)
    assert (compiled.plans[0].plan.runs.count(tagged[0]) == 2) == (rule == "recompute")


def test_kernels_are_compiled_before_a_step_runs(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start has costs on disk, and kernels of its own to compile: what that allocates is not the step's."""
    for _ in range(2):
        monkeypatch.setattr(compiling, "_kernels", {})
        monkeypatch.setattr(trial, "_known", {})
        loss = checkmate.compile(gate, budget="1 GB", kernels="fused", verify=False)(ROWS)
        known = {*compiling._kernels}
        loss.backward()
        gate.zero_grad()
        assert {*compiling._kernels} == known
        assert any(over is not None for _, over in known)


@pytest.fixture
def other_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the test kernels multiply as no kernel of PyTorch's does."""
    compiled = kernels.Kernel.compiled
    monkeypatch.setattr(trial, "_known", {})

    def wrong(self: kernels.Kernel, over: int | None = None) -> Any:
        run = compiled(self, over)
        return lambda args: [
            torch.nextafter(t, torch.zeros_like(t)) if t.dtype.is_floating_point else t for t in run(args)
        ]

    monkeypatch.setattr(kernels.Kernel, "compiled", wrong)
    return


@pytest.mark.usefixtures("other_bits")
def test_a_kernel_with_other_bits_is_left_out() -> None:
    def step(x: Tensor) -> Tensor:
        return ((x @ x) * 3 + x).sum()

    x = torch.randn(32, 32, requires_grad=True)
    assert _fused_ops(checkmate.trace(step, x, kernels="fused"))
    assert not _fused_ops(checkmate.trace(step, x, kernels="same-bits"))
    compiled = checkmate.compile(step, budget="1 MB", kernels="same-bits", verify=False)
    assert_same_bits(compiled(x), step(x))


def test_without_a_compiler_ops_run_one_by_one(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compiling.capturing, "get_cpp_compiler", none)
    with caplog.at_level(logging.WARNING):
        problem = checkmate.trace(net, *_batch(), kernels="fused")
    assert not _fused_ops(problem)
    assert "run one by one" in caplog.text
    assert "No working C++ compiler found" in caplog.text


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("C++ compile error: no such header")

    monkeypatch.setattr(compiling, "_kernels", {})
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(compiling, "_compile", fail)
    x = torch.randn(32, 32, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        assert not _fused_ops(checkmate.trace(lambda x: ((x @ x) * 3 + x).sum(), x, kernels="fused"))
    assert "is not compiled, its ops run one by one: RuntimeError: C++ compile error" in caplog.text


def test_options_are_checked(net: Net) -> None:
    with pytest.raises(ValueError, match="Unknown kernels 'triton'; there are eager, same-bits, fused"):
        checkmate.compile(net, budget="1 GB", kernels="triton")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(ValueError, match="verify=True compares with plain PyTorch"):
        checkmate.training_step(net, optimizer, kernels="fused", verify=True)
