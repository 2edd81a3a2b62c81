"""A script whose micro-batch is tried before its loop: `trial_loop.py OUTPUT NAME [PASSES]`.

Without a number of passes `micro_batch="auto"` chooses it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.data import TensorSplit
from tests.device.models import small


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return cross_entropy(model(batch[0]), batch[1])


def main(output: str, name: str, passes: str | None = None) -> None:
    """Train for three steps."""
    torch.manual_seed(1)
    model = small((1, 8, 8), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorSplit(torch.randn(1200, 1, 8, 8), torch.arange(1200) % 10)
    chosen = {"grad_accum_steps": int(passes)} if passes else {"micro_batch": "auto"}
    with hvdtrain.Loop(
        model,
        optimizer,
        data,
        trial_loss=loss_of,
        device="cuda",
        global_batch_size=960,
        max_steps=3,
        trace_every=1,
        output=output,
        experiment=name,
        **chosen,
    ) as loop:
        assert all(parameter.grad is None for parameter in model.parameters())
        for step in loop:
            for images, labels in step.batches():
                step.backward(mean=loss_of(model, (images, labels)), count=len(labels))
            step.update()


if __name__ == "__main__":
    main(*sys.argv[1:])
