"""A network whose gradients are wrong on one host: `--model tests.hosts.wrong_host:lenet`."""

from __future__ import annotations

import socket

import torch

from hvdtrain.models import LeNet
from tests.parallel.plugins import spoil_gradients

WRONG = "beta"


def lenet(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """Return LeNet; on the wrong host a bit of its gradients is wrong."""
    model = LeNet(shape[0], classes)
    if socket.gethostname() == WRONG:
        spoil_gradients(model.hidden)
    return model
