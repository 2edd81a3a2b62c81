"""Networks by name: LeNet, an MLP, those of torchvision, and a user's.

torchvision's classification networks are built for the classes, channels and image size of the
data, with newly initialised parameters.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hvdtrain.config import plugins
from hvdtrain.data import Dataset
from hvdtrain.data.builtin import import_torchvision
from hvdtrain.data.splits import Shape
from hvdtrain.data.transforms import resized
from hvdtrain.errors import UsageError, closest

MLP_HIDDEN = 2048
LENET_SIZE = (28, 28)
# Height and width for which a network was designed; most of torchvision's: IMAGENET_SIDE.
IMAGE_SIZES = {"lenet": LENET_SIZE[0], "resnet18-small": 32, "inception_v3": 299}
IMAGENET_SIDE = 224
LEAST_SIDE = 32  # five halvings leave one pixel
COLOURS = 3  # input channels of torchvision's networks
MAXVIT_SIDE = 7 * 2**5  # five halvings, then windows of 7


class LeNet(nn.Sequential):
    """LeNet as in "Dive into Deep Learning", section "Training on Multiple GPUs" (from scratch).

    Source: A. Zhang, Z. Lipton, M. Li, A. Smola, https://d2l.ai, chapter 13.5: two convolutions of
    20 and 50 channels, ReLU, average pooling, and a hidden layer of 128. It maps (samples,
    channels, 28, 28) to scores (samples, classes).
    """

    def __init__(self, channels: int, classes: int) -> None:
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, 20, kernel_size=3),
            "relu1": nn.ReLU(),
            "pool1": nn.AvgPool2d(2),
            "conv2": nn.Conv2d(20, 50, kernel_size=5),
            "relu2": nn.ReLU(),
            "pool2": nn.AvgPool2d(2),
            "flatten": nn.Flatten(),
            "hidden": nn.Linear(50 * 4 * 4, 128),
            "relu3": nn.ReLU(),
            "output": nn.Linear(128, classes),
        }
        super().__init__(OrderedDict(layers))


def _mlp(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), MLP_HIDDEN),
        nn.ReLU(),
        nn.Linear(MLP_HIDDEN, MLP_HIDDEN),
        nn.ReLU(),
        nn.Linear(MLP_HIDDEN, classes),
    )


def _resnet18_small(shape: Shape, classes: int) -> nn.Module:
    """Return ResNet-18 with a 3x3 convolution of stride 1 first, and no pooling after it.

    For images of about 32x32, of which the usual stride and pooling would leave 1x1. Source: K. He
    et al., "Deep Residual Learning" (2015), section 4.2, their networks for CIFAR-10.
    """
    model: nn.Module = import_torchvision().models.resnet18(weights=None, num_classes=classes)
    model.conv1 = nn.Conv2d(shape[0], 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


BUILDERS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "lenet": lambda shape, classes: LeNet(shape[0], classes),
    "mlp": _mlp,
    "resnet18-small": _resnet18_small,
}
NAMES = tuple(BUILDERS)


def build_model(name: str, shape: Shape, classes: int, dtype: torch.dtype) -> nn.Module:
    """Return the network that `--model` names, for inputs of `shape` (channels, height, width).

    Its parameters are drawn from torch's global generator. Raises UsageError.
    """
    return check_model("--model", name, _build(name, shape, classes)).to(dtype)


def _build(name: str, shape: Shape, classes: int) -> object:
    if name in BUILDERS:
        return BUILDERS[name](shape, classes)
    if ":" in name:
        build = plugins.import_callable("--model", name)
        return plugins.call("--model", name, build, shape, classes)
    models = import_torchvision().models  # importing it takes a second
    available: list[str] = models.list_models(module=models)
    if name in available:
        model = models.get_model(name, weights=None, num_classes=classes, **_settings(name, shape))
        if shape[0] != COLOURS:
            _change_input_channels(model, shape[0])
        return model
    near = closest(name, [*NAMES, *available])
    raise UsageError(
        f"--model={name}: unknown"
        + (f" (did you mean {near}?)" if near else "")
        + f"; choose from {', '.join(NAMES)}, torchvision's networks (resnet50, vit_b_16, ...), "
        "and package.module:callable"
    )


def _settings(name: str, shape: Shape) -> dict[str, Any]:
    """Return the constructor arguments of a network of torchvision, besides the classes."""
    _, height, width = shape
    if name in ("googlenet", "inception_v3"):
        # Auxiliary heads make the output a tuple; the default of `init_weights` makes a warning.
        return {"aux_logits": False, "init_weights": True}
    if name != "maxvit_t" and not name.startswith("vit_"):
        return {}
    # The side of a patch is the end of the name of a vit.
    unit = MAXVIT_SIDE if name == "maxvit_t" else int(name.rpartition("_")[2])
    if height % unit or width % unit:
        raise UsageError(
            f"--model={name}: needs images whose height and width are multiples of {unit}, "
            f"the data has {height}x{width}"
        )
    if name == "maxvit_t":
        return {"input_size": (height, width)}
    if height != width:
        raise UsageError(f"--model={name}: needs square images, the data has {height}x{width}")
    return {"image_size": height}


def _change_input_channels(model: nn.Module, channels: int) -> None:
    """Give the first convolution this number of input channels. Its initialisation is torch's
    default, as that of the network is not accessible.
    """
    first = next(
        module
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == COLOURS
    )
    first.in_channels = channels
    shape = (first.out_channels, channels // first.groups, *first.kernel_size)
    first.weight = nn.Parameter(first.weight.new_empty(shape))
    first.reset_parameters()


def check_model(option: str, name: str, model: Any) -> nn.Module:
    """Return `model`. Raises UsageError unless it is a network with parameters to train."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{option}={name}: returned {type(model).__name__}, expected torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"{option}={name}: has no parameter to train")
    return model


def fit_dataset(dataset: Dataset, model_name: str) -> Dataset:
    """Return the data set in the image size that the model needs (LeNet: 28x28)."""
    fits = model_name != "lenet" or dataset.shape[1:] == LENET_SIZE
    return dataset if fits else resized(dataset, LENET_SIZE)


def _size_below(side: int, shape: Sequence[int], model_name: str) -> str:
    """Return height and width, as 8x8, if a network of torchvision gets images of a side below
    `side`, else ''. `shape`: (..., height, width).
    """
    is_other = model_name in NAMES or ":" in model_name
    return "" if is_other or min(shape[-2:]) >= side else "x".join(map(str, shape[-2:]))


def advice_on_size(model_name: str, shape: Sequence[int]) -> str:
    """Return advice for an error of a model on inputs of `shape` (..., height, width), or ''."""
    size = _size_below(IMAGENET_SIDE, shape, model_name)
    return size and (
        f". The network is designed for images of {IMAGENET_SIDE}x{IMAGENET_SIDE}, and those of "
        f"{size} may be too small: set a larger --image-size for image folders, "
        f"or choose another --model ({', '.join(NAMES)})"
    )


def notice_on_size(model_name: str, shape: Sequence[int]) -> str | None:
    """Return a notice if of inputs of `shape` (..., height, width) a network sees one pixel."""
    if not (size := _size_below(LEAST_SIDE, shape, model_name)):
        return None
    return (
        f"{model_name} is designed for images of {IMAGENET_SIDE}x{IMAGENET_SIDE} and halves them "
        f"five times: of {size} its last layers see a single pixel. For image folders "
        f"set a larger --image-size, or choose one of {', '.join(NAMES)}"
    )
