"""How a disease progresses in a year, from ten figures of a patient: regression by a small network.

hvdtrain launch -np 2 -- train --task examples.regression:Diabetes --global-batch-size 32
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from hvdtrain import Splits, Sums, Task, TensorSplit


class Diabetes(Task):
    """scikit-learn's diabetes data; every fifth patient is for validation."""

    metrics = ("abs_error",)
    best = "abs_error"  # the best checkpoint is the one with the lowest

    def build_data(self) -> Splits:
        figures, progress = load_diabetes(return_X_y=True)
        inputs = torch.tensor(figures, dtype=self.settings.dtype)
        targets = torch.tensor(progress, dtype=self.settings.dtype)
        valid = torch.arange(len(targets)) % 5 == 4
        # From the train split alone, and the same on every rank.
        mean, self.scale = targets[~valid].mean(), targets[~valid].std()
        inputs, targets = inputs / inputs[~valid].std(dim=0), (targets - mean) / self.scale
        return Splits(
            "diabetes",
            TensorSplit(inputs[~valid], targets[~valid]),
            TensorSplit(inputs[valid], targets[valid]),
            "10 figures each",
        )

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Sums:
        inputs, targets = batch
        errors = model(inputs) - targets
        in_units = errors.detach().abs() * self.scale.to(errors.device)
        return Sums(errors.square().sum(), len(targets), {"abs_error": in_units.sum()})
