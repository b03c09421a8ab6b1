"""Steps in an arena have the bits of plain PyTorch, whatever is kept, freed late, repeated, broken off or forked."""

from __future__ import annotations

import functools
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate.backends import static_memory
from checkmate.memory import measure_peak, native
from checkmate.memory.arena import Arena, Counts
from tests.support.bits import assert_same_bits
from tests.support.budgets import recomputing
from tests.support.sampling import slow

Wrap = Callable[[Callable[..., Any]], Any]
WIDTH, ROWS = 96, 64  # so that activations and gradients of weights are above what is left to malloc

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    native.start()
    assert native.wait() is None


@pytest.fixture(autouse=True)
def _own_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, 32))


def batches(count: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, WIDTH), torch.randn(rows, 32)) for _ in range(count)]


def loss_of(model: nn.Module) -> Callable[..., Any]:
    return lambda x, y: F.mse_loss(model(x), y)


def with_hidden(model: nn.Sequential) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Any:
        hidden = model[:9](x)
        return F.mse_loss(model[9:](hidden), y), hidden

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def in_arena(step: Callable[..., Any], budget: int | str = "460 kB") -> Any:
    return checkmate.compile(step, budget=budget, time_limit=1, memory="arena")


def counts(step: Any) -> list[Counts]:
    return [captured.arena.counts for captured in step._run.steps]


def train(model: nn.Module, step: Any, data: list[Any], **options: Any) -> Any:
    optimizer, seen = sgd(model), []
    for x, y in data:
        optimizer.zero_grad(**options)
        loss = step(x, y)
        loss.backward()
        seen.append(clones((loss, *grads_of(model))))
        optimizer.step()
    return seen, clones(model.parameters())


def made(wrap: Wrap) -> tuple[nn.Sequential, Any, torch.optim.Optimizer]:
    model = net()
    return model, wrap(loss_of(model)), sgd(model)


# What a user does, as a function of what makes a step of a function. It gives all that is to be equal.


