"""torchvision, also where its compiled operators cannot load.

Some package indexes offer torchvision for CUDA only. Beside a CPU build of torch its library of
compiled operators is then left out, and `import torchvision` fails where it registers variants of
`nms`. None of what hvdtrain uses (models, transforms, data sets) calls those operators.
"""

from __future__ import annotations

import importlib
import types

import torch

_SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_library: torch.library.Library | None = None  # definitions live as long as this object


def import_torchvision() -> types.ModuleType:
    """Import torchvision, first declaring the operators that it asks for if they are absent."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        _library.define(schema)
    return importlib.import_module("torchvision")


def import_transforms() -> types.ModuleType:
    """torchvision.transforms.v2."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")
