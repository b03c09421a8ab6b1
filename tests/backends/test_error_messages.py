"""Errors that a person makes: what they read, and that nothing is lost."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import checkmate
from checkmate.errors import BudgetError, InfeasibleBudget, Unsupported
from tests.support.bits import assert_same_bits
from tests.support.plainly import nothing_drawn
from tests.support.sampling import in_turn
from tests.support.stepping import assert_same, train

X, Y = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)), torch.arange(128) % 10


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))


@pytest.mark.slow
def test_infeasible_budget_names_the_way_out(net: nn.Module) -> None:
    step = lambda x, y: F.cross_entropy(net(x), y)  # noqa: E731
    problem = checkmate.trace(step, X, Y)
    with pytest.raises(InfeasibleBudget, match="Smallest budget that works") as caught:
        checkmate.compile(step, budget="100 kB")(X, Y)
    error = caught.value
    assert error.budget == 100_000
    assert error.op in {op.name for split in problem.splits_in_turn() for op in split.graph.ops}
    assert error.op in str(error)
    assert "test_error_messages.py" in str(error)  # the line of the user's code
    assert error.__suppress_context__  # no traceback of the machinery below
    (copied,) = re.findall(r"Smallest budget that works: ([\d.]+ \w+) \(", str(error))
    for least in (error.min_budget, copied):
        compiled = checkmate.compile(step, budget=least)
        compiled(X, Y).backward()
        assert compiled.plans[0].peak <= error.min_budget
    smallest = checkmate.min_budget(problem).peak
    for reserve in (smallest, 1000):
        with pytest.raises(InfeasibleBudget, match="reserve") as caught:
            checkmate.compile(step, budget=smallest, reserve=reserve)(X, Y)
        assert caught.value.min_budget == smallest + reserve
        (named,) = re.findall(r"Smallest budget that works: ([\d.]+ \w+) \(", str(caught.value))
        assert 0 <= checkmate.parse_bytes(named) - caught.value.min_budget < 10_000


def test_a_batch_norm_over_ranks_that_averages_over_all_batches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes on GPUs only, but counts before."""
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8, momentum=None)), torch.randn(4, 3, 16, 16)
    monkeypatch.setattr(net[1], "_check_input_dim", lambda x: None)
    with pytest.raises(Unsupported) as caught:
        checkmate.compile(lambda x: net(x).mean(), budget="1 GB")(x)
    said, place, advice = str(caught.value).splitlines()
    assert "1 (SyncBatchNorm): momentum=None weighs each batch by 1 / num_batches_tracked" in said
    assert "test_error_messages.py" in place
    assert advice.startswith("Give it a momentum")
    assert net[1].num_batches_tracked == 0
    assert not net[1].running_mean.any()


@pytest.mark.slow
def test_after_an_error_the_model_trains_as_before(net: nn.Module) -> None:
    twin = copy.deepcopy(net)
    state = torch.get_rng_state()
    with pytest.raises(InfeasibleBudget):
        checkmate.compile(net, budget="1 kB")(X)
    assert_same_bits(torch.get_rng_state(), state)
    assert_same(
        train(net, lambda x, y: F.cross_entropy(net(x), y), (X, Y)),
        train(twin, lambda x, y: F.cross_entropy(twin(x), y), (X, Y)),
    )


@in_turn(
    case=[
        *(
            ({"budget": budget}, BudgetError, None)
            for budget in ("8 GB?", "9" * 400, "", "many", 0, -3, float("nan"), float("inf"), 0.5, True, None, [1])
        ),
        *(({"max_plans": most}, ValueError, "max_plans") for most in (0, True, 2.5)),
        ({"method": "magic"}, ValueError, "auto"),
        ({"time_limit": 0}, ValueError, "time_limit"),
        ({"time_limit": float("nan")}, ValueError, "time_limit"),
        ({"time_limit": float("inf")}, ValueError, "time_limit is a positive number of seconds, not inf"),
        ({"numerics": "rounding"}, TypeError, "no option 'numerics' any more. Every plan has the bits of plain PyTor"),
        ({"reserve": "9" * 400}, BudgetError, "between 1 and 2"),
        ({"reserve": -1}, BudgetError, "positive"),
        ({"fn": 3}, TypeError, "module or a function, not int"),
        ({"fn": None}, TypeError, "module or a function, not NoneType"),
        ({"fn": nn.Linear}, TypeError, "module or a function, not the class Linear"),
        (
            {"fn": torch.compile(nn.Linear(2, 2))},
            Unsupported,
            r"Give checkmate\.compile the plain one",
        ),
    ]
)
def test_what_is_wrong_fails_at_the_call(case: tuple[dict[str, Any], type[Exception], str | None]) -> None:
    options, error, words = case
    with pytest.raises(error, match=words):
        checkmate.compile(**{"fn": nn.Linear(2, 2), "budget": "1 GB", **options})


