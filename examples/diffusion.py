"""Train a small diffusion model with diffusers and Accelerate, within a budget: python examples/diffusion.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader

from checkmate.integrations.loops import plans_of, within_budget
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

IMAGES: Any = torch.randn(8, 3, 16, 16)
MADE = 7 * IMAGES[:4].nbytes  # by the loop itself: noise, noisy images, the loss outside of the model
BLOCKS: Any = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


def trained(budget: int | None) -> tuple[int, Any]:
    """The most bytes while two batches are trained, and the model."""
    torch.manual_seed(0)
    model: Any = UNet2DModel(16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, **BLOCKS)
    held = sum(p.nbytes for p in model.parameters())

    def train(model: Any) -> None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.001)
        if budget is not None:
            model = within_budget(model, optimizer, budget, reserve=MADE, time_limit=5)  # this line
        accelerator = Accelerator(cpu=True)
        noises: Any = DDPMScheduler(num_train_timesteps=100)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(IMAGES, batch_size=4))
        for clean in loader:
            noise, times = torch.randn(clean.shape), torch.randint(100, (len(clean),))
            predicted = model(noises.add_noise(clean, noise, times), times, return_dict=False)[0]
            accelerator.backward(F.mse_loss(predicted, noise))
            optimizer.step()
            optimizer.zero_grad()

    return held + measure_peak(lambda: train(model)).peak, model


plain, _ = trained(None)
print(f"plain training takes {format_bytes(plain)}")

measured, model = trained(int(0.8 * plain))
found = plans_of(model)
assert found.kept is not None
planned = (found.plans[0].peak or 0) + found.kept.total + MADE
print(f"planned are {format_bytes(planned)}, room for the update included")
print(f"{found.plans[0].overhead:.1%} of the step run again")
print(f"measured are {format_bytes(measured)}")
