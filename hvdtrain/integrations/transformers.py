"""The callback for the Trainer of Hugging Face transformers.

from hvdtrain.integrations.transformers import AuditCallback
trainer = Trainer(..., callbacks=[AuditCallback(every=100)])
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, GradientState
from transformers import TrainerCallback

from hvdtrain.errors import UsageError
from hvdtrain.integrations.ddp import AuditOptions, check_size


class AuditCallback(AuditOptions, TrainerCallback):
    """Compare the gradients of DDP with the ring reference, and report progress to the launcher.

    The steps that are compared are those whose number is a multiple of `every`, counted as the
    Trainer's `global_step` is. Gradients are compared before they are unscaled or clipped.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Collective: begin. Raises UsageError if DDP is not what exchanges the gradients."""
        check_size(
            AcceleratorState().num_processes, ", on CPUs with TrainingArguments(use_cpu=True)"
        )
        kind = AcceleratorState().distributed_type
        if kind != DistributedType.NO and not kind.name.startswith("MULTI_"):
            raise UsageError(
                f"AuditCallback: gradients are exchanged by {kind.value}, whose ranks do not hold "
                "all of them: only DistributedDataParallel can be audited; leave the callback out"
            )
        exchanges = lambda: GradientState().sync_gradients  # noqa: E731
        self._watch.begin(others["model"], state.global_step, state.max_steps, exchanges)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._watch.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._watch.end_step(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._watch.evaluate()

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others.get("logs") or {}
        if state.is_world_process_zero and "loss" in logs:
            self._watch.show(loss=float(logs["loss"]), total_steps=state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Collective: end the audit, and print its summary on rank 0."""
        self._watch.end()
