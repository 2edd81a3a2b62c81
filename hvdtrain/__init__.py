"""Data-parallel training of PyTorch models on Horovod, with verified gradients.

For a script with its own training loop (see `hvdtrain.api`): `init`, `distribute`,
`clip_grad_norm_`, `GlobalBatchSampler`, `Shares` and `GradientAudit`. For `hvdtrain train --task`:
`Task`, `Settings`, `Sums`, `Splits`, `Split`, `TensorSplit`, `MapSplit`, `IterableSplit` and
`split_of`. For `hvdtrain train --data`: `Dataset` and `ImageFormat`. Batches by a number of tokens:
`TokenBatches`. To start workers from Python or a notebook: `launch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hvdtrain.dynamo import defer_dynamo

if TYPE_CHECKING:
    # It would write an import for each name.
    # isort: off
    from hvdtrain.api import (
        clip_grad_norm_ as clip_grad_norm_,
        distribute as distribute,
        init as init,
    )
    from hvdtrain.audit.script import GradientAudit as GradientAudit
    from hvdtrain.data import (
        Dataset as Dataset,
        GlobalBatchSampler as GlobalBatchSampler,
        ImageFormat as ImageFormat,
        IterableSplit as IterableSplit,
        MapSplit as MapSplit,
        Shares as Shares,
        Split as Split,
        Splits as Splits,
        TensorSplit as TensorSplit,
        TokenBatches as TokenBatches,
        split_of as split_of,
    )
    from hvdtrain.notebook import launch as launch
    from hvdtrain.run.own_loop import Loop as Loop
    from hvdtrain.tasks import Settings as Settings, Sums as Sums, Task as Task
    # isort: on

__version__ = "0.2.0"

defer_dynamo()

_PUBLIC = {
    "hvdtrain.api": ("clip_grad_norm_", "distribute", "init"),
    "hvdtrain.audit.script": ("GradientAudit",),
    "hvdtrain.data": (
        *("Dataset", "GlobalBatchSampler", "ImageFormat", "Shares", "TokenBatches"),
        *("IterableSplit", "MapSplit", "Split", "Splits", "TensorSplit", "split_of"),
    ),
    "hvdtrain.notebook": ("launch",),
    "hvdtrain.run.own_loop": ("Loop",),
    "hvdtrain.tasks": ("Settings", "Sums", "Task"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `hvdtrain --help` does not load torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names too that are not imported yet, for `help(hvdtrain)`."""
    return sorted({*globals(), *__all__})
