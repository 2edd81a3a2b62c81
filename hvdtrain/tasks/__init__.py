"""Training tasks: data, a network, and the loss of a batch.

A custom task is a class derived from `Task`, given as `--task package.module:Class`. It defines the
work of a single process on a single batch; all distribution over ranks (weights of uneven parts,
metrics, evaluation, checkpoints) is derived from its sums. Classification is the default task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.splits import Splits
from hvdtrain.errors import TrainingError


@dataclass(frozen=True)
class Sums:
    """The results of one batch: sums, not means, so that parts of a batch add up to the whole.

    `loss`: the sum of the losses of all samples, a scalar tensor. `samples`: the number of samples
    in that sum (or of tokens, or a sum of weights, with `Task.counts_samples = False`). `metrics`:
    sums by name, such as the number of correct predictions; scalars are reported divided by
    `samples`, tables as sums.
    """

    loss: torch.Tensor
    samples: float
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_means(
        cls,
        loss: torch.Tensor,
        samples: float | torch.Tensor,
        metrics: Mapping[str, torch.Tensor] | None = None,
    ) -> Sums:
        """Return the sums of a batch whose loss and metrics are means over its samples."""
        count = float(samples)
        return cls(loss * count, count, {n: mean * count for n, mean in (metrics or {}).items()})


@dataclass(frozen=True)
class Settings:
    """The options of a training run that a task may use: the values of the flags of these names."""

    model: str
    data: str
    data_dir: Path
    seed: int
    dtype: torch.dtype  # of parameters and data


class Task:
    """Base class of tasks. Derived classes define `build_data`, `build_model` and `loss`.

    Each process creates one instance, as `Class(settings)`. Class attributes:

    `metrics`: the names of the scalar sums that `loss` returns in `Sums.metrics`.
    `valid_metrics`: the same for `evaluate`; None: the names in `metrics`.
    `tables`: further sums that `evaluate` returns in `Sums.metrics`, as {name: shape}. A sparse
        tensor (`torch.sparse_coo_tensor`) is summed and stored by its entries, whatever its shape.
    `best`: the validation metric, or "loss", by which the best checkpoint is chosen: the one with
        the lowest value or, with `best_is_highest`, the highest.
    `counts_samples`: whether `Sums.samples` is the number of samples in the batch. Set it to False
        if it counts something else that varies between batches, such as tokens.
    `computes_loss`: whether there is a `loss`; not where a script computes it in its own loop.
    """

    metrics: tuple[str, ...] = ()
    valid_metrics: tuple[str, ...] | None = None
    tables: Mapping[str, tuple[int, ...]] = {}
    best = "loss"
    best_is_highest = False
    counts_samples = True
    computes_loss = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def build_data(self) -> Splits:
        """Return the samples to train on and to validate with, independent of rank and size."""
        raise NotImplementedError(f"{type(self).__name__}.build_data is missing")

    def build_model(self) -> torch.nn.Module:
        """Return the network, with parameters drawn from torch's global generator."""
        raise NotImplementedError(f"{type(self).__name__}.build_model is missing")

    def loss(self, model: torch.nn.Module, batch: Any) -> Sums:
        """Return the sums of a training batch on the model's device, with a differentiable loss."""
        raise NotImplementedError(f"{type(self).__name__}.loss is missing")

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Sums:
        """Return the sums of a validation batch, called without gradients. Default: `loss`."""
        return self.loss(model, batch)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """Return an optimizer of `model`, with its groups of parameters and their learning rates.

        None, the default: that of `--opt`. The flags of the optimizer do not apply otherwise.
        """
        return None

    def build_schedule(self, total_steps: int) -> Callable[[int], float] | None:
        """Return the factor of all learning rates as a pure function of steps 0 .. total_steps - 1.

        None, the default: that of `--sched`.
        """
        return None

    def takeaway(self) -> dict[str, Any]:
        """Return plain values to store in checkpoints, for later use of the weights."""
        return {}


def valid_metrics_of(task: Task) -> tuple[str, ...]:
    """Return the names of the scalar metrics of `task.evaluate`."""
    return task.metrics if task.valid_metrics is None else task.valid_metrics


def as_sums(result: Any, task: Task, training: bool) -> Sums:
    """Return the result of a task for a batch. Raises TrainingError unless it is a `Sums`."""
    if not isinstance(result, Sums):
        raise TrainingError(
            f"{_name_of(task, training)} returned {type(result).__name__}, expected hvdtrain.Sums"
        )
    return result


def check_sums(sums: Any, task: Task, samples: int, training: bool) -> Sums:
    """Return `sums`, the result of a task for a batch of `samples`.

    Raises TrainingError unless it matches what the task declares.
    """
    checked = as_sums(sums, task, training)
    if problems := "; ".join(_wrong_in(checked, task, samples, training)):
        raise TrainingError(f"{_name_of(task, training)}: {problems}")
    return checked


def _name_of(task: Task, training: bool) -> str:
    if task.computes_loss:
        return f"{type(task).__name__}.{'loss' if training else 'evaluate'}"
    return "step.backward" if training else "evaluate"


def _wrong_in(sums: Sums, task: Task, samples: int, training: bool) -> Iterator[str]:
    if not isinstance(sums.loss, torch.Tensor) or sums.loss.dim() != 0:
        yield f"the loss must be a scalar, the sum over samples, and is {_kind(sums.loss)}"
    elif training and not sums.loss.requires_grad:
        yield "the loss does not depend on any parameter that is trained"
    if task.counts_samples and sums.samples != samples:
        yield (
            f"a batch of {samples} samples was counted as {sums.samples:g}. Is the batch dimension "
            "another one? To count tokens, set counts_samples = False"
        )
    expected = set(task.metrics if training else (*valid_metrics_of(task), *task.tables))
    if set(sums.metrics) != expected:
        yield f"metrics {sorted(sums.metrics)}, expected {sorted(expected)}"
    for metric, value in sums.metrics.items():
        shape = () if training else task.tables.get(metric, ())
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
            yield f"{metric} must be a tensor of shape {list(shape)}, not {_kind(value)}"


def _kind(value: Any) -> str:
    return str([*value.shape]) if torch.is_tensor(value) else f"a {type(value).__name__}"
