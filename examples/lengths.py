"""Train on documents of many lengths within a budget, padded batch by batch or packed: python examples/lengths.py."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from checkmate.integrations.huggingface import WithinBudget
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

# The longest batch comes first.
LENGTHS = [96, 80, 96, 96, 30, 64, 47, 20, 88, 40, 95, 33, 72, 65, 18, 52, 90, 21, 84, 38]
DOCUMENTS = [torch.randint(1, 500, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
ROWS = [{"input_ids": tokens.tolist(), "labels": tokens.tolist()} for tokens in DOCUMENTS]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch that is as long as the longest of its documents."""
    tokens = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    is_padding = tokens == 0
    return {
        "input_ids": tokens,
        "attention_mask": (~is_padding).long(),
        "labels": tokens.masked_fill(is_padding, -100),
    }


packed = DataCollatorWithFlattening()  # a batch is one row, documents one after another, each with positions from 0 on


def trained(collate: Any, callbacks: list[Any]) -> tuple[int, list[float]]:
    """The most bytes while five steps are trained, and the losses."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=5, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1, train_sampling_strategy="sequential",
    )  # fmt: skip
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS, data_collator=collate, callbacks=callbacks)
    peak = measure_peak(trainer.train).peak
    return held + peak, [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for collate in (padded, packed):
        plain, losses = trained(collate, [])
        print(f"plain training takes {format_bytes(plain)}")

        within = WithinBudget(int(0.7 * plain), time_limit=5)  # this line
        measured, losses_within = trained(collate, [within])
        assert within.planned is not None
        assert within.planned.kept is not None
        plans = within.planned.plans
        planned = max(plan.peak or 0 for plan in plans) + within.planned.kept.total
        print(f"planned are {format_bytes(planned)}, room for the update included, by {len(plans)} plans for 5 lengths")
        same = "the same" if losses == losses_within else "others"
        print(f"measured are {format_bytes(measured)}, and the losses are {same}")
