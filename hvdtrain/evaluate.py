"""Exact evaluation: each sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.data import Dataset, Shares
from hvdtrain.exchange import Exchange

EVALUATION_BATCH = 512  # samples at a time on one rank: bounds memory, changes no result
TOP_K = 5


@dataclass(frozen=True)
class Evaluation:
    """Over all samples of a split: means, and how often each class was taken for which."""

    samples: int
    loss: float
    accuracy: float
    accuracy_top5: float
    confusion: list[list[int]]  # [true class][predicted class]

    @property
    def class_counts(self) -> list[int]:
        """Samples of each class."""
        return [sum(row) for row in self.confusion]

    @property
    def class_accuracy(self) -> list[float | None]:
        """Of each class's samples, the part that was recognised; None without samples."""
        counts = self.class_counts
        return [row[i] / counts[i] if counts[i] else None for i, row in enumerate(self.confusion)]


def evaluate(
    model: torch.nn.Module,
    dataset: Dataset,
    exchange: Exchange,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Collective: mean cross-entropy, top-1 and top-5 accuracy, and the confusion matrix
    over the valid split.

    Every rank takes its share (empty where there are fewer samples than ranks). What is added over
    ranks are sums, in float64, and counts, in int64; never means. None where a rank found
    `stop_requested` on its way.
    """
    split, classes = dataset.valid, dataset.classes
    was_training = model.training
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(2 + classes * classes, dtype=torch.int64)  # stop, top-5, matrix
    own = Shares(exchange.size).of(np.arange(len(split)), exchange.rank)
    with torch.no_grad():
        for start in range(0, len(own), EVALUATION_BATCH):
            if stop_requested():
                counts[0] = 1
                break
            inputs, labels = split.batch(own[start : start + EVALUATION_BATCH])
            labels = labels.to(device)
            scores = model(inputs.to(device)).double()
            loss_sum += functional.cross_entropy(scores, labels, reduction="sum").cpu()
            best = scores.topk(min(TOP_K, classes), dim=1).indices
            counts[1] += (best == labels[:, None]).any(dim=1).sum().cpu()
            pairs = labels * classes + best[:, 0]
            counts[2:] += torch.bincount(pairs, minlength=classes * classes).cpu()
    model.train(was_training)
    loss_later = exchange.sum_later(loss_sum.reshape(1), "hvdtrain.evaluate.loss")
    counts = exchange.sum_later(counts, "hvdtrain.evaluate.counts")()
    loss = float(loss_later())
    if counts[0]:
        return None
    confusion = counts[2:].reshape(classes, classes)
    samples = int(confusion.sum())
    return Evaluation(
        samples=samples,
        loss=loss / samples,
        accuracy=int(confusion.trace()) / samples,
        accuracy_top5=int(counts[1]) / samples,
        confusion=confusion.tolist(),
    )