@pytest.mark.parametrize("mark", ["mark_dynamic", "maybe_mark_dynamic"])
def test_sizes_that_are_marked_as_dynamic(net: nn.Module, mark: str) -> None:
    step = checkmate.compile(lambda x: net(x).sum(), budget="1 GB", profile="roofline:h100")
    x = torch.randn(12, 64)
    getattr(torch._dynamo, mark)(x, 0)
    said = r"marked as dynamic \(torch._dynamo.mark_dynamic\).*a plan of its own"
    with pytest.raises(Unsupported, match=said):
        step(x)
    step(torch.randn(12, 64)).backward()
    assert len(step.plans) == 1


def test_double_backward(net: nn.Module) -> None:
    loss = checkmate.compile(lambda x, y: F.cross_entropy(net(x), y), budget="1 GB")(X, Y)
    with pytest.raises(Unsupported, match=r"create_graph=True.*plain model"):
        torch.autograd.grad(loss, list(net.parameters()), create_graph=True)


def test_backward_within_autocast(net: nn.Module) -> None:
    """Plain PyTorch may compute other gradients there, and the plan's backward is the one outside."""
    step = checkmate.compile(lambda x, y: F.cross_entropy(net(x), y), budget="1 GB")
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(X, Y)
        with pytest.raises(Unsupported, match="Call it after the block"):
            loss.backward(retain_graph=True)
    loss.backward()


@in_turn(
    step=[
        lambda net, x, y: F.cross_entropy(net(x[:, :3]), y),
        lambda net, x, y: (net(x) + x[:3]).sum(),
        lambda net, x, y: torch.cat([net(x), x[:2]], 1).sum(),
        lambda net, x, y: net(x).view(5, 7).sum(),
    ]
)
def test_wrong_shapes_read_as_in_plain_pytorch(step: Callable[..., Tensor], net: nn.Module) -> None:
    with pytest.raises(RuntimeError) as plain:
        step(net, X, Y)
    with pytest.raises(RuntimeError) as caught:
        checkmate.compile(lambda x, y: step(net, x, y), budget="1 GB")(X, Y)
    said, place = str(caught.value).split("\n")
    product = r"^(add)?mm: "  # as PyTorch calls it
    assert re.sub(product, "", said) == re.sub(product, "", str(plain.value))
    assert "test_error_messages.py" in place


def test_backward_that_reads_what_the_forward_overwrites() -> None:
    scale, weight = torch.ones(64), torch.ones(64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        loss = (weight * scale * x).sum()
        scale.mul_(2)
        return loss

    with pytest.raises(Unsupported, match="overwrites"):
        checkmate.compile(step, budget="1 GB")(X)


def test_nothing_to_plan(net: nn.Module) -> None:
    with torch.no_grad(), pytest.raises(Unsupported, match="no_grad"):
        checkmate.trace(net, X)


def test_verification_under_a_profiler(net: nn.Module) -> None:
    """A step can be captured there (`test_compile`), but what whole steps take cannot be measured beside another."""
    refused = pytest.raises(Unsupported, match="profiler, which is running already")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), refused:
        checkmate.verify(lambda x: net(x).sum(), X, budget="1 GB")


