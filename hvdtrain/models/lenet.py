"""LeNet as in "Dive into Deep Learning", section "Training on Multiple GPUs" (from scratch).

Source: A. Zhang, Z. Lipton, M. Li, A. Smola, https://d2l.ai, chapter 13.5: two convolutions of 20
and 50 channels, ReLU, average pooling, and a hidden layer of 128.
"""

from __future__ import annotations

import torch
from torch import nn

IMAGE_SIZE = (28, 28)
FLATTENED = 50 * 4 * 4


class LeNet(nn.Module):
    """A network that maps images of 28x28 to class scores."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 20, kernel_size=3)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5)
        self.hidden = nn.Linear(FLATTENED, 128)
        self.output = nn.Linear(128, classes)
        self.pool = nn.AvgPool2d(2)
        self.relu = nn.ReLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (samples, channels, 28, 28) to scores (samples, classes)."""
        features = self.pool(self.relu(self.conv1(images)))
        features = self.pool(self.relu(self.conv2(features)))
        hidden = self.relu(self.hidden(features.flatten(start_dim=1)))
        scores: torch.Tensor = self.output(hidden)
        return scores
