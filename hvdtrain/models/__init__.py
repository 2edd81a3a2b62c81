"""Networks by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hvdtrain.data import Dataset
from hvdtrain.data.resize import resized
from hvdtrain.data.splits import Shape
from hvdtrain.errors import UsageError
from hvdtrain.models import lenet
from hvdtrain.plugins import call_plugin, import_plugin

NAMES = ("lenet", "mlp", "module:callable")
MLP_HIDDEN = 2048
Builder = Callable[[Shape, int], nn.Module]


def image_size_of(model_name: str) -> int | None:
    """The height and width that the model needs, or None where it takes any."""
    return lenet.IMAGE_SIZE[0] if model_name == "lenet" else None


def fit_dataset(dataset: Dataset, model_name: str) -> Dataset:
    """The data set in the image size that the model needs (LeNet: 28x28), resized if necessary."""
    size = image_size_of(model_name)
    if size is None or dataset.shape[1:] == (size, size):
        return dataset
    return resized(dataset, (size, size))


def build_model(name: str, shape: Shape, classes: int, dtype: torch.dtype) -> nn.Module:
    """The network that `--model` names, for inputs of `shape` (channels, height, width).

    Its parameters are drawn from torch's global generator. Raises UsageError.
    """
    builder = _BUILDERS.get(name) or (import_plugin("--model", name) if ":" in name else None)
    if builder is None:
        raise UsageError(f"--model={name}: unknown; choose from {', '.join(NAMES)}")
    model = call_plugin("--model", name, lambda: builder(shape, classes))
    return check_model("--model", name, model).to(dtype)


def check_model(option: str, name: str, model: Any) -> nn.Module:
    """`model`, if it is a network with something to train. Raises UsageError."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{option}={name}: gave a {type(model).__name__}, no torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{option}={name}: has no parameter to train")
    return model


def _lenet(shape: Shape, classes: int) -> nn.Module:
    return lenet.LeNet(shape[0], classes)


def _mlp(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), MLP_HIDDEN),
        nn.ReLU(),
        nn.Linear(MLP_HIDDEN, MLP_HIDDEN),
        nn.ReLU(),
        nn.Linear(MLP_HIDDEN, classes),
    )


_BUILDERS: dict[str, Builder] = {"lenet": _lenet, "mlp": _mlp}
