"""Networks by name: LeNet, an MLP, those of torchvision, and a user's."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain import plugins
from hvdtrain.data import Dataset
from hvdtrain.data.splits import Shape
from hvdtrain.data.transforms import resized
from hvdtrain.errors import UsageError
from hvdtrain.models import from_torchvision, lenet

NAMES = ("lenet", "mlp", "resnet18-small")
MLP_HIDDEN = 2048
IMAGENET_SIDE = 224
Builder = Callable[[Shape, int], nn.Module]


LEAST_SIDE = 32  # five halvings leave one pixel
IMAGE_SIZES = {"lenet": lenet.IMAGE_SIZE[0], "resnet18-small": 32, "inception_v3": 299}


def image_size_of(model_name: str) -> int | None:
    """Return the height and width that the model was designed for, or None for the default."""
    return IMAGE_SIZES.get(model_name)


def advice_on_size(model_name: str, shape: Sequence[int]) -> str:
    """Return advice for an error of a model on inputs of `shape` (..., height, width).

    It is empty unless the model is a network of torchvision, designed for larger images.
    """
    height, width = shape[-2:]
    if model_name in NAMES or ":" in model_name or min(height, width) >= IMAGENET_SIDE:
        return ""
    return (
        f". The network is designed for images of {IMAGENET_SIDE}x{IMAGENET_SIDE}, and those of "
        f"{height}x{width} may be too small: set a larger --image-size for image folders, "
        f"or choose another --model ({', '.join(NAMES)})"
    )


def notice_on_size(model_name: str, shape: Sequence[int]) -> str | None:
    """Return a notice where a network of torchvision gets images so small that it sees one pixel.

    `shape`: (..., height, width).
    """
    height, width = shape[-2:]
    if model_name in NAMES or ":" in model_name or min(height, width) >= LEAST_SIDE:
        return None
    return (
        f"{model_name} is designed for images of {IMAGENET_SIDE}x{IMAGENET_SIDE} and halves them "
        f"five times: of {height}x{width} its last layers see a single pixel. For image folders "
        f"set a larger --image-size, or choose one of {', '.join(NAMES)}"
    )


def fit_dataset(dataset: Dataset, model_name: str) -> Dataset:
    """Return the data set in the image size that the model needs (LeNet: 28x28)."""
    if model_name != "lenet" or dataset.shape[1:] == lenet.IMAGE_SIZE:
        return dataset
    return resized(dataset, lenet.IMAGE_SIZE)


def build_model(name: str, shape: Shape, classes: int, dtype: torch.dtype) -> nn.Module:
    """Return the network that `--model` names, for inputs of `shape` (channels, height, width).

    Its parameters are drawn from torch's global generator. Raises UsageError.
    """
    return check_model("--model", name, _build(name, shape, classes)).to(dtype)


def check_model(option: str, name: str, model: Any) -> nn.Module:
    """Return `model`. Raises UsageError unless it is a network with parameters to train."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{option}={name}: returned {type(model).__name__}, expected torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{option}={name}: has no parameter to train")
    return model


def _build(name: str, shape: Shape, classes: int) -> object:
    if name in _BUILDERS:
        return _BUILDERS[name](shape, classes)
    if ":" in name:
        return plugins.call(
            "--model", name, plugins.import_callable("--model", name), shape, classes
        )
    known = from_torchvision.names()  # imports torchvision, which takes a second
    if name in known:
        return from_torchvision.build(name, shape, classes)
    close = difflib.get_close_matches(name, [*NAMES, *known], n=3)
    raise UsageError(
        f"--model={name}: unknown; "
        + (f"close are {', '.join(close)}; " if close else "")
        + f"choose from {', '.join(NAMES)}, torchvision's networks (resnet50, vit_b_16, ...), "
        "and package.module:callable"
    )


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
    "lenet": lambda shape, classes: lenet.LeNet(shape[0], classes),
    "mlp": _mlp,
    "resnet18-small": from_torchvision.resnet18_small,
}
