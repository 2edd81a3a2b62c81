"""The callback for the Trainer of Lightning, of the package `lightning` or `pytorch_lightning`.

from hvdtrain.integrations.lightning import AuditCallback
trainer = Trainer(..., callbacks=[AuditCallback(every=100)])
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvdtrain.errors import every_problem, refuse
from hvdtrain.integrations.ddp import AuditOptions, check_size

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class AuditCallback(AuditOptions, Callback):
    """Compare the gradients of DDP with the ring reference, and report progress to the launcher.

    The steps that are compared are those whose number is a multiple of `every`, counted as the
    Trainer's `global_step` is. Gradients are compared before they are unscaled or clipped.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Collective: begin. Raises UsageError for manual optimization, or if DDP is not what
        exchanges the gradients.
        """
        check_size(trainer.world_size, ", with Trainer(devices=...) of this host")
        model, is_ddp = trainer.model, isinstance(trainer.model, DistributedDataParallel)
        refuse(
            every_problem(
                (
                    trainer.world_size > 1 and not is_ddp,
                    f"AuditCallback: strategy {type(trainer.strategy).__name__}: only "
                    'DistributedDataParallel can be audited: Trainer(strategy="ddp")',
                ),
                (
                    not pl_module.automatic_optimization,
                    "AuditCallback: automatic_optimization=False: which exchange belongs to "
                    "which optimizer is unknown: call check() of hvdtrain.GradientAudit after each",
                ),
            )
        )
        exchanges = lambda: is_ddp and model.require_backward_grad_sync  # noqa: E731
        steps = trainer.estimated_stepping_batches
        self._watch.begin(pl_module, trainer.global_step, steps, exchanges)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self._watch.begin_step()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._watch.end_step(trainer.global_step)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._watch.evaluate()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Collective: end the audit, and print its summary on rank 0."""
        self._watch.end()