def test_an_op_that_fails_as_it_runs_says_where(net: nn.Module) -> None:
    """The type stays that of plain PyTorch; no frame of the machinery is shown."""
    table = nn.Embedding(5, 64)
    compiled = checkmate.compile(lambda i: net(table(i)).sum(), budget="1 GB", time_limit=1)
    with pytest.raises(
        IndexError, match=r"out of range.*\n  in aten.embedding.default of the forward.*messages.py:\d+"
    ):
        compiled(torch.tensor([1, 7]))
    with pytest.raises(IndexError) as caught:
        compiled(torch.tensor([1, 7]))
    assert len(caught.traceback) <= 3
    compiled(torch.tensor([1, 4])).backward()


@torch.library.custom_op("checkmate_tests::picky", mutates_args=())
def picky(grad: Tensor) -> Tensor:
    if grad.sum() > 100:
        raise RuntimeError("too much")
    return grad.clone()


picky.register_fake(torch.empty_like)
picky.register_autograd(lambda ctx, grad: picky(grad + 200))


def test_an_op_that_fails_in_the_backward_says_where(net: nn.Module) -> None:
    compiled = checkmate.compile(lambda x: picky(net(x) * 0.0).sum(), budget="1 GB", time_limit=1)
    with pytest.raises(RuntimeError, match=r"too much\n  in checkmate_tests.picky.default of the backward.*py:\d+"):
        compiled(X).backward()


def test_a_name_that_has_no_value_yet_is_no_obstacle(net: nn.Module) -> None:
    """A closure may hold a name that is set later, or was deleted: plain PyTorch runs what does not read it."""
    deleted = net

    def step(x: Tensor) -> Tensor:
        return net(x if x.dim() == 2 else deleted(x)).sum()  # noqa: F821  # never read

    del deleted
    report = checkmate.verify(step, X, budget="1 GB", time_limit=1)
    assert report.tensors == len(net.state_dict()) + 1
    checkmate.compile(step, budget="1 GB", time_limit=1)(X).backward()


def test_faults_of_hooks_read_as_they_are(net: nn.Sequential) -> None:
    net[0].weight.register_hook(lambda grad: grad.nonesuch)
    loss = checkmate.compile(lambda x: net(x).sum(), budget="1 GB", time_limit=1)(X)
    with pytest.raises(AttributeError, match="nonesuch"):
        loss.backward()


@pytest.fixture
def of_fake_tensors() -> Iterator[list[str]]:
    """Records that PyTorch's fake tensors log, each of which is printed with a traceback of twenty lines."""
    log, handler, said = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler(), list[str]()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def test_a_wrong_shape_is_one_sentence_and_a_line(
    net: nn.Module, of_fake_tensors: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    x = X[:, :3]
    for call in (checkmate.compile(lambda x: net(x).sum(), budget="1 GB"), lambda x: checkmate.trace(net, x)):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
            call(x)
        assert str(caught.value).count("\n") <= 1
    assert of_fake_tensors == []
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError):  # what others compile is logged as ever
        torch.compile(net, backend="eager", fullgraph=True)(x)
    assert len(of_fake_tensors) == 1


def test_a_model_without_data_and_a_batch_with(net: nn.Module) -> None:
    without = net.to("meta")
    with pytest.raises(RuntimeError, match=r"two .*devices.*meta.* no data: .*roofline") as caught:
        checkmate.compile(lambda x: without(x).sum(), budget="1 GB")(X)
    _, line = str(caught.value).splitlines()
    assert "test_error_messages.py" in line
    assert "without(x).sum()" in line


def test_a_batch_that_is_no_tensor(net: nn.Module) -> None:
    compiled = checkmate.compile(net, budget="1 GB")
    with pytest.raises(TypeError, match=r"^linear\(\): argument 'input' \(position 1\) must be Tensor, not list"):
        compiled([X, Y])  # in the words of plain PyTorch
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y))
    with pytest.raises(Unsupported, match="Pass the tensors of a batch"):
        compiled(loader)


_NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
_HOOKED = nn.Sequential(nn.Linear(4, 4))
_HOOKED[0].register_full_backward_hook(lambda module, grads, outputs: None)
_WEIGHT = torch.ones(4, requires_grad=True)
_FAKE_QUANTIZE = torch.ao.quantization.FakeQuantize()
_GRU = nn.GRU(4, 3, batch_first=True)
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "backward hook": (_HOOKED, "without backward hooks"),
    "in place": (lambda x: _NET(x).exp().mul_(2).sum(), "x.clone"),
    "no such method": (lambda x: _NET(x).summ(), "does it run"),
    "arguments": (lambda x: _NET(x, 1, 2).sum(), "other arguments"),
    "sizes": (lambda x: _NET(x[(_NET(x)[:, 0] > 0).nonzero()[:, 0]]).sum(), "torch.where"),
    "generator": (lambda x: (_NET(x) * torch.rand(1, generator=torch.Generator())).sum(), "manual_seed"),
    "number": (
        lambda x: x[: (x @ x.T).argmax().item()].sum(),
        "a number is read from what the step computes at test_error_messages",
    ),
    "quantization": (lambda x: _FAKE_QUANTIZE(x).sum(), "fused_moving_avg_obs_fake_quant"),
}


def refused(words: str) -> Callable[[Any], Any]:
    """List a step, or a class of modules, with what its refusal says."""

    def listed(step: Any) -> Any:
        REFUSED[step.__name__.strip("_")] = (step() if isinstance(step, type) else step), words
        return step

    return listed


@refused(r"(?s)(?=.*one graph).*_breaking")
def _breaking(x: Tensor) -> Tensor:
    logits = _NET(x)
    torch._dynamo.graph_break()
    return logits.sum()


@refused(r"costs too much(.|\n)*loss \* 2 if loss > 3")
def _branching(x: Tensor) -> Tensor:
    loss = _NET(x).sum()
    return loss * 2 if loss > 3 else loss


@refused(
    r"^.*_without_size: a tensor has a size that depends on data\.\n.*test_error_messages\.py.*\n"
    r"Sizes must be fixed: mask what is left out.*$"
)
def _without_size(x: Tensor) -> Tensor:
    return torch.lerp(_WEIGHT, x.unique()[:1], 0.3).sum()


@refused("gradient of the shape")
def _hooked_with_another_shape(x: Tensor) -> Tensor:
    logits = _NET(x)
    logits.register_hook(lambda grad: grad[:, :1])
    return logits.sum()


@refused(r"messages.py:\d+ in _forking: with .*\n.*leaves the state")  # a line of the user, not of Python
def _forking(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x.sin().sum()


@refused("Run the recurrent module on the padded batch")
def _packed(x: Tensor) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x.view(1, 6, 4), [5], batch_first=True)
    return _GRU(sequence)[1].sum()


@refused("pass these as tuples of numbers")
def _lengths_of_ctc(x: Tensor) -> Tensor:
    log_probs = x.view(6, 1, 4).log_softmax(-1)
    return F.ctc_loss(log_probs, torch.tensor([[1, 2]]), torch.tensor([6]), (x @ x.T).argmax()[None].clamp(1, 2))


@refused("would be differentiated again")
def _penalty(x: Tensor) -> Tensor:
    loss = x.square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@refused(r"costs too much .* before the step\. It is asked of a size.*\n.*in _experts[\s\S]*set_experts_imple")
def _experts(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for expert in (x @ x.T).argmax(1).unique():  # whom data chooses
        total = total + x * expert
    return total.sum()


class _Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sizes = (x @ x.T > 0).long().sum(0).tolist()
        return torch.stack([x.new_ones(size).sum() * x.sum() for size in sizes]).sum()


@refused(r"number is read[\s\S]*set_experts_implementation")
class _ExpertsOfSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = _Sized()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


@refused(r"the size of \w+ depends on data; .*x\[mask\]")
def _adapters(x: Tensor) -> Tensor:
    y, chosen = torch.zeros_like(x), (x @ x.T)[:, 0] > 0
    y[chosen] = x[chosen].sin()
    return y.sum()


@refused("the size of the gradient of what is computed here, index, depends on data")
def _token(x: Tensor) -> Tensor:
    y = x.clone()
    y[x[:, 0] > 0, torch.tensor([1])] = x[0, 0]
    return y.sum()


@refused(r"asked of a size, which depends on data since .*test_error_messages.py:\d+\)?\.\n")
def _size_of_a_selection(x: Tensor) -> Tensor:
    chosen = x[(x @ x.T).sum(0) > 0]
    return chosen.sum() if chosen.shape[0] > 1 else x.sum()


@refused("return what is to be checked, and assert outside")
def _asserted(x: Tensor) -> Tensor:
    y = x @ x.T
    assert y.isfinite().all()
    return y.sum()


@refused("A compiled step holds no lock.*call the model once before compiling")
class _Locked(nn.Module):
    """Sets something up in its first call, and no other at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_lock, self.ready = threading.Lock(), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with self.hook_lock:
                self.ready = True
        return x.sum()


@refused(r"is trained by nobody.*call the model once before compiling, on one such batch")
class _Swapping(nn.Module):
    """Puts another part in place in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.part: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.part, nn.Identity):
            self.part = nn.Linear(4, 4)
        return self.part(x).sum()


