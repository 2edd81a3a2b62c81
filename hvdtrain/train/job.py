"""A training job: what `hvdtrain.train.loop` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdtrain.data import GlobalBatchSampler, SharesLike, VirtualShares
from hvdtrain.data.feeding import Feed
from hvdtrain.data.splits import Splits
from hvdtrain.exchange import SUM, Exchange, Reduction, make_gradients_dense
from hvdtrain.tasks import Task
from hvdtrain.train.schedules import Schedule
from hvdtrain.train.update import Update
from hvdtrain.train.workers import RankWorker, VirtualWorkers, Workers


@dataclass(frozen=True)
class Intervals:
    """Intervals of recurring actions, in steps (`evaluation`: in epochs); 0 means never."""

    log: int
    evaluation: int
    checkpoint: int
    hash: int


@dataclass(frozen=True)
class Job:
    """A training job: model, data, update rule and length."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    update: Update
    task: Task
    data: Splits
    feed: Feed
    valid_shares: SharesLike
    schedule: Schedule
    total_steps: int
    device: torch.device
    intervals: Intervals
    reduction: Reduction = SUM
    fingerprints: Sequence[Mapping[str, Any]] = ()  # of the data, on rank 0, checked on resume
    seed: int = 0  # of the virtual workers' random numbers
    workers: Workers = None  # type: ignore[assignment]  # made by `distributed`

    def distributed(self, exchange: Exchange) -> Job:
        """Collective: return this job with an optimizer that reduces gradients over ranks."""
        model, shares, batch = self.model, self.feed.shares, self.sampler.global_batch_size
        if isinstance(shares, VirtualShares):
            make_gradients_dense(model, self.optimizer)
            exchange.broadcast_state(model, self.optimizer)
            virtual = VirtualWorkers(model, self.optimizer, exchange, shares, self.seed, batch)
            return replace(self, workers=virtual)
        optimizer = exchange.distribute(
            self.optimizer, model, self.feed.micro_batches, self.reduction
        )
        samples = shares.sizes(batch)[exchange.rank]
        worker = RankWorker(model, optimizer, exchange, self.device, samples)
        return replace(self, optimizer=optimizer, workers=worker)

    @property
    def sampler(self) -> GlobalBatchSampler:
        """The order of the samples."""
        return self.feed.sampler

    def evaluated_model(self) -> AbstractContextManager[torch.nn.Module]:
        """Collective: return a context of the model to save (the average, if any), which has the
        statistics of all workers.
        """
        average = self.update.average
        return self.workers.statistics(average.module if average else self.model)
