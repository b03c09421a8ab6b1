"""Lightning within a budget: the bits of its plain run, and the bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate.errors import InfeasibleBudget, Unsupported
from checkmate.integrations.lightning import BatchSizeFinder, WithinBudget
from checkmate.memory import measure_peak
from tests.support.bits import assert_same_bits

DRAWN = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(224, 64, generator=DRAWN), torch.randint(10, (224,), generator=DRAWN))


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    torch._dynamo.reset()


class Automatic(lightning.LightningModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.layers, self.batch_size = nn.Sequential(*blocks, nn.Linear(64, 10)), batch_size

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": (logits.argmax(1) == y).float().mean(), "size": len(y)})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("of validation", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.log("loss", loss)


class WithLoader(Automatic):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(DATA, batch_size=self.batch_size)


class Seen(lightning.Callback):
    def __init__(self) -> None:
        self.figures: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.figures.append((trainer.global_step, {**trainer.callback_metrics}, {**trainer.logged_metrics}))


RUNS = ("plain", "within")  # each with its checkpoint
LOADERS = DataLoader(DATA, batch_size=64), DataLoader(DATA, batch_size=64)


def _trainer(*callbacks: Any, **more: Any) -> lightning.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1}
    return lightning.Trainer(**{"max_epochs": 2, **quiet, **more}, callbacks=[*callbacks])


def _trained(
    kind: Any, *callbacks: Any, resume: Path | None = None, loaders: Any = LOADERS, **more: Any
) -> tuple[int, Any]:
    """The most bytes at a time, and what training leaves."""
    lightning.seed_everything(0, verbose=False)
    module, seen = kind(), Seen()
    trainer = _trainer(*callbacks, seen, **more)
    before = sum(p.nbytes for p in module.parameters())
    peak = measure_peak(lambda: trainer.fit(module, *loaders, ckpt_path=resume, weights_only=False)).peak
    if resume is None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, f"{RUNS[bool(callbacks)]}.ckpt"))
    left = {**module.state_dict()}, module.optimizers().state_dict(), module.lr_schedulers().state_dict()
    return before + peak, (seen.figures, *left, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "share"),
    [
        (Automatic, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}, 0.92),
        (Automatic, {"precision": "bf16-mixed"}, 0.9),
        (Manual, {}, 0.96),
    ],
    ids=["automatic", "automatic in bfloat16", "manual"],
)
def test_training_within_a_budget(kind: Any, more: dict[str, Any], share: float, tmp_path: Path) -> None:
    most, plain = _trained(kind, default_root_dir=tmp_path, **more)
    within = WithinBudget(int(share * most), time_limit=1, wait="best")
    measured, found = _trained(kind, within, default_root_dir=tmp_path, **more)
    assert len(plain[0]) == 8
    assert_same_bits(found, plain)
    assert measured <= int(share * most)
    assert any(plan.schedule.recomputed.sum() > 0 for plan in within.planned.plans)
    names, others = ({*torch.load(tmp_path / f"{n}.ckpt", weights_only=False)["state_dict"]} for n in RUNS)
    assert names == others


class OfLengths(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.words(x)).mean(1)


@pytest.mark.long
def test_lengths_that_change(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    batches = [(torch.randint(50, (8, n), generator=drawn), torch.arange(8)) for n in (40, 31, 17, 25, 36, 12, 40)]
    loaders: Any = [DataLoader(some, batch_size=None) for some in (batches, batches[:1])]  # type: ignore[arg-type]
    most, plain = _trained(OfLengths, loaders=loaders, default_root_dir=tmp_path)
    within = WithinBudget(int(0.9 * most), time_limit=1)
    measured, found = _trained(OfLengths, within, loaders=loaders, default_root_dir=tmp_path)
    assert_same_bits(found, plain)
    assert measured <= int(0.9 * most)
    assert len(within.planned.plans) == 6
    assert [len(cache.steps) for cache in within.planned._caches] == [1]


@pytest.mark.slow
def test_without_a_budget_it_is_what_there_is(tmp_path: Path) -> None:
    _, plain = _trained(Automatic, default_root_dir=tmp_path)
    within = WithinBudget(time_limit=1)
    _, found = _trained(Automatic, within, default_root_dir=tmp_path)
    assert_same_bits(found, plain)
    assert all(plan.budget > 10**8 and not plan.schedule.recomputed.any() for plan in within.planned.plans)


@pytest.mark.slow
def test_resuming_within_a_budget_and_what_runs_is_chosen(tmp_path: Path) -> None:
    """The states of a plain checkpoint after one epoch are counted before the first step."""
    _trained(Automatic, max_epochs=1, default_root_dir=tmp_path)
    resume = tmp_path / "plain.ckpt"
    _, plain = _trained(Automatic, resume=resume, max_epochs=2, default_root_dir=tmp_path)
    within = WithinBudget("500 kB", of="forward", time_limit=1, wait="best")
    _, found = _trained(Automatic, within, resume=resume, max_epochs=2, default_root_dir=tmp_path)
    assert plain[0][-1][0] == 8
    assert_same_bits(found, plain)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no option 'time_limits'\. Did you mean 'time_limit'"):
        WithinBudget("1 MB", time_limits=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match='of is "training_step" or "forward"'):
        WithinBudget("1 MB", of="training")

    class NoForward(Manual):
        forward = lightning.LightningModule.forward

    compiled, whole = checkmate.compile(Automatic(), budget="1 MB"), WithinBudget("1 MB", of="training_step")
    for callback, module, error, says in (
        (WithinBudget("1 MB"), compiled, Unsupported, "stays within a budget already"),
        (whole, Manual(), Unsupported, "With manual optimization training_step is a loop"),
        (WithinBudget("200 kB"), Automatic(), InfeasibleBudget, "An update of this Automatic needs"),
        (WithinBudget("1 MB"), NoForward(), Unsupported, "NoForward has no forward to plan"),
        (BatchSizeFinder("1 MB"), Automatic(), Unsupported, "give the module or the data module a batch_size"),
    ):
        with pytest.raises(error, match=says):
            _trainer(callback).fit(module, LOADERS[0])


@pytest.mark.long
def test_the_batch_size_that_is_found_trains_within_the_budget(tmp_path: Path) -> None:
    finder, module = BatchSizeFinder(500_000, time_limit=8), WithLoader()
    _trainer(finder, max_steps=1).fit(module)
    assert 8 < finder.found.size == module.batch_size < len(DATA)
    kind = functools.partial(WithLoader, finder.found.size)
    within = WithinBudget(500_000, time_limit=2, wait="best")
    measured, _ = _trained(kind, within, loaders=(), default_root_dir=tmp_path, max_epochs=1)
    assert measured <= 500_000
