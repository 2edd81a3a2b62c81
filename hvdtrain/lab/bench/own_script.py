"""A script as readers have it, for `bench step`: a DataLoader over tensors, and a loop of its own.

`train` reads its own data by one indexing operation, so its figures do not show what it costs to
read samples of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvdtrain.audit import Audits
from hvdtrain.data import GlobalBatchSampler, Shares, Splits, split_of
from hvdtrain.data.feeding import Feed, to_device
from hvdtrain.exchange import AVERAGE, Exchange
from hvdtrain.lab.bench.rounds import ENDLESS, Options, endless_steps
from hvdtrain.lab.systems.work import Work, trained
from hvdtrain.run.script import ScriptTask
from hvdtrain.train.job import Intervals, Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.step import Step
from hvdtrain.train.update import Update

SAMPLES = 16384


def samples_of(work: Work) -> TensorDataset:
    """Return random samples of the shape that the work has."""
    inputs = torch.rand(SAMPLES, *work.dataset.shape)
    return TensorDataset(inputs, torch.randint(work.dataset.classes, (SAMPLES,)))


def bare_loader_step(options: Options, work: Work, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a handwritten loop over a DataLoader, a collective over several ranks."""
    data, optimizer = samples_of(work), work.optimizer(trained(work.model))
    if exchange.size > 1:
        optimizer = exchange.distribute(optimizer, work.model, reduction=AVERAGE)
    sampler: DistributedSampler[Any] = DistributedSampler(data, exchange.size, exchange.rank)
    batches, device = _endless(data, options.batch_size, sampler), torch.device(options.device)

    def step() -> None:
        inputs, labels = to_device(next(batches), device)
        optimizer.zero_grad()
        functional.cross_entropy(work.model(inputs), labels).backward()
        optimizer.step()

    return step


def _endless(data: TensorDataset, size: int, sampler: DistributedSampler[Any]) -> Iterator[Any]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from DataLoader(data, size, sampler=sampler, drop_last=True)


def script_step(options: Options, work: Work, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a script with `hvdtrain.Loop` over a DataLoader, a collective."""
    job = _job(options, work, exchange)
    meter = Meter(exchange, job.sampler.samples, job.task.metrics)
    steps, numbers = endless_steps(job, exchange.rank), itertools.count(1)

    def run() -> None:
        number = next(numbers)
        meter.begin_step(number)
        step = Step(job, exchange, Audits(), number, next(steps), meter.clock)
        for inputs, labels in step.batches():
            loss = functional.cross_entropy(work.model(inputs), labels, reduction="sum")
            step.backward(loss, len(labels))
        step.update()
        meter.end_step(step.close(), number, step.samples)
        if number % job.intervals.log == 0:
            meter.read_interval()

    return run


def _job(options: Options, work: Work, exchange: Exchange) -> Job:
    """Collective: return what `hvdtrain.Loop` makes of a model, an optimizer and a DataLoader."""
    split = split_of(DataLoader(samples_of(work), options.batch_size, shuffle=True))
    device, shares = torch.device(options.device), Shares(exchange.size)
    sampler = GlobalBatchSampler(SAMPLES, options.batch_size * exchange.size, seed=0)
    job = Job(
        model=work.model,
        optimizers=(work.optimizer(trained(work.model)),),
        update=Update(work.model, device),
        task=ScriptTask(None, (), None, "loss", False),
        data=Splits("script", split, split),
        feed=Feed(split, sampler, shares, 1, everyone=False),
        valid_shares=shares,
        schedule=None,
        total_steps=ENDLESS,
        device=device,
        intervals=Intervals(log=10, evaluation=1),
    )
    return job.distributed(exchange)
