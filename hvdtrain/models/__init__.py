"""Networks by name."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hvdtrain.data import Dataset
from hvdtrain.data.splits import Shape, resized
from hvdtrain.errors import UsageError
from hvdtrain.models import lenet

NAMES = ("lenet", "mlp", "module:callable")
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
    builder = _BUILDERS.get(name) or (_import_builder(name) if ":" in name else None)
    if builder is None:
        raise UsageError(f"--model={name}: unknown; choose from {', '.join(NAMES)}")
    model = builder(shape, classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model={name}: gave a {type(model).__name__}, no torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"--model={name}: has no parameter to train")
    return model.to(dtype)


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


def _import_builder(name: str) -> Builder:
    """The callable that `module:callable` names; the working directory is searched too."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise UsageError(f"--model={name}: {error}") from error
    builder = getattr(module, attribute, None)
    if builder is None:
        raise UsageError(f"--model={name}: {module_name} has no {attribute!r}")
    if not callable(builder):
        raise UsageError(f"--model={name}: not callable")
    found: Builder = builder
    return found
