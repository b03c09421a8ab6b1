"""Trainers of transformers and TRL within a budget: the bits of the plain run of the same tool, and the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import checkmate
from checkmate.errors import BudgetError, InfeasibleBudget, Unsupported
from checkmate.integrations.huggingface import WithinBudget, find_batch_size
from checkmate.memory import measure_peak
from examples.lengths import DOCUMENTS, packed, padded
from tests.support.bits import assert_same_bits
from tests.support.sampling import long, slow

TOKENS = torch.randint(2, 64, (12, 32), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]
SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss", "entropy", "mean_token_accuracy", "rewards/margins")


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    torch._dynamo.reset()


def _gpt2(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, **heads, **special))


def _lora(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"]))


def _arguments(folder: Path, **more: Any) -> dict[str, Any]:
    common = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return {"output_dir": str(folder), "disable_tqdm": True, **common, **sizes, **more}


def _trainer(folder: Path, model: Any, *callbacks: Any, **more: Any) -> Trainer:
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:4], "callbacks": [*filter(None, callbacks)]}
    return Trainer(model=model, args=TrainingArguments(**_arguments(folder, **more)), **data)


def _held(*modules: Any) -> int:
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def _trained(trainer: Any, **resume: Any) -> tuple[int, Any]:
    """The most bytes at a time, and what training leaves."""
    before = _held(*filter(None, (trainer.model, getattr(trainer, "ref_model", None))))
    peak = measure_peak(lambda: trainer.train(**resume)).peak
    figures = [(name, log[name]) for log in trainer.state.log_history for name in SHOWN if name in log]
    return before + peak, (figures, trainer.model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state())


def _same_within(make: Callable[[Any], Any], share: float, budget_of: int | None = None) -> tuple[Any, Any]:
    """Check that a trainer trains as the plain one does, within a share of its bytes, and runs something again."""
    most, plain = _trained(make(None))
    budget = int(share * (budget_of or most))
    within = WithinBudget(budget, time_limit=1, wait="best")
    measured, found = _trained(make(within))
    assert len(plain[0]) > 6
    assert_same_bits(found, plain)
    assert measured <= budget < (budget_of or most)
    assert any(plan.schedule.recomputed.sum() > 0 for plan in within.planned.plans)
    return within, plain


@pytest.mark.slow
def test_a_trainer_with_accumulation_amp_evaluation_and_checkpoints(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "bf16": True, "lr_scheduler_type": "cosine"}
    more |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def make(within: WithinBudget | None) -> Trainer:
        return _trainer(tmp_path / ("plain" if within is None else "within"), _gpt2(), within, **more)

    within, plain = _same_within(make, 0.85)
    assert within.planned.kept.gradients > 0
    names = [{f.relative_to(tmp_path / run) for f in (tmp_path / run).rglob("*")} for run in ("plain", "within")]
    assert names[0] == names[1]
    again = WithinBudget("2 MB", time_limit=1, wait="best")
    _, resumed = _trained(make(again), resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert_same_bits(resumed[1:3], plain[1:3])


@pytest.mark.parametrize("model", [slow("lora"), long("gpt2")])
def test_a_trainer(model: str, tmp_path: Path) -> None:
    """The state that is reserved is that of what trains: with adapters that of the adapters only."""
    make = _gpt2 if model == "gpt2" else lambda: _lora(_gpt2())
    within, _ = _same_within(lambda within: _trainer(tmp_path, make(), within), 0.85)
    trained = sum(p.nbytes + 4 / 2 for p in make().parameters() if p.requires_grad)  # a count for each parameter
    assert within.planned.kept.states == 2 * trained


@pytest.mark.slow
def test_what_is_given_too_late_or_twice_or_too_small(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no option 'time_limits'\. Did you mean 'time_limit'"):
        WithinBudget("1 MB", time_limits=1)  # type: ignore[call-arg]
    with pytest.raises(BudgetError):
        WithinBudget("1 Miles")
    late = _trainer(tmp_path, _gpt2(1), bf16=True)
    late.add_callback(WithinBudget("2 MB"))
    with pytest.raises(Unsupported, match="when the Trainer is made"):
        late.train()
    twice = [WithinBudget("2 MB"), WithinBudget("2 MB")]
    for model, callbacks in ((_gpt2(1), twice), (checkmate.compile(_gpt2(1), budget="2 MB"), twice[:1])):
        with pytest.raises(Unsupported, match="stays within a budget already"):
            _trainer(tmp_path, model, *callbacks)
    with pytest.raises(InfeasibleBudget, match="An update of this GPT2LMHeadModel needs"):
        _trainer(tmp_path, _gpt2(1), WithinBudget("200 kB", time_limit=1)).train()
    with pytest.raises(Unsupported, match="it finds the size"):
        _trainer(tmp_path, _gpt2(1), WithinBudget("2 MB"), auto_find_batch_size=True).train()


@pytest.mark.long
def test_the_smallest_budget_that_is_named_for_a_batch_works(tmp_path: Path) -> None:
    """Training keeps more than the first budget beside a step."""
    trainer = _trainer(tmp_path, _gpt2(), max_steps=1, per_device_train_batch_size=2)
    find = partial(find_batch_size, trainer, smallest=2, largest=2, time_limit=5, measure=False)
    with pytest.raises(InfeasibleBudget, match="Beside a step training keeps") as refused:
        find(300_000)
    assert find(refused.value.min_budget).size == 2


@pytest.mark.long
def test_the_largest_batch_is_found_by_plans(tmp_path: Path) -> None:
    """The size that is found trains within the budget, and the Trainer takes it."""
    trainer = _trainer(tmp_path, _gpt2(), auto_find_batch_size=True, max_steps=2, per_device_train_batch_size=1)
    WithinBudget(900_000, time_limit=40).add_to(trainer)
    size = trainer.args.per_device_train_batch_size
    assert 1 < size < len(ROWS)
    measured, _ = _trained(trainer)
    assert measured <= 900_000
    assert trainer.state.train_batch_size == size


def _texts(tmp_path: Path) -> Any:
    """A tokenizer of words, and sentences."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = "abcdefghijklmnopqr"
    table = {word: n for n, word in enumerate(["<pad>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<eos>"}
    drawn = torch.Generator().manual_seed(2)
    text = lambda n: " ".join(words[i] for i in torch.randint(len(words), (n,), generator=drawn))  # noqa: E731
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends), text


@pytest.mark.long
def test_sentences_of_many_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL pads each batch to its longest sentence."""
    import trl.trainer.utils
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 8)  # tiles as small as the model

    def trainer(*callbacks: Any) -> Any:
        torch.manual_seed(3)
        tokenizer, text = _texts(tmp_path)
        sentences = Dataset.from_list([{"text": text(n)} for n in (31, 20, 9, 25, 14, 28, 18, 22, 11, 30, 16, 27)])
        arguments = SFTConfig(
            max_length=32, **_arguments(tmp_path, per_device_train_batch_size=2, max_steps=5, bf16=False)
        )
        about: dict[str, Any] = {"args": arguments, "processing_class": tokenizer, "callbacks": [*callbacks]}
        return SFTTrainer(_llama(), train_dataset=sentences, **about)

    most, plain = _trained(trainer())
    within = WithinBudget(int(0.95 * most), time_limit=1)
    measured, left = _trained(trainer(within))
    assert_same_bits(left, plain)
    assert measured <= 0.95 * most
    assert within.planned is not None
    assert [len(cache.steps) for cache in within.planned._caches] == [1]


def _trl(kind: str, tmp_path: Path, *, lora: bool, **more: Any) -> Callable[[WithinBudget | None], Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    tokenizer, text = _texts(tmp_path)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None
    common = {"max_length": 32, **_arguments(tmp_path, per_device_train_batch_size=2, max_steps=2, bf16=False, **more)}
    sentences = Dataset.from_list([{"text": text(31)} for _ in range(8)])
    pairs = Dataset.from_list([{"prompt": text(8), "chosen": text(20), "rejected": text(16)} for _ in range(8)])
    shared: dict[str, Any] = {"processing_class": tokenizer, "peft_config": adapters}

    def make(within: WithinBudget | None) -> Any:
        torch.manual_seed(3)
        if kind == "sft":
            asked = {"args": SFTConfig(**common), "callbacks": [*filter(None, [within])]}
            return SFTTrainer(_llama(), train_dataset=sentences, **asked, **shared)
        reference = None if lora else _llama()
        trainer = DPOTrainer(_llama(), reference, args=DPOConfig(**common), train_dataset=pairs, **shared)
        if within is not None:
            within.add_to(trainer)
        return trainer

    return make


@pytest.mark.parametrize(
    ("kind", "lora"), [slow("dpo", False), long("sft", True), long("sft", False), long("dpo", True)]
)
def test_trainers_of_trl(kind: str, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing, which TRL turns on, is turned off; the plan runs again what it needs."""
    import trl.trainer.utils

    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 8)  # tiles as small as the model
    more = {"gradient_accumulation_steps": 2}
    most, _ = _trained(_trl(kind, tmp_path, lora=lora, activation_checkpointing=False, **more)(None))
    within, _ = _same_within(_trl(kind, tmp_path, lora=lora, **more), 0.85, most)
    assert within.planned.kept.outside > 0
    assert (within.planned.kept.beside > _held(_llama())) == (kind == "dpo" and not lora)


