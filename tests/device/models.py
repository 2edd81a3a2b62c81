"""Models and tasks for the checks on the device: `--model tests.device.models:NAME`."""

from __future__ import annotations

import torch

from tests.parallel.tasks import Pictures


def small(shape, classes) -> torch.nn.Module:
    """A network whose passes change buffers and draw random numbers."""
    channels, height, width = shape
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * (height - 2) * (width - 2), classes),
    )


class Rooted(torch.nn.Module):
    """A network whose gradient is not finite from a forward pass of training on: sqrt(0)."""

    def __init__(self, shape, classes) -> None:
        super().__init__()
        self.inner = small(shape, classes)
        self.root = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.inner(images) + torch.sqrt((self.root * float(self.calls < 3)).square())


def without_derivative(shape, classes) -> torch.nn.Module:
    return Rooted(shape, classes)


class Lazy(Pictures):
    """Pictures for a model with a buffer that is set, on its device, by the first pass."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_buffer("mean", None, persistent=False)

        def note(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            if module.training:
                before = 0 if module.mean is None else module.mean
                module.mean = inputs[0].mean((0, 2, 3)) + 0.5 * before

        model.register_forward_pre_hook(note)
        return model
