"""Data-parallel training of PyTorch models on Horovod, with verified gradients.

For a script with its own training loop (see `hvdtrain.api`): `init`, `distribute`,
`clip_grad_norm_`, `GlobalBatchSampler`, `Shares` and `GradientAudit`. For `hvdtrain train --task`:
`Task`, `Settings`, `Sums`, `Splits`, `Split` and `TensorSplit`. For `hvdtrain train --data`:
`Dataset` and `ImageFormat`.
"""

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

_MODULES = {
    "clip_grad_norm_": "hvdtrain.api",
    "distribute": "hvdtrain.api",
    "init": "hvdtrain.api",
    "GradientAudit": "hvdtrain.audit.script",
    "Dataset": "hvdtrain.data",
    "GlobalBatchSampler": "hvdtrain.data",
    "ImageFormat": "hvdtrain.data",
    "Shares": "hvdtrain.data",
    "Split": "hvdtrain.data",
    "Splits": "hvdtrain.data",
    "TensorSplit": "hvdtrain.data",
    "Settings": "hvdtrain.tasks",
    "Sums": "hvdtrain.tasks",
    "Task": "hvdtrain.tasks",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `hvdtrain --help` does not load torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
