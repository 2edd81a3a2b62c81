"""What is learned: data, a network, and the loss of a batch. Classification is one task of many.

A task of your own is a class derived from `Task`, named by `--task package.module:Class`. It says
what one process would do with one batch; everything over ranks (weights of uneven parts, metrics,
evaluation, checkpoints) follows from its sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.splits import Splits
from hvdtrain.errors import TrainingError


@dataclass(frozen=True)
class Sums:
    """Of one batch: sums, never means, so that parts of a batch add up to the whole."""

    loss: torch.Tensor  # a scalar, the sum of all samples' losses
    samples: int  # how many samples (or tokens, with `counts_samples = False`) that sum is over
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # such as right answers


@dataclass(frozen=True)
class Settings:
    """What `train` was told that a task may want to know."""

    model: str
    data: str
    data_dir: Path
    seed: int
    dtype: torch.dtype


class Task:
    """Derive from it, and define the three methods. One is made a process, as `Class(settings)`."""

    metrics: tuple[str, ...] = ()  # what `loss` gives in Sums.metrics, in training
    valid_metrics: tuple[str, ...] | None = None  # the same of `evaluate`, if they are others
    tables: Mapping[str, tuple[int, ...]] = {}  # further sums of `evaluate`, by their shapes
    best = "loss"  # the validation figure by which the best checkpoint is chosen
    best_is_highest = False
    counts_samples = True  # False: Sums.samples counts something else, which may vary

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def build_data(self) -> Splits:
        """Samples to train on and to validate with. Rank and world size must make no difference."""
        raise NotImplementedError(f"{type(self).__name__}.build_data is missing")

    def build_model(self) -> torch.nn.Module:
        """The network, its parameters drawn from torch's global generator."""
        raise NotImplementedError(f"{type(self).__name__}.build_model is missing")

    def loss(self, model: torch.nn.Module, batch: Any) -> Sums:
        """Of a training batch, on the model's device; `backward` goes from `Sums.loss`."""
        raise NotImplementedError(f"{type(self).__name__}.loss is missing")

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
        """Of a validation batch; without gradients."""
        return self.loss(model, batch)

    def takeaway(self) -> dict[str, Any]:
        """What a checkpoint tells those who use its weights later; plain values."""
        return {}


def undefined_methods(task: Task) -> list[str]:
    """Those of the three methods that its class has left out."""
    needed = ("build_data", "build_model", "loss")
    return [name for name in needed if getattr(type(task), name) is getattr(Task, name)]


def valid_metrics_of(task: Task) -> tuple[str, ...]:
    """The names of scalars that `task.evaluate` gives."""
    return task.metrics if task.valid_metrics is None else task.valid_metrics


def check_sums(sums: Any, task: Task, samples: int, training: bool) -> Sums:
    """What a task has returned for a batch of `samples`. Raises TrainingError, saying what of it
    is not as promised.
    """
    name = f"{type(task).__name__}.{'loss' if training else 'evaluate'}"
    if not isinstance(sums, Sums):
        raise TrainingError(f"{name} gave a {type(sums).__name__}, not hvdtrain.Sums")
    problems = []
    if not isinstance(sums.loss, torch.Tensor) or sums.loss.dim() != 0:
        problems.append(
            f"the loss must be a scalar, the sum over samples, and is {_kind(sums.loss)}"
        )
    elif training and not sums.loss.requires_grad:
        problems.append("the loss does not depend on any parameter that is trained")
    if task.counts_samples and sums.samples != samples:
        problems.append(
            f"a batch of {samples} samples was counted as {sums.samples}. Is the batch another "
            "dimension than was thought? If tokens are counted: set counts_samples = False"
        )
    expected = set(task.metrics if training else (*valid_metrics_of(task), *task.tables))
    if set(sums.metrics) != expected:
        problems.append(f"metrics {sorted(sums.metrics)}, where {sorted(expected)} were promised")
    for metric, value in sums.metrics.items():
        shape = () if training else task.tables.get(metric, ())
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
            problems.append(f"{metric} must be a tensor of shape {list(shape)}, not {_kind(value)}")
    if problems:
        raise TrainingError(f"{name}: {'; '.join(problems)}")
    return sums


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return f"a {type(value).__name__}"
