"""The recipes of docs/ecosystem.md, plainly and compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import checkmate
from tests.support import recipes
from tests.support.bits import assert_same_bits
from tests.support.ranks import torchrun
from tests.support.sampling import long, slow

ON_SEVERAL_RANKS = "DistributedDataParallel", "FSDP2", "Sharded parameters in one plan", "Whole steps on several ranks"
ONE_LINE = ("Hugging Face Trainer", "TRL and peft", "Lightning", "Accelerate and diffusers")
WHOLE_STEPS = ("Whole steps with the Hugging Face Trainer", "Whole steps with Lightning")


def test_every_tool_has_its_recipe() -> None:
    assert [*recipes.RECIPES] == [*ON_SEVERAL_RANKS, *ONE_LINE, *WHOLE_STEPS]


@pytest.mark.parametrize(
    "name", [slow("Lightning"), *(long(name) for name in ONE_LINE if name != "Lightning"), *map(slow, WHOLE_STEPS)]
)
def test_in_one_process(name: str, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    recipes.compare(name)


@pytest.mark.long
def test_the_trainer_of_hugging_face(one_thread: None, tmp_path: Path) -> None:
    """bfloat16, several shapes, evaluation in between, checkpoints, and the model that is saved in the end."""
    tokens = torch.randint(97, (14, 32))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    training = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "bf16": True}
    reports = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 1, "report_to": []}

    def trained(name: str, wrap: Callable[[Any], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        where = {"output_dir": str(tmp_path / name), "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(**training, **reports, **where)
        trainer = Trainer(model=wrap(GPT2LMHeadModel(config)), args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.save_model()
        shown = "loss", "grad_norm", "eval_loss"
        figures = [log[key] for log in trainer.state.log_history for key in shown if key in log]
        return figures, GPT2LMHeadModel.from_pretrained(tmp_path / name).state_dict()

    torch._dynamo.reset()
    plain, state = trained("plain", lambda model: model)
    found, saved = trained("compiled", lambda model: checkmate.compile(model, budget="1.1 MB", time_limit=1))
    assert found == plain
    assert len(plain) > 5
    assert_same_bits(saved, state)
    names = ({file.relative_to(run) for file in run.rglob("*")} for run in (tmp_path / "plain", tmp_path / "compiled"))
    assert next(names) == next(names)


@pytest.mark.skipif(not dist.is_available(), reason="PyTorch without distributed")
@pytest.mark.long
@pytest.mark.parametrize("name", [*ON_SEVERAL_RANKS, "Hugging Face Trainer"])
def test_by_torchrun(name: str, tmp_path: Path) -> None:
    torchrun("-m", "tests.support.recipes", name, folder=tmp_path)
