"""What a script with its own training loop hands over: models, optimizers, data, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.splits import Splits
from hvdtrain.tasks import Settings, Sums, Task
from hvdtrain.train.job import Stateful

Evaluate = Callable[[torch.nn.Module, Any], Sums]

# The options of `hvdtrain train` that do not concern what the script itself decides.
OPTIONS = (
    *("device", "workers", "global_batch_size", "batch_size", "grad_accum_steps"),
    *("virtual_workers", "rank_weights", "clip_grad", "model_ema", "model_ema_decay"),
    *("epochs", "max_steps", "amp", "compression", "sync_bn", "deterministic"),
    *("audit_every", "audit", "audit_parts", "trace_every", "hash_every"),
    *("output", "experiment", "seed", "log_interval", "eval_interval", "checkpoint_interval"),
    *("keep_checkpoints", "profile", "resume"),
)


class ScriptTask(Task):
    """The task of a script: it computes losses itself, and may give a function to evaluate."""

    counts_samples = False
    computes_loss = False

    def __init__(
        self,
        evaluate: Evaluate | None,
        metrics: Sequence[str],
        valid_metrics: Sequence[str] | None,
        best: str,
        best_is_highest: bool,
    ) -> None:
        super().__init__(Settings("", "", Path(), 0, torch.float32))
        self.metrics = tuple(metrics)
        self.valid_metrics = None if valid_metrics is None else tuple(valid_metrics)
        self.best, self.best_is_highest = best, best_is_highest
        self._evaluate = evaluate

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
        assert self._evaluate is not None  # only called with samples to validate with
        return self._evaluate(model, batch)


@dataclass(frozen=True)
class Script:
    """A script with its own training loop."""

    path: Path
    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    further_state: Sequence[Stateful]
    task: ScriptTask
    data: Splits
