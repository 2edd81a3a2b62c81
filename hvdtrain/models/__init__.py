"""Networks by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

import torch
from torch import nn

from hvdtrain import plugins
from hvdtrain.data import Dataset
from hvdtrain.data.splits import Shape, resized
from hvdtrain.errors import UsageError
from hvdtrain.models import from_torchvision, lenet

NAMES = ("lenet", "mlp", "resnet18-small")
MLP_HIDDEN = 2048
Builder = Callable[[Shape, int], nn.Module]


def fit_images(dataset: Dataset, model_name: str) -> Dataset:
    """The data set in the image size that the model needs (LeNet: 28x28), resized if necessary."""
    height, width = dataset.shape[1:]
    if model_name != "lenet" or (height, width) == lenet.IMAGE_SIZE:
        return dataset
    return resized(dataset, lenet.IMAGE_SIZE)


def build_model(name: str, shape: Shape, classes: int, dtype: torch.dtype) -> nn.Module:
    """The network that `--model` names, for inputs of `shape` (channels, height, width).

    Its parameters are drawn from torch's global generator. Raises UsageError.
    """
    model = _build(name, shape, classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model={name}: gave a {type(model).__name__}, no torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--model={name}: has no parameter to train")
    return model.to(dtype)


def _build(name: str, shape: Shape, classes: int) -> object:
    if name in _BUILDERS:
        return _BUILDERS[name](shape, classes)
    if ":" in name:
        return plugins.call(
            "--model", name, plugins.import_callable("--model", name), shape, classes
        )
    known = from_torchvision.names()  # torchvision takes a second: only where it is asked for
    if name in known:
        return from_torchvision.build(name, shape, classes)
    close = difflib.get_close_matches(name, [*NAMES, *known], n=3)
    raise UsageError(
        f"--model={name}: unknown; "
        + (f"close are {', '.join(close)}; " if close else "")
        + f"choose from {', '.join(NAMES)}, torchvision's networks (resnet50, vit_b_16, ...), "
        "and package.module:callable"
    )


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


_BUILDERS: dict[str, Builder] = {
    "lenet": _lenet,
    "mlp": _mlp,
    "resnet18-small": from_torchvision.resnet18_small,
}