def _refusal(step: Callable[[Tensor], Tensor], words: str) -> str:
    """Get a refusal, which names the step or the line; no frame of the machinery is shown."""
    x = torch.randn(6, 4, requires_grad=True)
    with nothing_drawn(), pytest.raises(Unsupported, match=words) as caught:
        checkmate.compile(step, budget="1 GB")(x)
    assert caught.value.__suppress_context__
    is_module, said = isinstance(step, nn.Module), str(caught.value)
    assert len(caught.traceback) <= (6 if is_module else 4)
    assert "test_error_messages.py" in said or (type(step).__name__ if is_module else step.__name__) in said
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("step", "words"), REFUSED.values(), ids=REFUSED)
def test_what_it_is_and_what_to_do(step: Callable[[Tensor], Tensor], words: str) -> None:
    _refusal(step, words)


@pytest.mark.parametrize("model", [_Locked(), _Swapping()])
def test_a_model_that_was_called_once_is_compiled(model: nn.Module) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    model(x)
    assert_same_bits(checkmate.compile(model, budget="1 GB")(x), model(x))


class _CheckpointFunction(torch.autograd.Function):
    """The checkpointing of diffusion trainers."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad)


class _DrawsAgain(_CheckpointFunction):
    """The checkpointing of trainers of large language models."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return _CheckpointFunction.forward(ctx, run, x, *parameters)


class _BackwardWithin(_CheckpointFunction):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *(None for _ in ctx.parameters)


class _Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


_COUNTING, DIRECTLY = _Counting(4, 4), "call what is checkpointed directly"


def _keeping_elsewhere(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net(x)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        *(
            (lambda net, x, own=own: own.apply(net, x, *net.parameters()), "model's own checkpointing off")
            for own in (_CheckpointFunction, _DrawsAgain, _BackwardWithin)
        ),
        (lambda net, x: checkpoint_sequential(net, 2, x, use_reentrant=True), DIRECTLY),
        (
            lambda net, x: checkpoint(
                net, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts([])
            ),
            DIRECTLY,
        ),
        (lambda net, x: checkpoint(_COUNTING, net(x), use_reentrant=False), DIRECTLY),
        (_keeping_elsewhere, "leave this out. host_budget="),
    ],
)
def test_what_saves_memory_by_itself_is_to_be_left_out(run: Callable[[nn.Module, Tensor], Tensor], words: str) -> None:
    """The plan does that. No cause is named that is none: it once was a penalty on gradients, or ``.item()``."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    said = _refusal(lambda x: run(net, x).sum(), words)
    assert not re.search(r"penalty|\.item\(\)|depend on data|hooks", said.splitlines()[-1])


def test_within_a_transform_of_torch_func_the_plain_module_is_to_be_called() -> None:
    compiled = checkmate.compile(nn.Linear(64, 10), budget="1 MB")
    with pytest.raises(Unsupported) as caught:
        torch.func.vmap(compiled)(X)
    said, advice = str(caught.value).splitlines()
    assert said == "Cannot capture Linear.forward: Unsupported functorch tracing attempt"
    assert advice.startswith("Within torch.func.vmap, grad, jvp and their like call the plain module")


class _Miner(nn.Module):
    """Triplets whose negative is too near, as libraries of metric learning choose them."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            same = labels[:, None] == labels
            anchor, positive, negative = torch.where((same ^ torch.eye(len(same)).bool())[:, :, None] & ~same[:, None])
            apart = torch.cdist(embeddings, embeddings)
            near = apart[anchor, negative] - apart[anchor, positive] <= 0.2
            return anchor[near], positive[near], negative[near]


