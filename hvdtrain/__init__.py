"""hvdtrain: data-parallel training of PyTorch models on Horovod, with gradients that are proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.audit.script import GradientAudit as GradientAudit

__version__ = "0.1.0"
__all__ = ["GradientAudit", "__version__"]


def __getattr__(name: str) -> object:
    """Public names come in when they are asked for, so that `hvdtrain --help` needs no torch."""
    if name == "GradientAudit":
        from hvdtrain.audit.script import GradientAudit

        return GradientAudit
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
