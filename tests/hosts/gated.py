"""A network that is slow until a file is there: `--model tests.hosts.gated:lenet`.

So a test can stop a job in the middle however busy the machine is. Time is all that it changes: the
file's name is in HVDTRAIN_TEST_GATE, and what is learned is the same with and without it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hvdtrain.models.lenet import LeNet

GATE = "HVDTRAIN_TEST_GATE"
SLOW_S = 1.2  # 60 steps outlast the half minute in which Slurm looks at time limits


class Gated(LeNet):
    """LeNet; each forward pass in training takes a moment longer while the gate is shut."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and not Path(os.environ[GATE]).exists():
            time.sleep(SLOW_S)
        result: torch.Tensor = super().forward(images)
        return result


def lenet(shape: tuple[int, int, int], classes: int) -> Gated:
    return Gated(shape[0], classes)
