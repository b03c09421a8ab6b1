"""Fine-tune adapters of a small GPT-2 with peft and the Trainer, within a budget: python examples/lora.py."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from checkmate.integrations.huggingface import WithinBudget
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

TOKENS = torch.randint(500, (16, 128))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


def trained(callbacks: list[Any]) -> int:
    """The most bytes while two steps are trained."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=128, n_embd=64, n_layer=4, n_head=4))
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))  # adapters first
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, callbacks=callbacks)
    return held + measure_peak(trainer.train).peak


plain = trained([])
print(f"plain training takes {format_bytes(plain)}")

within = WithinBudget(int(0.7 * plain), time_limit=5)  # this line
measured = trained([within])
assert within.planned is not None
assert within.planned.kept is not None
plan = within.planned.plans[0]
planned = (plan.peak or 0) + within.planned.kept.total
print(
    f"planned are {format_bytes(planned)}, room for the update included, with {plan.overhead:.1%} of the step run again"
)
print(f"measured are {format_bytes(measured)}")
