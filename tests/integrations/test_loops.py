"""Loops of one's own within a budget: Accelerate and diffusers' training example, and what is reserved for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.integrations.loops import plans_of, within_budget
from checkmate.integrations.planned_call import Loop
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits
from tests.support.sampling import in_turn

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
BATCH = 4
MADE = 7 * BATCH * IMAGES[0].nbytes  # by the loop, of a batch's size: noise, noisy images, the loss and its gradient


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)


def _unet() -> Any:
    from diffusers import UNet2DModel  # which takes seconds, for a case that is long

    torch.manual_seed(0)
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    sizes: dict[str, Any] = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16)}
    return UNet2DModel(norm_num_groups=4, down_block_types=down, up_block_types=up, attention_head_dim=8, **sizes)


def _train(model: Any, accelerator: Accelerator, **within: Any) -> Any:
    """Train as diffusers' example of an unconditional model does, on random images."""
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_cosine_schedule_with_warmup

    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    if within:
        model = within_budget(model, optimizer, accumulate=accelerator.gradient_accumulation_steps, **within)
    noises, rates = DDPMScheduler(num_train_timesteps=100), get_cosine_schedule_with_warmup(optimizer, 1, 4)
    loader = DataLoader(TensorDataset(IMAGES), batch_size=BATCH)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    losses = []
    for _ in range(2):
        for (clean,) in loader:
            noise, times = torch.randn(clean.shape), torch.randint(100, (len(clean),))
            noisy = noises.add_noise(clean, noise, times)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, times, return_dict=False)[0], noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {**model.state_dict()}, optimizer.state_dict(), torch.get_rng_state()


@pytest.mark.long
@pytest.mark.parametrize(("precision", "accumulate"), [("no", 2), ("bf16", 1)])
def test_the_training_example_of_diffusers_with_accelerate(precision: str, accumulate: int) -> None:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulate, cpu=True)
    model = _unet()
    held = sum(p.nbytes for p in model.parameters())
    plain = measure_peak(lambda: _train(model, accelerator))
    budget, model = int(0.85 * (held + plain.peak)), _unet()
    found = measure_peak(lambda: _train(model, accelerator, budget=budget, reserve=MADE, time_limit=1, wait="best"))
    assert_same_bits(found.result, plain.result)
    assert held + found.peak <= budget
    assert any(plan.schedule.recomputed.sum() > 0 for plan in plans_of(model).plans)
    with pytest.raises(Unsupported, match=r"was prepared already|stays within a budget already"):
        within_budget(model, optim.SGD(model.parameters()), "8 MB")


@in_turn(kind=[optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.Adafactor])
def test_the_state_that_is_reserved_is_what_the_optimizer_makes(kind: Any) -> None:
    """Before its first step and after it."""
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 8).requires_grad_(False), nn.Linear(8, 1))
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01)
    kept = Loop([optimizer], accumulates=True).kept(model, (), {})
    model(torch.ones(2, 48)).sum().backward()
    optimizer.step()
    made = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    assert kept.states == made
    assert kept.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert Loop([optimizer]).kept(model, (), {}).states == made


def test_an_optimizer_that_is_not_known_is_given_two_states() -> None:
    class Own(optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("not for one parameter")

    layer = nn.Linear(8, 8)
    assert Loop([Own(layer.parameters())]).kept(layer, (), {}).states == 2 * sum(p.nbytes for p in layer.parameters())


def test_what_is_refused() -> None:
    layer = nn.Linear(64, 64)
    sgd = optim.SGD(layer.parameters())
    with pytest.raises(TypeError, match=r"checkmate.within_budget has no option 'reserv'\. Did you mean 'reserve'"):
        within_budget(layer, sgd, "1 MB", reserv=1)  # type: ignore[call-arg]
    with pytest.raises(Unsupported, match="is not within a budget"):
        plans_of(layer)
    for compiled, says in (
        (checkmate.compile(layer, budget="1 MB"), "stays within a budget already"),
        (torch.compile(layer), r"was compiled by torch\.compile"),
    ):
        with pytest.raises(Unsupported, match=says):
            within_budget(compiled, sgd, "1 MB")
    within_budget(layer, sgd, "20 kB")
    with pytest.raises(InfeasibleBudget, match="An update of this Linear needs 33"):
        layer(torch.ones(2, 64))
    layer.eval()
    assert layer(torch.ones(2, 64)).shape == (2, 64)


def test_what_grows_with_the_batch_is_left_out_for_the_longest_so_far() -> None:
    """Batches that the loop holds, and what runs outside of the plan; of a length that was planned the plan stays."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    within_budget(model, optim.SGD(model.parameters(), lr=0.1), "1 MB", ahead=2)
    planned = plans_of(model)
    planned.loop.outside = lambda args, kwargs: 1000 * len(args[0])
    for length in (8, 64, 16, 8):
        model(torch.randn(length, 16)).sum().backward()
    assert planned.kept is not None
    assert [planned.kept.batches, planned.kept.outside] == [2 * 64 * 16 * 4, 64_000]
    short, *others = (plan.budget for plan in sorted(planned.plans, key=lambda plan: plan.problem.keep_all_peak))
    left = 10**6 - planned.kept.total
    assert [short, *others] == [left + 56_000 + 2 * 56 * 16 * 4, left, left]
