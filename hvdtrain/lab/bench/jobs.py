"""Jobs to measure: made-up data of a built-in model's size, one batch after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional

from hvdtrain.audit import NoAudit
from hvdtrain.data import GlobalBatchSampler, Shares, load_dataset
from hvdtrain.data.feeding import Feed, StepData
from hvdtrain.data.sampler import Indices
from hvdtrain.exchange import Exchange
from hvdtrain.lab.bench.rounds import Options
from hvdtrain.models import build_model
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from hvdtrain.train.loop import Audit, Intervals, Job, train_step
from hvdtrain.train.metering import Meter
from hvdtrain.train.optimizers import build_optimizer
from hvdtrain.train.update import Update

DATA = "synthetic:1x28x28"
LR, MOMENTUM = 0.01, 0.9
NO_AUDIT = NoAudit()


def describe(options: Options) -> str:
    """One step of such a job, in words."""
    return f"{options.model}, {options.batch_size} samples a worker"


def make_job(model_name: str, batch_size: int, exchange: Exchange) -> Job:
    """A job of `batch_size` samples a worker and step, its optimizer not distributed yet."""
    dataset = load_dataset(DATA, Path(), 0, torch.float32)
    torch.manual_seed(0)
    model = build_model(model_name, dataset.shape, dataset.classes, torch.float32)
    device = torch.device("cpu")
    settings = Settings(model_name, DATA, Path(), 0, torch.float32)
    task = Classification(settings, dataset, lambda: model)
    sampler = GlobalBatchSampler(len(dataset.train), batch_size * exchange.size, 0)
    shares = Shares(exchange.size)
    return Job(
        model=model,
        optimizer=build_optimizer("sgd", model, LR, MOMENTUM, weight_decay=0.0),
        update=Update(model, device),
        task=task,
        data=task.build_data(),
        feed=Feed(dataset.train, sampler, shares, micro_batches=1, everyone=False),
        valid_shares=shares,
        schedule=lambda step: LR,
        total_steps=2**62,
        device=device,
        intervals=Intervals(log=10, evaluation=1, checkpoint=0, hash=0),
    )


def endless_batches(sampler: GlobalBatchSampler) -> Iterator[Indices]:
    """Global batches of one epoch after the other."""
    for epoch in itertools.count():
        yield from sampler.global_batches(epoch * sampler.samples)


def endless_steps(job: Job, rank: int) -> Iterator[StepData]:
    """The data of one step after the other."""
    for epoch in itertools.count():
        yield from job.feed.epoch(epoch * job.sampler.samples, job.total_steps, rank)


def bare_step(job: Job, exchange: Exchange) -> Callable[[], None]:
    """The loop that one would write by hand, with the job's optimizer as it is; its step is
    collective where that is distributed.
    """
    batches = endless_batches(job.sampler)

    def step() -> None:
        own = job.feed.shares.of(next(batches), exchange.rank)
        inputs, labels = job.data.train.batch(own)
        job.optimizer.zero_grad()
        loss = functional.cross_entropy(job.model(inputs), labels)
        loss.backward()
        job.optimizer.step()

    return step


def our_step(job: Job, exchange: Exchange, audit: Audit = NO_AUDIT) -> Callable[[], None]:
    """The product's step, a collective: weighted loss, sums over ranks, schedule, clock."""
    steps = endless_steps(job, exchange.rank)
    meter = Meter(exchange, job.sampler.samples, job.task.metrics)
    numbers = itertools.count(1)

    def step() -> None:
        number = next(numbers)
        meter.begin_step(number)
        data = next(steps)
        sums = train_step(job, exchange, audit, number, data, meter.clock)
        meter.end_step(sums, number, data.samples)
        if number % job.intervals.log == 0:
            meter.read_interval()

    return step
