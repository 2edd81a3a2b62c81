"""Training tasks: data, a network, and the loss of a batch.

A custom task is a class derived from `Task`, given as `--task package.module:Class`. It defines the
work of a single process on a single batch; all distribution over ranks (weights of uneven parts,
metrics, evaluation, checkpoints) is derived from its sums. Classification is the default task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from hvdtrain.data.splits import Splits
from hvdtrain.errors import TrainingError


@dataclass(frozen=True)
class Sums:
    """The results of one batch: sums, not means, so that parts of a batch add up to the whole.

    `loss`: the sum of the losses of all samples, a scalar tensor. `samples`: the number of samples
    in that sum (or of tokens, or a sum of weights, with `Task.counts_samples = False`). `metrics`:
    sums by name, such as the number of correct predictions; scalars are reported divided by
    `samples`, tables as sums. `outputs`: tensors by name, with a row for each sample of the batch,
    for metrics of the whole validation set that are no sums (see `Task.finalize`).
    """

    loss: torch.Tensor
    samples: float
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of_means(
        cls,
        loss: torch.Tensor,
        samples: float | torch.Tensor,
        metrics: Mapping[str, torch.Tensor] | None = None,
        outputs: Mapping[str, torch.Tensor] | None = None,
    ) -> Sums:
        """Return the sums of a batch whose loss and metrics are means over its samples."""
        count = float(samples)
        sums = {name: mean * count for name, mean in (metrics or {}).items()}
        return cls(loss * count, count, sums, outputs or {})


@runtime_checkable
class Metric(Protocol):
    """A metric that is an object, such as those of torchmetrics."""

    def reset(self) -> Any: ...

    def update(self, **outputs: torch.Tensor) -> Any: ...

    def compute(self) -> Any:
        """Return figures by name; of a single figure, its value."""


# Returns what `Metric.compute` does, given the outputs of all samples.
Finalize = Callable[[Mapping[str, torch.Tensor]], Any] | Metric


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
    `valid_metrics`: the same for `evaluate`, and of the figures that `finalize` returns; None: the
        names in `metrics`.
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

    def finalize(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Return figures of all validation samples that are no sums, such as AUC, F1 and mAP.

        `outputs`: those that `evaluate` returns in `Sums.outputs`, of all samples in the order of
        their numbers, on the CPU. Called on rank 0 alone. The names are those of `valid_metrics` of
        which `evaluate` returns no sums. Default: there are no such figures. In place of the method
        a task may have a metric object (`reset()`, `update(**outputs)`, `compute()`).
        """
        raise NotImplementedError(f"{type(self).__name__}.finalize is missing")

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


def finalizes(task: Task) -> bool:
    """Return whether a task computes figures of the outputs of all samples."""
    return getattr(task.finalize, "__func__", None) is not Task.finalize


def as_sums(result: Any, task: Task, training: bool) -> Sums:
    """Return the result of a task for a batch. Raises TrainingError unless it is a `Sums`."""
    if not isinstance(result, Sums):
        name = name_of(task, _method(task, training))
        raise TrainingError(f"{name} returned {type(result).__name__}, expected hvdtrain.Sums")
    return result


def check_sums(sums: Any, task: Task, samples: int, training: bool) -> Sums:
    """Return `sums`, the result of a task for a batch of `samples`.

    Raises TrainingError unless it matches what the task declares.
    """
    checked = as_sums(sums, task, training)
    if problems := "; ".join(_wrong_in(checked, task, samples, training)):
        raise TrainingError(f"{name_of(task, _method(task, training))}: {problems}")
    return checked


def name_of(task: Task, method: str) -> str:
    """Return how a message names a method of a task, or a function of a script."""
    return f"{type(task).__name__}.{method}" if task.computes_loss else method


def _method(task: Task, training: bool) -> str:
    if not training:
        return "evaluate"
    return "loss" if task.computes_loss else "step.backward"


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
    if not training and finalizes(task):
        expected &= {*sums.metrics, *task.tables}  # the others are figures of `finalize`
    if set(sums.metrics) != expected:
        yield f"metrics {sorted(sums.metrics)}, expected {sorted(expected)}"
    for metric, value in sums.metrics.items():
        shape = () if training else task.tables.get(metric, ())
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
            yield f"{metric} must be a tensor of shape {list(shape)}, not {_kind(value)}"
    if not training:
        yield from _wrong_outputs(sums.outputs, task, samples)


def _wrong_outputs(outputs: Any, task: Task, samples: int) -> Iterator[str]:
    if not isinstance(outputs, Mapping):
        yield f"outputs must be a dict of tensors by name, not a {type(outputs).__name__}"
        return
    if finalizes(task) and not outputs:
        yield "there are no outputs, which `finalize` needs: return Sums(..., outputs={name: ...})"
    if outputs and not finalizes(task):
        yield f"there are outputs {sorted(outputs)}, and no `finalize` that takes them"
    for name, value in outputs.items():
        is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not is_dense or value.shape[:1] != (samples,):
            yield (
                f"the output {name} must be a dense tensor of {samples} rows, one for each sample "
                f"of the batch, not {_kind(value)}"
            )


def _kind(value: Any) -> str:
    return str([*value.shape]) if torch.is_tensor(value) else f"a {type(value).__name__}"
