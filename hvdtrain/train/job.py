"""A training job: what `hvdtrain.train.loop` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from hvdtrain.data import GlobalBatchSampler, SharesLike, VirtualShares
from hvdtrain.data.feeding import Feed
from hvdtrain.data.loader_order import DrawnBatchSampler
from hvdtrain.data.splits import Splits
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SUM, Exchange, Reduction
from hvdtrain.exchange.agreement import check_same_settings, run_on_all
from hvdtrain.exchange.buckets import Message, messages_of
from hvdtrain.tasks import Task
from hvdtrain.train.built import NONE_LEFT_OUT, FrozenWeights
from hvdtrain.train.progress import Patience
from hvdtrain.train.schedules import Schedule
from hvdtrain.train.update import Update
from hvdtrain.train.workers import RankWorker, VirtualWorkers, Workers


@dataclass(frozen=True)
class Intervals:
    """Intervals of recurring actions, in steps (`evaluation`: in epochs); 0 means never."""

    log: int
    evaluation: int
    evaluation_steps: int = 0
    checkpoint: int = 0
    memory: int = 0
    hash: int = 0

    @staticmethod
    def is_due(interval: int, step: int) -> bool:
        """Return whether an action of this interval follows the step."""
        return interval > 0 and step % interval == 0


class Stateful(Protocol):
    """An object with a state to save, such as a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Job:
    """A training job: model, data, update rule and length."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]  # one, unless a script's own loop has more
    update: Update
    task: Task
    data: Splits
    feed: Feed
    valid_shares: SharesLike
    schedule: Schedule | None  # None: the script sets learning rates itself
    total_steps: int
    device: torch.device
    intervals: Intervals
    valid_batch: int | None = None  # samples to evaluate at a time on a rank; None: as by default
    reduction: Reduction = SUM
    fingerprints: Sequence[Mapping[str, Any]] = ()  # of the data, on rank 0, checked on resume
    seed: int = 0  # of the virtual workers' random numbers
    further_state: Sequence[Stateful] = ()  # objects of a script, saved in each checkpoint
    built: Mapping[str, Any] = field(default_factory=dict)  # settings of optimizers and of these
    save_frozen: bool = True
    patience: Patience | None = None  # None: no early stopping
    gathers: bool = False  # the passes of a script gather features of all samples
    base: FrozenWeights = NONE_LEFT_OUT  # the frozen parameters that checkpoints leave out
    workers: Workers = None  # type: ignore[assignment]  # made by `distributed`

    def distributed(self, exchange: Exchange) -> Job:
        """Collective: return this job with optimizers whose gradients are reduced over ranks."""
        model, shares, batch = self.model, self.feed.shares, self.sampler.global_batch_size
        if isinstance(shares, VirtualShares):
            for optimizer in self.optimizers:
                exchange.broadcast_state(model, optimizer)
            workers: Workers = VirtualWorkers(
                model, self.optimizers, exchange, shares, self.seed, batch
            )
        else:
            distribute = partial(
                exchange.distribute,
                model=model,
                grad_accum_steps=self.feed.micro_batches,
                reduction=self.reduction,
            )
            for optimizer in self.optimizers:
                distribute(optimizer)
            samples = shares.sizes(batch)[exchange.rank]
            workers = RankWorker(model, self.optimizers, exchange, self.device, samples, distribute)
        # The model has rank 0's values now.
        base = NONE_LEFT_OUT if self.save_frozen else FrozenWeights.of(model)
        return replace(self, workers=workers, base=base)

    def reassign(self, counts: Sequence[int]) -> None:
        """Collective: distribute the virtual workers over ranks by `counts` from the next step on.
        Nothing that is computed depends on it.
        """
        assert isinstance(self.workers, VirtualWorkers)
        for shares in (self.feed.shares, self.valid_shares):  # may be the same
            assert isinstance(shares, VirtualShares)
            shares.assign(counts)
        self.workers.reassign()

    def indices_of(self, optimizer: torch.optim.Optimizer | None) -> tuple[int, ...]:
        """Return the index of an optimizer (None: all). Raises UsageError for a foreign one."""
        both = enumerate(self.optimizers)
        indices = tuple(n for n, opt in both if optimizer is None or opt is optimizer)
        if not indices:
            raise UsageError(
                "step.batches(optimizer): it is none of the optimizers that the loop was given. "
                "Leave it out to train all of them by the same passes"
            )
        return indices

    def messages(self, bucket_bytes: int) -> list[Message]:
        """Return the parameters whose gradients are reduced together, of all optimizers."""
        return [
            message
            for optimizer in self.optimizers
            for message in messages_of(self.model, optimizer, bucket_bytes)
        ]

    @property
    def lr(self) -> float:
        """Return the learning rate of the first group of parameters."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_lr(self, step: int) -> None:
        """Set the learning rates of a step (from 1), unless the script does."""
        if self.schedule is not None:
            for group in self.optimizers[0].param_groups:
                group["lr"] = self.schedule(step - 1) * group.get("lr_scale", 1.0)

    @property
    def sampler(self) -> GlobalBatchSampler:
        """The order of the samples."""
        return self.feed.sampler

    def begin_epoch(self, epoch: int, exchange: Exchange) -> None:
        """Collective: let a DataLoader's sampler, if any, draw the order of an epoch.

        Raises AgreedFailure unless all ranks have the same.
        """
        sampler = self.sampler
        if isinstance(sampler, DrawnBatchSampler):
            digest = run_on_all(exchange, "order", lambda: sampler.begin(epoch))
            order = {f"SHA-256 of the order of epoch {epoch}": digest}
            check_same_settings(exchange, "the DataLoader's sampler", order)

    def evaluated_model(self) -> AbstractContextManager[torch.nn.Module]:
        """Collective: return a context of the model to save (the average, if any), which has the
        statistics of all workers.
        """
        average = self.update.average
        return self.workers.statistics(average.module if average else self.model)
