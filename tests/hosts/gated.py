"""A network that is slow until a file exists: `--model tests.hosts.gated:lenet`.

A test can thereby stop a job in the middle, however busy the machine is. HVDTRAIN_TEST_GATE names
the file. Only the time of a step depends on it; the parameters are the same.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hvdtrain.models import LeNet

GATE = "HVDTRAIN_TEST_GATE"
SLOW_S = 1.2  # 60 steps outlast the 30 s between Slurm's checks of time limits


class Gated(LeNet):
    """LeNet with a delay in each forward pass of training while the gate is closed."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and not Path(os.environ[GATE]).exists():
            time.sleep(SLOW_S)
        result: torch.Tensor = super().forward(images)
        return result


def lenet(shape: tuple[int, int, int], classes: int) -> Gated:
    return Gated(shape[0], classes)
