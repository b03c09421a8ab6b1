"""Train a small GPT-2 within 60 % of the bytes that plain PyTorch takes: python examples/gpt2.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import checkmate
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

torch.manual_seed(0)
model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=128, n_embd=64, n_layer=4, n_head=4))
tokens = torch.randint(500, (8, 128))
held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), tokens))


def step(model: Any) -> float:
    """One step; gradients are let go of."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    model.zero_grad()
    return float(loss.item())


plain = held + measure_peak(lambda: step(model)).peak
print(f"plain PyTorch takes {format_bytes(plain)} for a step")

compiled = checkmate.compile(model, budget=0.6 * plain, time_limit=5)  # this line
step(compiled)  # captures, measures and plans
use = measure_peak(lambda: step(compiled))
(plan,) = compiled.plans
print(f"planned are {format_bytes(plan.peak or 0)}, with {plan.overhead:.1%} of the step run again")
print(f"measured are {format_bytes(held + use.peak)}")
