"""A training by Lightning, with accumulation and clipping; what the audit adds is marked.

hvdtrain launch -np 3 -- python -m tests.parallel.scripts.lightning_loop
"""

from __future__ import annotations

import os

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.integrations.lightning import AuditCallback  # added


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("valid_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options: object) -> lightning.Trainer:
    """A trainer on the CPUs of this host, which writes nothing."""
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    size = int(os.environ.get("WORLD_SIZE", 1))
    quiet = dict.fromkeys(silent, False)
    return lightning.Trainer(accelerator="cpu", devices=size, max_epochs=1, **quiet, **options)


def make_loader() -> DataLoader:
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels[:1200] / 16), torch.tensor(labels[:1200]))
    return DataLoader(data, batch_size=20)


if __name__ == "__main__":
    torch.manual_seed(42)
    model, loader = Digits().double(), make_loader()
    trainer = make_trainer(
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=[AuditCallback(every=2)],  # added
    )
    trainer.fit(model, loader, loader)
    weights = model.state_dict()
