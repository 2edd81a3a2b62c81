"""The training loop. It knows tensors and steps; how ranks exchange is handed in.

A step's update uses the gradient of the mean loss over the *global* batch. Rank r computes the sum
of its own samples' losses and weights it by N / B (N ranks, B samples in this global batch), so
that the average over ranks is (1/N) sum_r (N/B) sum_i loss_i = (1/B) sum_i loss_i, also where
ranks hold different numbers of samples, or none. With accumulation the global batch is cut into
micro-batches first, and each of them is shared out: they too are the same for every N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch.nn import functional

from hvdtrain.batchnorm import averaged_statistics
from hvdtrain.data import Dataset, GlobalBatchSampler, Shares
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import TrainingError
from hvdtrain.evaluate import Evaluation, evaluate
from hvdtrain.exchange import Exchange
from hvdtrain.metering import Meter, StepSums, Totals
from hvdtrain.parameters import check_equal_on_all_ranks
from hvdtrain.ring import split_evenly
from hvdtrain.schedule import Schedule
from hvdtrain.update import Update


class Audit(Protocol):
    """Checks the reduced gradients of chosen steps; does nothing at the others."""

    def begin(self, step: int) -> None:
        """Before the backward pass of a step (counted from 1)."""

    def end(self, step: int) -> None:
        """Collective: after the gradients are reduced, before they are used."""


class Observer(Protocol):
    """Is told what happens; writes and prints it."""

    def interval_end(self, totals: Totals, lr: float) -> None: ...

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None: ...


class Keeper(Protocol):
    """Keeps the state of a run, and knows when it was asked to stop."""

    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""

    def save(self, job: Job, meter: Meter, evaluation: Evaluation | None) -> None:
        """Collective: keep the state as it stands between two steps."""

    def stop(self) -> NoReturn:
        """Collective: all ranks have agreed to stop, and the state is kept: raises Stopped."""


@dataclass(frozen=True)
class Job:
    """What to train, and for how long."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    update: Update
    dataset: Dataset
    sampler: GlobalBatchSampler
    shares: Shares
    grad_accum_steps: int
    sync_bn: bool
    schedule: Schedule
    total_steps: int
    device: torch.device
    log_interval: int
    eval_interval: int
    checkpoint_interval: int
    hash_every: int

    def evaluated_model(self, exchange: Exchange) -> AbstractContextManager[torch.nn.Module]:
        """Collective: the model to evaluate and to save, within the context.

        It holds the moving average of the weights where there is one, and the running statistics
        of all ranks.
        """
        average = self.update.average
        return self.with_all_statistics(average.module if average else self.model, exchange)

    def with_all_statistics(
        self, model: torch.nn.Module, exchange: Exchange
    ) -> AbstractContextManager[torch.nn.Module]:
        """Collective: `model` with the running statistics of all ranks, within the context."""
        own_samples = self.shares.sizes(self.sampler.global_batch_size)[exchange.rank]
        return averaged_statistics(model, exchange, own_weight=float(own_samples))


