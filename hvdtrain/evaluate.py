"""Exact evaluation: each sample counts once, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.data import Split, share
from hvdtrain.exchange import Exchange

EVALUATION_BATCH = 512  # samples at a time on one rank: bounds memory, changes no result


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples of a split."""

    samples: int
    loss: float
    accuracy: float


def evaluate(
    model: torch.nn.Module, split: Split, exchange: Exchange, device: torch.device
) -> Evaluation:
    """Collective: mean cross-entropy and accuracy over `split`.

    Every rank takes its share (empty where there are fewer samples than ranks); sums and counts
    are added over ranks in float64, never means.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct, samples
    own = share(np.arange(len(split)), exchange.rank, exchange.size)
    with torch.no_grad():
        for start in range(0, len(own), EVALUATION_BATCH):
            inputs, labels = split.batch(own[start : start + EVALUATION_BATCH])
            labels = labels.to(device)
            scores = model(inputs.to(device))
            loss = functional.cross_entropy(scores.double(), labels, reduction="sum")
            correct = (scores.argmax(dim=1) == labels).sum()
            totals += torch.stack([loss, correct, correct.new_tensor(len(labels))]).double().cpu()
    model.train(was_training)
    loss_sum, correct_sum, samples = exchange.sum_later(totals, "hvdtrain.evaluate")().tolist()
    return Evaluation(int(samples), loss_sum / samples, correct_sum / samples)
