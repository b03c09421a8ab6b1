"""Train a LightningModule within a budget by a callback: python examples/lightning_callback.py."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from checkmate.integrations.lightning import WithinBudget
from checkmate.memory import measure_peak
from checkmate.units import format_bytes

DATA = TensorDataset(torch.randn(1024, 128), torch.randint(10, (1024,)))


class Classifier(lightning.LightningModule):
    """Six layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
        self.layers = nn.Sequential(*blocks, nn.Linear(128, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """What is planned, loss included."""
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Its state is reserved by the callback."""
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def trained(callbacks: list[Any]) -> int:
    """The most bytes while an epoch is trained."""
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    held = sum(p.nbytes for p in model.parameters())
    return held + measure_peak(lambda: trainer.fit(model, DataLoader(DATA, batch_size=512))).peak


plain = trained([])
print(f"plain training takes {format_bytes(plain)}")

within = WithinBudget(int(0.8 * plain), time_limit=5)  # this line
measured = trained([within])
assert within.planned is not None
assert within.planned.kept is not None
plan = within.planned.plans[0]
planned = (plan.peak or 0) + within.planned.kept.total
print(
    f"planned are {format_bytes(planned)}, room for the update included, with {plan.overhead:.1%} of the step run again"
)
print(f"measured are {format_bytes(measured)}")
