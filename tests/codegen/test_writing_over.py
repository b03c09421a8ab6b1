"""Ops write over inputs that die there: the bytes are the plan's, the bits plain PyTorch's, and nobody sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import checkmate
from checkmate.codegen import writing_over
from checkmate.codegen.boxed import boxed
from checkmate.codegen.writing_over import OVER, calls_over, refuse_unwritable, writes_of
from checkmate.core.plan import Plan, Run
from checkmate.core.problem import Problem
from checkmate.core.solution import Solution
from checkmate.errors import SolverError, VerificationError
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.plainly import assert_alike
from tests.support.sampling import long
from tests.support.stepping import grads_of
from tests.support.ways import offering_ways

pytestmark = pytest.mark.usefixtures("one_thread")
Step = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def _with_ways() -> Iterator[None]:
    with offering_ways():
        yield


class _Net(nn.Module):
    """Activations over what they are made of, gradients over gradients and over what was saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (layer(x).relu() + 0.1).tanh() * torch.sigmoid(x)
        return x.square().sum()


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def _compiled(step: Callable[..., Any], budget: int | str = "1 GB", **options: Any) -> Any:
    return checkmate.compile(step, budget=budget, time_limit=1, cache=False, **options)


def _writing(module: fx.GraphModule, **options: bool) -> int:
    """Count the ops of the code that runs which write over an input."""
    calls = calls_over(writes_of(module.graph, **options)).values()
    return sum("out" in kwargs or "grad_input" in kwargs for _, _, kwargs in calls)


def _writes(solution: Solution) -> tuple[int, int]:
    """Count them in the forward, and in the backward."""
    return _writing(solution.modules.forward), _writing(solution.modules.backward)


def _saved_are_written(solution: Solution) -> bool:
    backward = solution.modules.backward
    return _writing(backward) > _writing(backward, spare=True)


def _peak(net: nn.Module, step: Any) -> int:
    """Measure the peak of a step that is not the first, resident bytes included."""

    def forward_backward() -> Tensor:
        net.zero_grad()
        loss: Tensor = step(X)
        loss.backward()
        return loss

    forward_backward()
    net.zero_grad()
    return measure_peak(forward_backward).peak + int(step.plans[0].problem.resident)


def _plain() -> list[Tensor | None]:
    net = _Net()
    net(X).backward()
    return grads_of(net)


@pytest.mark.parametrize(("share", "default_device"), [(1.0, False), (1.0, True), (0.4, False), (0.0, False)])
def test_the_peak_is_the_plans_to_the_byte(share: float, default_device: bool) -> None:
    net = _Net()
    problem = checkmate.trace(net, X)
    least = checkmate.min_budget(problem, time_limit=0.2).peak
    step = _compiled(net, int(least + share * (problem.keep_all_peak - least)))
    with torch.device("cpu") if default_device else nullcontext():
        peak = _peak(net, step)
    (plan,) = step.plans
    assert all(_writes(plan))
    assert _saved_are_written(plan)
    assert peak == plan.peak <= plan.budget
    assert_same_bits(grads_of(net), _plain())