def _triplet_loss(embeddings: Tensor, chosen: tuple[Tensor, ...]) -> Tensor:
    return F.triplet_margin_loss(*(embeddings[index] for index in chosen))


def test_a_miner_is_to_stay_outside(net: nn.Module) -> None:
    """The step that the message advises trains, with the bits of plain PyTorch."""
    miner, twin = _Miner(), copy.deepcopy(net)

    def step_of(model: nn.Module) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            embeddings = model(x)
            return _triplet_loss(embeddings, miner(embeddings, y))

        return step

    with pytest.raises(Unsupported, match="compile the network alone, and call it on the outputs"):
        checkmate.compile(step_of(net), budget="1 GB")(X[:16], Y[:16])

    few = X[:16], Y[:16]
    compiled = checkmate.compile(net, budget="1 GB", time_limit=1)
    assert_same(train(net, step_of(compiled), few), train(twin, step_of(twin), few))


def _own_backward(inner: Any) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return inner(x, g)

    return Function.apply


class _Wrapper(torch.Tensor):
    """A subclass that holds a tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nothing runs")


MATRIX = torch.nn.Parameter(torch.eye(4))
SPARSE, ROWS = torch.eye(4).to_sparse(), torch.rand(4, 4)
ALONG = _own_backward(lambda x, g: torch.autograd.grad(x.sin(), x, g)[0])
HALVES = _own_backward(lambda x, g: x.sin().backward(g) or x.grad)
OTHER_WAYS = {
    "edges as two index tensors, and sum with out.index_add": [
        (lambda x, a: torch.sparse.mm(a, x @ MATRIX).sum(), (ROWS, SPARSE)),
        (lambda x: (SPARSE @ (x @ MATRIX)).sum(), (ROWS,)),
        (lambda x: torch.sparse.mm(torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 4)), x @ MATRIX).sum(), (ROWS,)),
    ],
    r"F.one_hot(i, k).sum(0), or torch.zeros(k).scatter_add_(0, i, weights). If only the first call counts": [
        (
            lambda x: ((x @ MATRIX).softmax(1).mean(0) * torch.bincount((x @ MATRIX).argmax(1), minlength=4)).sum(),
            (ROWS,),
        ),
    ],
    "In place of odeint_adjoint call odeint; of a reversible block call the halves in plain PyTorch": [
        (lambda x: ALONG(x @ MATRIX).sum(), (ROWS,)),
        (lambda x: HALVES(x @ MATRIX).sum(), (ROWS,)),
    ],
    "such as MONAI's MetaTensor, pass x.as_tensor()": [(lambda x: (x @ MATRIX).sum(), (_Wrapper(ROWS),))],
}


@in_turn(way=OTHER_WAYS)
def test_what_is_refused_is_told_the_other_way(way: str) -> None:
    for step, batch in OTHER_WAYS[way]:
        with pytest.raises(Unsupported) as refused:
            checkmate.compile(step, budget="1 MB")(*batch)
        before, _, _ = str(refused.value).partition(way)
        assert before != str(refused.value)
        assert "checkpointing" not in before  # what fits comes first


def test_a_hook_that_clamps_is_told_the_option() -> None:
    layer = torch.nn.Linear(4, 1)
    layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    optimizer = torch.optim.SGD(layer.parameters())
    with pytest.raises(Unsupported, match="where it clamps, give clip_value="):
        checkmate.training_step(lambda x: layer(x).sum(), optimizer, budget="1 MB")(ROWS)


WORKING = {  # what messages name, verified
    "one_hot": lambda x: ((x @ MATRIX).softmax(1).mean(0) * F.one_hot((x @ MATRIX).argmax(1), 4).sum(0)).sum(),
    "index_add": lambda x: (
        torch.zeros(4, 4).index_add(0, torch.tensor([0, 2]), (x @ MATRIX)[torch.tensor([1, 3])]).sum()
    ),
}


@in_turn(way=WORKING)
def test_the_other_way_works(way: str) -> None:
    checkmate.verify(WORKING[way], ROWS, budget="1 MB", time_limit=1)
