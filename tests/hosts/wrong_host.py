"""A network whose gradients are wrong on one host: `--model tests.hosts.wrong_host:lenet`."""

from __future__ import annotations

import socket
from typing import Any

import torch

from hvdtrain.models import LeNet

WRONG = "beta"
WRONG_BIT = 1 << 20


class Flip(torch.autograd.Function):
    """The identity, with a wrong bit in the largest value of its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone().contiguous()
        spoilt.view(-1).view(torch.int32)[int(spoilt.abs().argmax())] ^= WRONG_BIT
        return spoilt


def lenet(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """Return LeNet; on the wrong host, the gradient of its hidden layer's output is changed."""
    model = LeNet(shape[0], classes)
    if socket.gethostname() == WRONG:
        model.hidden.register_forward_hook(lambda module, inputs, output: Flip.apply(output))
    return model