class _Images(nn.Module):
    """Gradients of batch norms and of convolutions set the least peak."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential()
        for channels in (3, 16):
            self.blocks.extend((nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean((2, 3)).square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [long(torch.contiguous_format), torch.channels_last], ids=str)
def test_what_runs_block_by_block_does_so_where_the_budget_asks_for_it(layout: torch.memory_format) -> None:
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=layout)
    plain = _Images().to(memory_format=layout)
    plain(x).backward()
    net = _Images().to(memory_format=layout)
    problem = checkmate.trace(net, x)
    for budget, needed in ((checkmate.min_budget(problem, time_limit=1).peak, True), (problem.keep_all_peak, False)):
        net.load_state_dict(_Images().state_dict())
        net.zero_grad()
        step = _compiled(net, budget)
        step(x).backward()
        (solution,) = step.plans
        assert solution.plan is not None
        slowly = {(s.op, s.over) for s in solution.plan.steps if isinstance(s, Run)} & solution.problem.slower
        assert bool(slowly) == needed
        assert_same_bits(grads_of(net), grads_of(plain))
        assert_same_bits([*net.buffers()], [*plain.buffers()])
        net.zero_grad()
        use = measure_peak(lambda: step(x).backward())  # noqa: B023
        assert use.peak + solution.problem.resident == solution.peak <= budget


class _Uses:
    """Uses of a step of the net; each yields what it leaves."""

    def retained(net: _Net, step: Step) -> Any:
        loss = step(X)
        for keep in (True, True, False):
            net.zero_grad()
            loss.backward(retain_graph=keep)
            yield grads_of(net)

    def some_gradients(net: _Net, step: Step) -> Any:
        yield torch.autograd.grad(step(X), [net.layers[1].weight, net.layers[3].bias])

    def anomaly_mode(net: _Net, step: Step) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            yield from _Uses.some_gradients(net, step)

    def within_checkpoints(net: _Net, step: Step) -> Any:
        for reentrant in (True, False):
            x = X.clone().requires_grad_()
            checkpoint(step, x, use_reentrant=reentrant).backward()
            yield x.grad, grads_of(net)


def test_it_serves_as_plain_pytorch_does() -> None:
    net = _Net()
    step = _compiled(net)
    for name in (name for name in vars(_Uses) if name[0] != "_"):
        left = []
        for run in (step, net):
            net.zero_grad()
            left.append([*getattr(_Uses, name)(net, run)])
        assert_same_bits(*left)
    assert all(map(_saved_are_written, step.plans))


class _Kept:
    """Ways to hold what a step saves: each gives that, and the loss."""

    def by_hooks(step: Step, held: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> tuple[list[Tensor], Tensor]:
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(held(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return kept, step(X)

    def by_hooks_elsewhere(step: Step) -> tuple[list[Tensor], Tensor]:
        """The hook keeps another tensor in the same storage than it hands back."""
        return _Kept.by_hooks(step, lambda tensor: tensor.view(-1))

    def asked_for(step: Step) -> tuple[list[Tensor], Tensor]:
        loss = step(X)
        assert loss.grad_fn is not None
        return [*loss.grad_fn.saved_tensors], loss

    def as_arrays(step: Step) -> tuple[list[Any], Tensor]:
        kept, loss = _Kept.asked_for(step)
        return [tensor.detach().numpy() for tensor in kept], loss


@pytest.mark.slow
@pytest.mark.parametrize("way", [name for name in vars(_Kept) if name[0] != "_"])
def test_saved_tensors_that_another_holds_stay_as_they_are(way: str) -> None:
    net = _Net()
    step = _compiled(net)
    step(X)
    assert _saved_are_written(step.plans[0])
    kept, loss = getattr(_Kept, way)(step)
    before = [torch.as_tensor(tensor).clone() for tensor in kept]
    loss.backward()
    assert_same_bits([torch.as_tensor(tensor) for tensor in kept], before)
    assert_same_bits(grads_of(net), _plain())


class _Keeping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # what each op made, and a copy of it as it was then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "empty" not in str(func):  # autograd fills it afterwards
            self.made.append((result, result.clone()))
        return result


class _KeepingFunctions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func is not torch.Tensor.clone:
            self.made.append((result, result.clone()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "also_forward"), [(_Keeping, False), (_KeepingFunctions, True)])
def test_what_a_mode_has_seen_stays_as_it_was(kind: Callable[[], Any], also_forward: bool) -> None:
    """Under a mode that sees each op a forward is captured anew, and cannot be; a backward runs."""
    net = _Net()
    step = _compiled(net)
    loss = step(X)
    with kind() as mode:
        (step(X) if also_forward else loss).backward()
    assert len(mode.made) > 20
    assert_same_bits([seen for seen, _ in mode.made], [was for _, was in mode.made])
    assert_same_bits(grads_of(net), _plain())


def test_results_made_over_views_can_be_written_to() -> None:
    """What a module hands out is no view, whatever it was written over: views of a custom function cannot be."""
    layer = nn.Linear(8, 6)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x).view(6, 8) * 1.5
        return y.sum(), y

    x = torch.randn(8, 8)
    compiled = _compiled(step)
    assert_alike(lambda run: run(x)[1].add_(1.0), compiled, step)
    (plan,) = compiled.plans
    assert _writes(plan)[0]
    forward, by_shape = plan.modules.forward, {t.shape: t for t in (layer.weight, layer.bias, x)}
    inputs = [by_shape[node.meta["val"].shape] for node in forward.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        handed_out = boxed(forward, calls_over(writes_of(forward.graph)))(inputs)
    assert not handed_out[1]._is_view()


@pytest.mark.slow
def test_gradients_that_are_handed_out_one_by_one_are_whole() -> None:
    """A weight that a step uses again and again, and two calls before one backward."""
    net = _Net()
    plain = lambda x: net(x) + net(x * 0.5) * 0.3  # noqa: E731
    compiled = _compiled(plain)

    def gradients(step: Step) -> list[Tensor | None]:
        net.zero_grad()
        (step(X) + step(X.flip(0))).backward()
        return grads_of(net)

    assert_alike(gradients, compiled, plain)
    assert all(_writes(compiled.plans[0]))


def test_results_without_gradients_leave_no_trace() -> None:
    net = _Net()

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        h = (net.layers[0](x) + 1).relu()
        return net(h), (net.layers[1](h).exp() - h).tanh()

    def gradients(step: Step) -> Any:
        for used in ((0,), (1,), (0, 1)):
            net.zero_grad()
            results = step(X)
            torch.stack([results[i].sum() for i in used]).sum().backward()
            yield grads_of(net)

    compiled = _compiled(plain)
    assert_alike(lambda step: [*gradients(step)], compiled, plain)
    assert all(_writes(compiled.plans[0]))


def test_a_backward_that_fails_half_way_can_be_tried_again() -> None:
    """With its graph retained; without, plain PyTorch refuses a second one, too."""
    net, fails = _Net(), [False]

    @torch.library.custom_op("checkmate_tests::fails_when_told", mutates_args=())
    def fails_when_told(x: Tensor) -> Tensor:
        if fails[0]:
            raise RuntimeError("half way")
        return x.clone()

    fails_when_told.register_fake(torch.empty_like)
    fails_when_told.register_autograd(lambda ctx, grad: fails_when_told(grad))

    def step(x: Tensor) -> Tensor:
        return net(fails_when_told(net.layers[0](x)))

    compiled = _compiled(step)
    compiled(X)

    def failed(*, retain_graph: bool) -> Tensor:
        loss, fails[0] = compiled(X), True
        with pytest.raises(RuntimeError, match="half way"):
            loss.backward(retain_graph=retain_graph)
        fails[0] = False
        net.zero_grad()
        return loss

    failed(retain_graph=True).backward()
    found = grads_of(net)
    net.zero_grad()
    step(X).backward()
    assert_same_bits(found, grads_of(net))
    with pytest.raises(RuntimeError, match="second time"):
        failed(retain_graph=False).backward()


@pytest.mark.slow
def test_ops_of_others_may_keep_what_they_read() -> None:
    net, kept = _Net(), list[Tensor]()

    @torch.library.custom_op("checkmate_tests::keeps", mutates_args=())
    def keeps(x: Tensor) -> Tensor:
        kept.append(x)
        return x.clone()

    keeps.register_fake(torch.empty_like)
    keeps.register_autograd(lambda ctx, grad: grad)

    def step(x: Tensor) -> Tensor:
        h = net.layers[0](x)
        return (keeps(h) * 2).sum() + net.layers[1](h.relu()).relu().sum()

    compiled = _compiled(step)
    compiled(X)
    assert any(_writes(compiled.plans[0]))
    kept.clear()
    compiled(X).backward()
    assert_same_bits(kept, [net.layers[0](X).detach()])


def test_what_is_exchanged_with_other_ranks_is_not_written_over() -> None:
    """It is read and written while later ops run."""

    def step(x: Tensor) -> Tensor:
        mean = x.detach().exp()
        dist.all_reduce(mean)
        return ((x * mean.neg()).tanh() * 2.0).sum()

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        problem = checkmate.trace(step, torch.randn(4, 3, requires_grad=True), profile="roofline:laptop")
    finally:
        dist.destroy_process_group()
    graph = problem.graph
    exchanged = {v for op in graph.ops if "c10d" in op.target for v in (*op.inputs, *op.outputs)}
    assert len(exchanged) == 2
    assert problem.profile.ways
    assert not exchanged.intersection(v for way in problem.profile.ways for v in (way.over, way.makes))


@pytest.mark.slow
def test_a_kernel_that_gives_other_bits_in_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is looked at when it is made, as the step makes it, not when another is written over it."""
    call = writing_over.call_over

    def off(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.nextafter(torch.tanh(x), torch.tensor(9.0), out=x)

    def spoiled(target: Any, *rest: Any) -> Any:
        target, args, kwargs = call(target, *rest)
        return (off if "tanh.out" in str(target) else target), args, kwargs

    monkeypatch.setattr(writing_over, "call_over", spoiled)
    step = checkmate.compile(_Net(), budget="1 GB", cache=False, time_limit=1, verify=True)
    with pytest.raises(VerificationError, match=r"first value that differs is tanh"):
        step(X)


@pytest.fixture
def problem() -> Problem:
    x = torch.randn(4, 8, requires_grad=True)
    return checkmate.trace(lambda: (x.exp().relu() * 2).sum(), profile="roofline:laptop")


def test_a_plan_that_reads_what_was_written_over_is_refused(problem: Problem) -> None:
    graph = problem.graph
    step = next(way for way in problem.profile.ways if graph.ops[way.op].name == "relu")
    (reader,) = (k for k in graph.users[step.makes] if graph.ops[k].phase == "backward")
    assert step.makes in graph.ops[reader].inputs
    runs = [Run(k, step.over) if k == step.op else Run(k) for k in range(len(graph.ops))]
    with pytest.raises(SolverError, match=r"not at hand|is needed afterwards"):
        problem.codegen(Plan((*runs, Run(step.op)), graph.forward_length))


def test_code_that_reads_what_was_written_over_is_refused(problem: Problem) -> None:
    """By its own storages, whatever the plan says of them: the backward reads the result of exp."""
    module = checkmate.solve(problem, problem.keep_all_peak, time_limit=1).modules.forward
    relu = next(node for node in module.graph.nodes if "relu" in node.name)
    relu.meta[OVER] = 0
    with pytest.raises(SolverError, match=r"has relu\w* write over exp\w*, which is needed afterwards"):
        refuse_unwritable(module)


def test_a_plan_that_writes_over_what_no_way_does_is_refused(problem: Problem) -> None:
    graph = problem.graph
    k = next(k for k, op in enumerate(graph.ops) if op.target.startswith("aten.sum"))
    runs = [Run(i, graph.ops[i].inputs[0] if i == k else None) for i in range(len(graph.ops))]
    with pytest.raises(SolverError, match="write over what it must not"):
        problem.codegen(Plan(tuple(runs), graph.forward_length))
