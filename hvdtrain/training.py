"""The training loop. It knows tensors and steps; how ranks exchange is handed in.

A step's update uses the gradient of the mean loss over the *global* batch. Rank r computes the sum
of its own samples' losses and weights it by N / B (N ranks, B samples in this global batch), so
that the average over ranks is (1/N) sum_r (N/B) sum_i loss_i = (1/B) sum_i loss_i, also where
ranks hold different numbers of samples, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from hvdtrain.data import Dataset, GlobalBatchSampler, share
from hvdtrain.data.sampler import Indices
from hvdtrain.evaluate import Evaluation, evaluate
from hvdtrain.exchange import Exchange
from hvdtrain.metering import Meter, StepSums, Totals
from hvdtrain.schedule import Schedule


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


@dataclass(frozen=True)
class Job:
    """What to train, and for how long."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Dataset
    sampler: GlobalBatchSampler
    schedule: Schedule
    total_steps: int
    device: torch.device
    log_interval: int
    eval_interval: int


@dataclass(frozen=True)
class Outcome:
    """How a finished run ended."""

    totals: Totals
    evaluation: Evaluation
    steady_samples_per_s: float


def train(job: Job, exchange: Exchange, audit: Audit, observer: Observer) -> Outcome:
    """Collective: run the job to its end.

    Raises TrainingError on all ranks when a loss is not finite, and what `audit.end` raises.
    """
    meter = Meter(exchange)
    job.model.train()
    for step, indices, epoch_ends in _steps(job):
        meter.begin_step()
        sums = train_step(job, exchange, audit, step, indices)
        meter.end_step(sums, step)
        if step % job.log_interval == 0:
            observer.interval_end(meter.read_interval(), job.schedule(step - 1))
        if not epoch_ends:
            continue
        totals = meter.read_epoch()
        evaluation = None
        if totals.epoch % job.eval_interval == 0 or step == job.total_steps:
            evaluation = evaluate(job.model, job.dataset.valid, exchange, job.device)
        observer.epoch_end(totals, evaluation, job.schedule(step - 1))
    assert evaluation is not None  # the last step ends the last epoch, and is evaluated
    return Outcome(totals, evaluation, meter.steady_samples_per_s)


def _steps(job: Job) -> Iterator[tuple[int, Indices, bool]]:
    """Every step of the run: its number from 1, its global batch, and whether an epoch ends."""
    step = 0
    epoch = 0
    while step < job.total_steps:
        for indices in job.sampler.global_batches(epoch):
            step += 1
            last_of_epoch = step == (epoch + 1) * job.sampler.steps_per_epoch
            yield step, indices, last_of_epoch or step == job.total_steps
            if step == job.total_steps:
                return
        epoch += 1


def train_step(job: Job, exchange: Exchange, audit: Audit, step: int, indices: Indices) -> StepSums:
    """Collective: one optimizer update from one global batch (the samples' numbers, all ranks').

    Returns the sums of this step over all ranks, still on their way.
    """
    inputs, labels = job.dataset.train.batch(share(indices, exchange.rank, exchange.size))
    for group in job.optimizer.param_groups:
        group["lr"] = job.schedule(step - 1)
    job.optimizer.zero_grad()
    audit.begin(step)
    own = StepSums.nothing(job.device)
    if len(labels):
        labels = labels.to(job.device)
        scores = job.model(inputs.to(job.device))
        loss_sum = functional.cross_entropy(scores, labels, reduction="sum")
        (loss_sum * (exchange.size / len(indices))).backward()
        own = StepSums.of(loss_sum.detach(), scores.detach(), labels)
    sums = own.start(exchange, step)
    exchange.reduce_gradients(job.optimizer)
    audit.end(step)
    exchange.apply(job.optimizer)
    return sums
