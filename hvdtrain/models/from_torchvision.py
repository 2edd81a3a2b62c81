"""torchvision's classification networks by name, with newly initialised parameters.

They are built for the classes, channels and image size of the data. `resnet18-small` is ResNet-18
for images of about 32x32: K. He et al., "Deep Residual Learning" (2015), with the first layer of
their networks for CIFAR-10 (section 4.2), as the usual stride and pooling would leave 1x1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.data.splits import Shape
from hvdtrain.errors import UsageError

COLOURS = 3  # input channels of torchvision's networks
MAXVIT_SIDE = 7 * 2**5  # five halvings, then windows of 7
# No auxiliary heads: with them the output is a tuple. The initialisation is set explicitly because
# torchvision warns about its default.
WITHOUT_AUXILIARY = {"aux_logits": False, "init_weights": True}


def names() -> list[str]:
    """Return the names of the networks that `build` supports."""
    models = _models()
    found: list[str] = models.list_models(module=models)
    return found


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """Return the network `name`, one of `names()`. Raises UsageError for unsuitable image sizes."""
    model: nn.Module = _models().get_model(
        name, weights=None, num_classes=classes, **_settings(name, shape)
    )
    if shape[0] != COLOURS:
        _replace_first_convolution(model, shape[0])
    return model


def resnet18_small(shape: Shape, classes: int) -> nn.Module:
    """Return ResNet-18 with a 3x3 convolution of stride 1 first, and no pooling after it."""
    model: nn.Module = _models().resnet18(weights=None, num_classes=classes)
    first = nn.Conv2d(shape[0], 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = first
    model.maxpool = nn.Identity()
    return model


def _models() -> ModuleType:
    module: ModuleType = import_torchvision().models
    return module


def _settings(name: str, shape: Shape) -> dict[str, Any]:
    """Return the constructor arguments of this network, besides the number of classes."""
    _, height, width = shape
    if name in ("googlenet", "inception_v3"):
        return dict(WITHOUT_AUXILIARY)
    if name.startswith("vit_"):
        patch = int(name.rpartition("_")[2])
        _demand_multiple(name, shape, patch)
        if height != width:
            raise UsageError(f"--model={name}: needs square images, the data has {height}x{width}")
        return {"image_size": height}
    if name == "maxvit_t":
        _demand_multiple(name, shape, MAXVIT_SIDE)
        return {"input_size": (height, width)}
    return {}


def _demand_multiple(name: str, shape: Shape, unit: int) -> None:
    _, height, width = shape
    if height % unit or width % unit:
        raise UsageError(
            f"--model={name}: needs images whose height and width are multiples of {unit}, "
            f"the data has {height}x{width}"
        )


def _replace_first_convolution(model: nn.Module, channels: int) -> None:
    """Give the first convolution this number of input channels, keeping its other properties.

    The initialisation is torch's default, as that of the network is not accessible.
    """
    name, old = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == COLOURS
    )
    new = nn.Conv2d(
        channels,
        old.out_channels,
        kernel_size=old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        dilation=old.dilation,  # type: ignore[arg-type]
        groups=old.groups,
        bias=old.bias is not None,
        padding_mode=old.padding_mode,
    )
    model.set_submodule(name, new)