@dataclass
class Position:
    """How far a run has come; with these two numbers the data goes on where it was."""

    step: int = 0
    samples_seen: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a finished run ended."""

    totals: Totals
    evaluation: Evaluation
    steady_samples_per_s: float


def train(
    job: Job,
    position: Position,
    meter: Meter,
    exchange: Exchange,
    audit: Audit,
    observer: Observer,
    keeper: Keeper,
) -> Outcome:
    """Collective: run the job from `position`, which moves along, to its end.

    Raises TrainingError on all ranks when a loss is not finite or ranks have drifted apart, what
    `audit.end` raises, and Stopped, once all ranks have agreed on it and the state is kept.
    """
    job.model.train()
    evaluation = None
    if _epoch_ends(job, position) and meter.has_open_epoch:  # a stop has cut its evaluation short
        evaluation = _end_epoch(job, exchange, meter, observer, keeper)
        keeper.save(job, meter, evaluation)
        if meter.stop_agreed:
            keeper.stop()
    for indices in _batches(job, position):
        step = position.step + 1
        meter.begin_step()
        sums = train_step(job, exchange, audit, step, indices, keeper.stop_requested())
        meter.end_step(sums, step)
        position.step, position.samples_seen = step, position.samples_seen + len(indices)
        if step % job.log_interval == 0:
            observer.interval_end(meter.read_interval(), _lr_in_use(job))
        if job.hash_every and step % job.hash_every == 0:
            check_equal_on_all_ranks(job.model, exchange, f"after step {step}")
        evaluation = None
        if _epoch_ends(job, position):
            evaluation = _end_epoch(job, exchange, meter, observer, keeper)
        due = job.checkpoint_interval and step % job.checkpoint_interval == 0
        if due or evaluation or meter.stop_agreed:
            keeper.save(job, meter, evaluation)
        if meter.stop_agreed and not (evaluation and step == job.total_steps):
            keeper.stop()
    if evaluation is None:  # resumed from the checkpoint of the last step
        evaluation = _evaluate(job, exchange, meter, keeper)
        keeper.save(job, meter, evaluation)
    if evaluation is None:
        keeper.stop()
    return Outcome(meter.last_epoch or meter.totals(), evaluation, meter.steady_samples_per_s)


def _epoch_ends(job: Job, position: Position) -> bool:
    return position.samples_seen % job.sampler.samples == 0 or position.step == job.total_steps


def _end_epoch(
    job: Job, exchange: Exchange, meter: Meter, observer: Observer, keeper: Keeper
) -> Evaluation | None:
    """Collective: evaluate if it is time, and report. A stop meanwhile leaves the epoch open."""
    meter.collect()
    epoch, at_end = meter.totals().epoch, meter.totals().step == job.total_steps
    evaluation = None
    if epoch % job.eval_interval == 0 or at_end:
        evaluation = _evaluate(job, exchange, meter, keeper)
        if evaluation is None:
            return None
    observer.epoch_end(meter.close_epoch(), evaluation, _lr_in_use(job))
    return evaluation


def _evaluate(job: Job, exchange: Exchange, meter: Meter, keeper: Keeper) -> Evaluation | None:
    """Collective: evaluate what would be saved; None when a rank was asked to stop meanwhile."""
    with job.evaluated_model(exchange) as model:
        evaluation = evaluate(model, job.dataset, exchange, job.device, keeper.stop_requested)
    meter.stop_agreed = meter.stop_agreed or evaluation is None
    if evaluation and not math.isfinite(evaluation.loss):
        raise TrainingError(
            f"the validation loss is {evaluation.loss} after step {meter.totals().step}: "
            "the parameters are of no use, and are not saved. Lower --lr, or add --warmup-epochs"
        )
    return evaluation


def _lr_in_use(job: Job) -> float:
    return float(job.optimizer.param_groups[0]["lr"])


def _batches(job: Job, position: Position) -> Iterator[Indices]:
    """Every global batch from `position`, which the caller moves on, to the end of the run."""
    while position.step < job.total_steps:
        for indices in job.sampler.global_batches(position.samples_seen):
            yield indices
            if position.step >= job.total_steps:
                return


def train_step(
    job: Job,
    exchange: Exchange,
    audit: Audit,
    step: int,
    indices: Indices,
    stop_requested: bool = False,
) -> StepSums:
    """Collective: one optimizer update from one global batch (the samples' numbers, all ranks').

    Returns the sums of this step over all ranks, still on their way.
    """
    for group in job.optimizer.param_groups:
        group["lr"] = job.schedule(step - 1)
    job.optimizer.zero_grad()
    audit.begin(step)
    sums = StepSums(job.device)
    epoch = (step - 1) // job.sampler.steps_per_epoch
    for micro_batch in split_evenly(len(indices), job.grad_accum_steps):
        own = job.shares.of(indices[micro_batch], exchange.rank)
        everyone = job.sync_bn and micro_batch.stop > micro_batch.start
        if len(own) or everyone:  # synchronised layers need every rank
            _backward(job, own, epoch, exchange.size / len(indices), sums)
    sums.start(exchange, step, stop_requested)
    exchange.reduce_gradients(job.optimizer)
    audit.end(step)
    job.update.apply(exchange, job.optimizer)
    return sums


def _backward(job: Job, own: Indices, epoch: int, weight: float, sums: StepSums) -> None:
    """Add the weighted gradient of this rank's part of a micro-batch, and its sums."""
    inputs, labels = job.dataset.train.batch(own, epoch)
    labels = labels.to(job.device)
    with job.update.autocast():
        scores = job.model(inputs.to(job.device))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    loss_sum = functional.cross_entropy(scores, labels, reduction="sum")
    job.update.scale(loss_sum * weight).backward()
    sums.add(loss_sum.detach(), scores.detach(), labels)
