"""Loops within one job, and rounds of them: the step of `train`, of a script, and of bare loops.

A script as readers have it takes its samples from a DataLoader over tensors. `train` reads its own
data by one indexing operation, so its figures do not show what it costs to read samples of others.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvdtrain.data import GlobalBatchSampler, Shares, SharesLike, Splits, VirtualShares, split_of
from hvdtrain.data.feeding import Feed, StepData, to_device
from hvdtrain.exchange import AVERAGE, Exchange
from hvdtrain.exchange.gpus import synchronize
from hvdtrain.lab.bench.rounds import in_turn
from hvdtrain.lab.systems.horovod import NO_AUDITS, job_of
from hvdtrain.lab.systems.work import Work, WorkSpec, trained
from hvdtrain.run.script import ScriptTask
from hvdtrain.train.interfaces import Audit
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.step import Step, compute

DATA = "synthetic:1x28x28"
SAMPLES = 16384  # of a DataLoader
WARM_UP_STEPS = 5
ENDLESS = 2**62  # steps


@dataclass(frozen=True)
class Options:
    """Options of the benches within one job; each uses those that apply to it."""

    rounds: int
    steps: int  # per round
    model: str
    batch_size: int  # per worker
    megabytes: float
    virtual_workers: int | None = None
    device: str = "cpu"  # torch's name of this rank's device


def run_rounds(
    contestants: Mapping[str, Callable[[], object]], options: Options, exchange: Exchange
) -> dict[str, list[float]]:
    """Collective: return the seconds per step on the slowest rank, by contestant and round.

    A step counts when the device has done all of it.
    """
    device, steps = torch.device(options.device), options.steps
    for step in contestants.values():
        # All ranks begin together: sums of the contestant before, in progress still, have the same
        # names.
        exchange.all_gather_object(None, "hvdtrain.bench.warm_up")
        for _ in range(WARM_UP_STEPS):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name in in_turn([*contestants], number):
            step = contestants[name]
            exchange.all_gather_object(None, "hvdtrain.bench.start")
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            step_s = (time.perf_counter() - started) / steps
            seconds[name].append(max(exchange.all_gather_object(step_s, "hvdtrain.bench.end")))
    return seconds


def make_work(options: Options, workers: int) -> Work:
    """Return the work of `options.batch_size` samples per worker and step."""
    work = Work(WorkSpec(options.model, DATA, "", options.batch_size * workers, ENDLESS))
    work.model.to(options.device)
    return work


def make_job(
    options: Options,
    exchange: Exchange,
    micro_batches: int = 1,
    virtual_workers: int | None = None,
    build: Callable[[], torch.nn.Module] | None = None,
) -> Job:
    """Collective: return the work as a job of `train`, with a distributed optimizer.

    `build`: makes another model.
    """
    work, device = make_work(options, exchange.size), torch.device(options.device)
    if build is not None:
        work.model = build()
    shares: SharesLike = Shares(exchange.size)
    if virtual_workers is not None:
        shares = VirtualShares(Shares(virtual_workers), shares.sizes(virtual_workers))
    job = job_of(work, work.tuned_optimizer(), shares, micro_batches, device)
    return job.distributed(exchange)


def endless_steps(job: Job, rank: int) -> Iterator[StepData]:
    """Yield the data of one step after the other."""
    for epoch in itertools.count():
        yield from job.feed.epoch(epoch * job.sampler.samples, job.total_steps, rank)


def our_step(
    job: Job,
    exchange: Exchange,
    audit: Audit = NO_AUDITS,
    passes: Callable[[Step], object] = compute,
) -> Callable[[], None]:
    """Return the step of `train`, a collective: weighted loss, sums over ranks, schedule, clock.

    `passes`: makes the passes of a step, and its update.
    """
    meter = Meter(exchange, job.sampler.samples, job.task.metrics)
    steps, numbers = endless_steps(job, exchange.rank), itertools.count(1)

    def run() -> None:
        number = next(numbers)
        meter.begin_step(number)
        step = Step(job, exchange, audit, number, next(steps), meter.clock)
        passes(step)
        meter.end_step(step.close(), number, step.samples)
        if number % job.intervals.log == 0:
            meter.read_interval()

    return run


def bare_step(options: Options, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a handwritten loop, a collective over several ranks."""
    work, shares = make_work(options, exchange.size), Shares(exchange.size)
    batches = (
        work.dataset.train.batch(shares.of(indices, exchange.rank)) for indices, _ in work.batches()
    )
    return _bare(options, exchange, work, work.tuned_optimizer(), batches)


def bare_loader_step(options: Options, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a handwritten loop over a DataLoader, a collective over several ranks."""
    work = make_work(options, exchange.size)
    data = samples_of(work)
    sampler: DistributedSampler[Any] = DistributedSampler(data, exchange.size, exchange.rank)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from DataLoader(data, options.batch_size, sampler=sampler, drop_last=True)

    return _bare(options, exchange, work, work.optimizer(trained(work.model)), batches())


def _bare(
    options: Options,
    exchange: Exchange,
    work: Work,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
) -> Callable[[], None]:
    device = torch.device(options.device)
    if exchange.size > 1:
        optimizer = exchange.distribute(optimizer, work.model, reduction=AVERAGE)

    def step() -> None:
        inputs, labels = to_device(next(batches), device)
        optimizer.zero_grad()
        functional.cross_entropy(work.model(inputs), labels).backward()
        optimizer.step()

    return step


def script_step(options: Options, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a script with `hvdtrain.Loop` over a DataLoader, a collective."""
    work, shares = make_work(options, exchange.size), Shares(exchange.size)
    split = split_of(DataLoader(samples_of(work), options.batch_size, shuffle=True))
    sampler = GlobalBatchSampler(SAMPLES, options.batch_size * exchange.size, seed=0)
    optimizer = work.optimizer(trained(work.model))
    # What `hvdtrain.Loop` makes of a model, an optimizer and a DataLoader.
    job = replace(
        job_of(work, optimizer, shares, device=torch.device(options.device)),
        task=ScriptTask(None, (), None, "loss", False),
        data=Splits("script", split, split),
        feed=Feed(split, sampler, shares, 1, everyone=False),
        schedule=None,
    ).distributed(exchange)

    def passes(step: Step) -> None:
        for inputs, labels in step.batches():
            loss = functional.cross_entropy(job.model(inputs), labels, reduction="sum")
            step.backward(loss, len(labels))
        step.update()

    return our_step(job, exchange, passes=passes)


def samples_of(work: Work) -> TensorDataset:
    """Return random samples of the shape that the work has."""
    inputs = torch.rand(SAMPLES, *work.dataset.shape)
    return TensorDataset(inputs, torch.randint(work.dataset.classes, (SAMPLES,)))