@pytest.mark.parametrize("collate", [long(padded), long(packed)])
def test_documents_of_many_lengths(collate: Any, tmp_path: Path) -> None:
    """They are padded to the longest of a batch, or packed into one row: two captures, or one where none is padded."""
    rows = [{"input_ids": row, "labels": row} for row in ((tokens % 60 + 1).tolist() for tokens in DOCUMENTS)]

    def trainer(*callbacks: Any) -> Trainer:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False))
        arguments = TrainingArguments(**_arguments(tmp_path, max_steps=4, train_sampling_strategy="sequential"))
        return Trainer(model, arguments, data_collator=collate, train_dataset=rows, callbacks=[*callbacks])

    most, plain = _trained(trainer())
    within = WithinBudget(int(0.8 * most), time_limit=1)
    measured, left = _trained(trainer(within))
    assert_same_bits(left, plain)
    assert measured <= 0.8 * most
    assert within.planned is not None
    assert len(within.planned.plans) == 4
    assert sum(len(cache.steps) for cache in within.planned._caches) <= 1 + (collate is padded)


def test_a_reference_model_that_a_callback_does_not_see_is_refused(tmp_path: Path) -> None:
    """Refuse the largest batch of a trainer with a loss of its own, too."""
    trainer = _trl("dpo", tmp_path, lora=True)(None)
    trainer.add_callback(WithinBudget("2 MB"))
    with pytest.raises(Unsupported, match=r"add_to\(trainer\)"):
        trainer.train()
    with pytest.raises(Unsupported, match="SFTTrainer computes its loss itself"):
        find_batch_size(_trl("sft", tmp_path, lora=False)(None), "2 MB")