def two_forwards_before_a_backward(wrap: Wrap) -> Any:
    model, step, optimizer = made(wrap)
    for one, other in zip(batches(4), batches(8)[4:], strict=True):
        (step(*one) - 0.5 * step(*other)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def backwards_in_the_order_of_forwards(wrap: Wrap) -> Any:
    model, step, _ = made(wrap)
    for _ in range(3):
        losses = [step(*batch) for batch in batches(3)]
        for loss in losses:
            loss.backward()
    return losses, grads_of(model)


def forwards_without_a_backward(wrap: Wrap) -> Any:
    model, step, _ = made(wrap)
    seen = []
    for i, batch in enumerate(batches(7)):
        loss = step(*batch)
        if i % 3:
            loss.backward()
        seen.append(loss.detach())
    return seen, grads_of(model)


def gradients_that_add_up_in_place(wrap: Wrap) -> Any:
    model, step, optimizer = made(wrap)
    for i, batch in enumerate(batches(8)):
        step(*batch).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return list(model.parameters()), grads_of(model)


def gradients_freed_between_forward_and_backward(wrap: Wrap) -> Any:
    model, step, optimizer = made(wrap)
    for batch in batches(5):
        loss = step(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return list(model.parameters())


def results_that_are_kept(wrap: Wrap) -> Any:
    """Some for ever, and some until the next step is over."""
    model = net()
    step, optimizer = wrap(with_hidden(model)), sgd(model)
    kept, then = [], []
    for i, batch in enumerate(batches(8)):
        optimizer.zero_grad()
        loss, hidden = step(*batch)
        loss.backward()
        optimizer.step()
        if i in (0, 3, 4):
            kept += [loss, hidden, *grads_of(model)]
            then += clones(kept[len(then) :])
    assert_same_bits([t.detach() for t in kept], then)
    return then, list(model.parameters())


def a_graph_that_is_retained(wrap: Wrap) -> Any:
    model, step, _ = made(wrap)
    for batch in batches(4):
        loss = step(*batch)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    return grads_of(model)


def hooks_that_clone_and_keep(wrap: Wrap) -> Any:
    model = net()
    kept: dict[str, list[Tensor]] = {"cloned": [], "itself": [], "afterwards": []}
    model[0].weight.register_hook(lambda grad: kept["cloned"].append(grad.clone()) or grad * 2)
    model[3].weight.register_hook(lambda grad: kept["itself"].append(grad))
    model[6].weight.register_post_accumulate_grad_hook(lambda p: kept["afterwards"].append(p.grad.clone()))
    return train(model, wrap(loss_of(model)), batches(5)), kept


def gradients_used_by_hooks_and_freed(wrap: Wrap) -> Any:
    """The optimizer's step within the backward."""
    model = net()

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    step = wrap(loss_of(model))
    for batch in batches(5):
        step(*batch).backward()
    return list(model.parameters())


def a_smaller_last_batch(wrap: Wrap) -> Any:
    model, step, _ = made(wrap)
    epoch = [*batches(3), *batches(1, rows=40)]
    return train(model, step, epoch * 2)


def two_steps_that_alternate(wrap: Wrap) -> Any:
    one, other = net(), net(2)
    steps, optimizers = [wrap(loss_of(model)) for model in (one, other)], [sgd(model) for model in (one, other)]
    for i, batch in enumerate(batches(10)):
        loss = steps[i % 2](*batch)
        loss.backward()  # the gradients of the other model are alive
        optimizers[i % 2].step()
        optimizers[(i + 1) % 2].zero_grad()
    return list(one.parameters()), list(other.parameters())


def results_in_other_forms(wrap: Wrap) -> Any:
    """Views of NumPy and DLPack, memory that moves: the data stays."""
    model = net()
    step, seen = wrap(with_hidden(model)), []
    for batch in batches(4):
        loss, hidden = step(*batch)
        loss.backward()
        out = hidden.detach()
        forms = [out, torch.from_numpy(out.numpy()), torch.from_dlpack(out), out.clone().share_memory_()]
        larger = out.clone()
        larger.untyped_storage().resize_(2 * larger.nbytes)
        seen += [*forms, larger]
        out[0] += 1
        own = step(*batch)[1].detach()
        seen.append(own.share_memory_())
    return seen


def a_loader_with_workers(wrap: Wrap) -> Any:
    model, step, _ = made(wrap)
    data = TensorDataset(torch.cat([x for x, _ in batches(4)]), torch.cat([y for _, y in batches(4)]))
    return [train(model, step, list(DataLoader(data, batch_size=ROWS, num_workers=2))) for _ in range(2)]


SCENARIOS = (
    two_forwards_before_a_backward, backwards_in_the_order_of_forwards, forwards_without_a_backward,
    gradients_that_add_up_in_place, gradients_freed_between_forward_and_backward, results_that_are_kept,
    a_graph_that_is_retained, hooks_that_clone_and_keep, gradients_used_by_hooks_and_freed, a_smaller_last_batch,
    two_steps_that_alternate, results_in_other_forms, a_loader_with_workers,
)  # fmt: skip


@pytest.mark.parametrize("scenario", [*SCENARIOS[:4], *map(slow, SCENARIOS[4:])])
def test_bits_are_those_of_plain_pytorch(scenario: Callable[[Wrap], Any]) -> None:
    made: list[Any] = []

    def wrap(step: Callable[..., Any]) -> Any:
        made.append(in_arena(step))
        return made[-1]

    assert_same_bits(scenario(wrap), scenario(lambda step: step))
    found = [count for step in made for count in counts(step)]
    assert found
    assert all(count.served > 0 for count in found)


def test_training_is_served_whole_from_the_second_step_on() -> None:
    """The meter sees the bytes of the plan, as with PyTorch's allocator."""
    model = net()
    budget = recomputing(checkmate.trace(loss_of(model), *batches(1)[0]), 0.5)
    step = in_arena(loss_of(model), budget)
    found = train(model, step, batches(6))
    (count,) = counts(step)
    assert (count.steps, count.layouts, count.fallbacks) == (6, 1, 0)
    assert count.served > 20
    assert step.plans[0].overhead > 0  # something runs again
    model.zero_grad()
    (batch,) = batches(1)
    use = measure_peak(lambda: step(*batch).backward())
    model.zero_grad()
    assert use.peak == step.plans[0].peak - step.plans[0].problem.resident
    assert counts(step)[0].arena <= 1.1 * use.peak
    (told,) = step.memory().rows
    assert (told.planned, told.fallbacks) == (step.plans[0].peak - step.plans[0].problem.resident, 0)
    assert told.counted <= told.arena
    assert "fallbacks" in str(step.memory())
    allocator = checkmate.compile(loss_of(model), budget=budget)
    assert str(allocator.memory()) == "No arena has served this step: PyTorch's allocator does."
    again = net()
    assert_same_bits(found, train(again, loss_of(again), batches(6)))
    kept = in_arena(loss_of(again))
    train(again, kept, batches(4), set_to_none=False)  # what lives from step to step has addresses too
    assert counts(kept)[0].fallbacks == 0


def test_a_first_step_returns_large_pieces_to_the_machine_as_they_are_freed() -> None:
    large = 48 << 20  # bytes; malloc would return a piece of these, too
    arena, resident = Arena(static_memory.place_soon, 4 * large), []

    def take(inputs: list[Any]) -> None:
        for held in (1, 2):
            tensors = [torch.full((large // 4,), 1.0) for _ in range(held)]
            resident.append(arena.resident)
            del tensors
            resident.append(arena.resident)

    for _ in range(2):
        arena.within("forward", take)([])
        arena.within("backward", lambda inputs: None)([])
    assert resident[:4] == [large, 0, 2 * large, 0]
    assert resident[4:] == [large, large, 2 * large, 2 * large]  # which has planned addresses


def test_what_the_machine_gives_beside_the_arena_is_told_of_the_first_steps() -> None:
    arena, kept = Arena(static_memory.place_soon, 1 << 20), []

    def take(inputs: list[Any]) -> None:  # pages that nobody has had: malloc may give those of a test before
        pages = np.frombuffer(mmap.mmap(-1, 1 << 24), dtype=np.uint8)
        pages.fill(1)
        kept.append(pages)

    forward = arena.within("forward", take)
    forward([])
    assert 0.9 * 2**24 < arena.outside < 1.2 * 2**24
    for _ in range(7):
        forward([])
    told = arena.outside
    assert 0.9 * 2**27 < told < 1.2 * 2**27
    forward([])
    assert arena.outside == told  # not measured any more


def test_a_module_with_a_name_of_ours_keeps_its_own() -> None:
    class Remembers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("memory", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.memory

    model = checkmate.compile(Remembers(), budget="1 MB", time_limit=1)
    model(torch.ones(2, 8)).sum().backward()
    assert_same_bits(model.memory, torch.ones(8))


def test_another_thread_allocates_meanwhile_and_frees_later() -> None:
    model = net()
    step, wrong, done = in_arena(with_hidden(model)), [], threading.Event()
    received: list[tuple[Tensor, Tensor]] = []

    def work() -> None:
        while not done.is_set() or received:
            own = [torch.full((ROWS, WIDTH), float(i)) for i in range(8)]
            wrong.extend(i for i, t in enumerate(own) if not (t == i).all())
            if received:
                hidden, copy = received.pop()
                wrong.extend(["hidden"] if (hidden != copy).any() else [])

    def run(step: Any, model: nn.Module) -> Any:
        seen = []
        for batch in batches(12):
            model.zero_grad()
            loss, hidden = step(*batch)
            loss.backward()
            seen.append(clones(grads_of(model)))
            received.append((hidden.detach(), hidden.detach().clone()))
        return seen

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = run(step, model)
    finally:
        done.set()
        thread.join()
    assert not wrong
    again = net()
    assert_same_bits(found, run(with_hidden(again), again))
    received.clear()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_goes_on_after_an_exception_in_the_middle(phase: str) -> None:
    state = {"fails": False}

    @torch.library.custom_op(f"checkmate_arena::{phase}", mutates_args=())
    def may_fail(x: Tensor) -> Tensor:
        if state["fails"]:
            raise RuntimeError("in the middle")
        return x * 2

    @torch.library.custom_op(f"checkmate_arena::double_{phase}", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    op, of_gradients = (may_fail, double) if phase == "forward" else (double, may_fail)
    for one in (may_fail, double):
        one.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: of_gradients(grad))

    def run(wrap: Wrap, fails: bool) -> Any:
        model = net()
        step = wrap(lambda x, y: F.mse_loss(model[6:](op(model[:6](x))), y))
        seen = []
        for i, batch in enumerate(batches(7)):
            torch.manual_seed(i)
            state["fails"] = fails and i in (1, 4)
            if i in (1, 4):
                if fails:
                    with pytest.raises(RuntimeError, match="in the middle"):
                        step(*batch).backward()
                continue
            model.zero_grad()
            step(*batch).backward()
            seen.append(clones(grads_of(model)))
        if fails:
            (count,) = counts(step)
            assert (count.steps, count.fallbacks) == (7, 0)
        return seen

    assert_same_bits(run(in_arena, True), run(lambda step: step, False))


@pytest.mark.slow
def test_a_result_outlives_its_step() -> None:
    model = net()
    step = in_arena(with_hidden(model))
    for batch in batches(3):
        loss, hidden = step(*batch)
        loss.backward()
    arenas = [captured.arena for captured in step._run.steps]
    kept = [hidden.detach(), *grads_of(model)]
    then = clones(kept)
    del step, loss, hidden, arenas
    torch._dynamo.reset()
    gc.collect()
    other = in_arena(loss_of(model))
    for batch in batches(3):
        other(*batch)
    assert_same_bits(kept, then)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_reads_and_trains() -> None:
    """It has what was alive, and trains without an arena; the parent goes on as if nothing had been."""
    model = net()
    step, data = in_arena(loss_of(model)), batches(8)
    train(model, step, data[:4])
    loss = step(*data[4])  # what it saved is in the arena
    kept = grads_of(model)
    then = clones(kept)
    random_state = torch.get_rng_state()

    def go_on() -> list[Tensor]:
        model.zero_grad()
        loss.backward()
        first = clones(grads_of(model))
        torch.set_rng_state(random_state)
        train(model, step, data[5:])
        return first + clones(model.parameters())

    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            os.write(write, bytes([all(bool((a == b).all()) for a, b in zip(kept, then, strict=True))]))
            os.write(write, b"".join(t.numpy().tobytes() for t in go_on())[: 1 << 15])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert_same_bits(kept, then)
    expected = b"".join(t.numpy().tobytes() for t in go_on())[: 1 << 15]
    assert said[:1] == b"\1"
    assert said[1:] == (expected if _a_fork_trains() else b"")


@functools.cache
def _a_fork_trains() -> bool:
    """Whether PyTorch's own compiled code trains in a forked child; in builds for CUDA of some versions it does not."""
    weight = torch.ones(3, requires_grad=True)
    torch.compile(lambda: weight.sum(), backend="eager")().backward()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        try:
            (2 * weight).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
