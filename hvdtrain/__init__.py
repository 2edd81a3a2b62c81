"""hvdtrain: data-parallel training of PyTorch models on Horovod, with gradients that are proven."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.api import clip_grad_norm_ as clip_grad_norm_
    from hvdtrain.api import distribute as distribute
    from hvdtrain.api import init as init
    from hvdtrain.audit.script import GradientAudit as GradientAudit
    from hvdtrain.data import Dataset as Dataset
    from hvdtrain.data import GlobalBatchSampler as GlobalBatchSampler
    from hvdtrain.data import ImageFormat as ImageFormat
    from hvdtrain.data import Shares as Shares
    from hvdtrain.data import Split as Split
    from hvdtrain.data import Splits as Splits
    from hvdtrain.data import TensorSplit as TensorSplit
    from hvdtrain.tasks import Settings as Settings
    from hvdtrain.tasks import Sums as Sums
    from hvdtrain.tasks import Task as Task

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("clip_grad_norm_", "distribute", "init"), "hvdtrain.api"),
    "GradientAudit": "hvdtrain.audit.script",
    **dict.fromkeys(
        (
            *("Dataset", "GlobalBatchSampler", "ImageFormat", "Shares", "Split", "Splits"),
            "TensorSplit",
        ),
        "hvdtrain.data",
    ),
    **dict.fromkeys(("Settings", "Sums", "Task"), "hvdtrain.tasks"),
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Public names come in when they are asked for, so that `hvdtrain --help` needs no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
