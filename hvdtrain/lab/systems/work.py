"""The work of every compared system: the same model, data, global batches and optimizer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hvdtrain.data import GlobalBatchSampler, Shares, load_dataset
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch
from hvdtrain.exchange.gpus import synchronize
from hvdtrain.models import build_model, fit_dataset
from hvdtrain.pulse import Pulse
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from hvdtrain.train.clock import PHASES, PhaseClock
from hvdtrain.train.optimizers import build_optimizer

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Layers whose result depends by design on how samples are distributed.
BY_SHARE = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class WorkSpec:
    """Model, data, batch size, steps and optimizer settings, as plain values."""

    model: str
    data: str
    data_dir: str
    global_batch_size: int
    steps: int
    dtype: str = "float32"
    seed: int = 0
    lr: float = 0.01
    momentum: float = 0.9


class GlobalBatch(NamedTuple):
    """The samples of one step over all workers."""

    indices: Indices
    epoch: int


class KeptClock(PhaseClock):
    """A phase clock that also sums the seconds that `take` has returned."""

    def __init__(self) -> None:
        super().__init__(Pulse())
        self._kept = [0.0] * len(PHASES)

    def take(self) -> list[float]:
        seconds = super().take()
        self._kept = [kept + more for kept, more in zip(self._kept, seconds, strict=True)]
        return seconds

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self.take()
        kept, self._kept = self._kept, [0.0] * len(PHASES)
        return dict(zip(PHASES, kept, strict=True))


class Work:
    """The copy of the work in one process; all copies are equal, as they share the seed."""

    def __init__(self, spec: WorkSpec) -> None:
        """Load the data and build the model. Raises UsageError if either is invalid."""
        self.spec = spec
        dtype = DTYPES[spec.dtype]
        data = load_dataset(spec.data, Path(spec.data_dir), spec.seed, dtype)
        self.dataset = fit_dataset(data, spec.model)
        torch.manual_seed(spec.seed)
        self.model = build_model(spec.model, self.dataset.shape, self.dataset.classes, dtype)
        settings = Settings(spec.model, spec.data, Path(spec.data_dir), spec.seed, dtype)
        self.task = Classification(settings, self.dataset, lambda: self.model)
        self.sampler = GlobalBatchSampler(
            len(self.dataset.train), spec.global_batch_size, spec.seed
        )
        self.clock = KeptClock()

    @property
    def bytes_of_gradients(self) -> int:
        """Size of all gradients, S in the formulas."""
        return sum(parameter.nbytes for parameter in trained(self.model))

    def batches(self) -> Iterator[GlobalBatch]:
        """Return the global batches of all steps; the last one of an epoch may be smaller."""
        endless = (
            GlobalBatch(indices, epoch)
            for epoch in itertools.count()
            for indices in self.sampler.global_batches(epoch * self.sampler.samples)
        )
        return itertools.islice(endless, self.spec.steps)

    def optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Return a new SGD optimizer over `parameters`."""
        return torch.optim.SGD(parameters, lr=self.spec.lr, momentum=self.spec.momentum)

    def tuned_optimizer(self) -> torch.optim.Optimizer:
        """Return a new SGD optimizer over the whole model, as `hvdtrain train` builds it."""
        return build_optimizer("sgd", self.model, self.spec.lr, self.spec.momentum, 0.0)

    def load(self, indices: Indices, epoch: int) -> Batch:
        """Load these samples, in the phase `data`."""
        self.clock.enter("data")
        batch: Batch = self.dataset.train.batch(indices, epoch)
        return batch

    def add_gradient(self, model: nn.Module, batch: Batch, divisor: float) -> None:
        """Add the gradient of (sum of these samples' losses) / `divisor` to each `.grad`."""
        (self.task.loss(model, batch).loss / divisor).backward()

    def add_gradient_of_share(self, batch: GlobalBatch, worker: int, workers: int) -> None:
        """Load one worker's share of a global batch and add its part of the gradient.

        The parts of all workers sum to the gradient of the mean loss over the global batch. An
        empty share adds nothing.
        """
        local_indices = Shares(workers).of(batch.indices, worker)
        loaded = self.load(local_indices, batch.epoch)
        self.clock.enter("compute")
        if len(local_indices):
            self.add_gradient(self.model, loaded, len(batch.indices))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer and end the step, once a device has computed it."""
        self.clock.enter("update")
        optimizer.step()
        synchronize(next(self.model.parameters()).device)
        self.clock.leave()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name, on the CPU."""
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flatten_gradients(model: nn.Module) -> torch.Tensor:
    """Return one tensor of zeros that holds all gradients: each `.grad` becomes a view of it."""
    parameters = trained(model)
    flat = torch.zeros_like(torch.cat([p.detach().reshape(-1) for p in parameters]))
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def flatten_parameters(model: nn.Module) -> torch.Tensor:
    """Return one tensor that holds all trained parameters: each becomes a view of it."""
    parameters = trained(model)
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    nn.utils.vector_to_parameters(flat, parameters)
    return flat
