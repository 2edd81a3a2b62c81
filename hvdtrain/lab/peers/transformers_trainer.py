"""Train with Hugging Face's Trainer: `torchrun --nproc-per-node 2 transformers_trainer.py FOLDER`.

Clipping, logging, saving and the learning rate's schedule are off, as no other script has them.
"""

from typing import Any

import torch
import torchvision_operators  # noqa: F401
from same_work import EPOCHS, LR, MOMENTUM, read_work
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments


class WithLoss(torch.nn.Module):
    """A network that computes its loss, as the Trainer expects."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.model(x)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch as arguments of the network."""
    x, y = default_collate(samples)
    return {"x": x, "labels": y}


def main() -> None:
    """Collective: train."""
    work = read_work()
    arguments = TrainingArguments(
        work.folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=work.batch_size,
        dataloader_num_workers=work.readers,
        remove_unused_columns=False,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    model = WithLoss(work.make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=work.make_data(),
        optimizers=(optimizer, None),
    )
    trainer.train()


if __name__ == "__main__":
    main()
