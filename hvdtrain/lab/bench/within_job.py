"""Benchmarks within one job, on synthetic data: the step, audits and checkpoints."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
from torch.nn import functional

from hvdtrain.audit import Auditor, NoAudit
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.data import GlobalBatchSampler, Shares, load_dataset
from hvdtrain.data.feeding import Feed, StepData
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError
from hvdtrain.exchange import AVERAGE, Exchange, SingleProcess
from hvdtrain.lab.bench.turns import Measured, Options, Ratio, ratio, run_rounds
from hvdtrain.models import build_model
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from hvdtrain.train.checkpoint import Checkpoints
from hvdtrain.train.loop import Audit, Intervals, Job, Position, State, train_step
from hvdtrain.train.metering import Meter
from hvdtrain.train.optimizers import build_optimizer
from hvdtrain.train.state import capture
from hvdtrain.train.update import Update

DATA = "synthetic:1x28x28"
LR, MOMENTUM = 0.01, 0.9
NO_AUDITS = NoAudit()
PARTS = 100
RARELY = 100  # steps between whole audits
WITHOUT, PART, WHOLE = "no audit", f"1/{PARTS} at every step", "all at every step"
OURS, BARE, ALONE = "hvdtrain", "bare Horovod loop", "bare single-device loop"
IN_STEP = "bare single-device loop, in step"
NO_CHECKPOINTS, BACKGROUND, WAITED = "no checkpoints", "in the background", "waited for"
KEEP = 2


def describe(options: Options) -> str:
    """Return a description of one step."""
    return f"{options.model}, {options.batch_size} samples a worker"


def make_job(model_name: str, batch_size: int, exchange: Exchange) -> Job:
    """Return a job of `batch_size` samples per worker and step, not distributed yet."""
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
    """Yield the global batches of one epoch after the other."""
    for epoch in itertools.count():
        yield from sampler.global_batches(epoch * sampler.samples)


def endless_steps(job: Job, rank: int) -> Iterator[StepData]:
    """Yield the data of one step after the other."""
    for epoch in itertools.count():
        yield from job.feed.epoch(epoch * job.sampler.samples, job.total_steps, rank)


def bare_step(job: Job, exchange: Exchange) -> Callable[[], None]:
    """Return the step of a handwritten loop with the job's optimizer.

    It is collective where the optimizer is distributed.
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


def our_step(job: Job, exchange: Exchange, audit: Audit = NO_AUDITS) -> Callable[[], None]:
    """Return the step of `train`, a collective: weighted loss, sums over ranks, schedule, clock."""
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


def bench_audit(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without audits, with 1/PARTS and with all of the
    model audited at every step. Raises UsageError for a single process, which exchanges nothing.
    """
    if exchange.size < 2:
        raise UsageError("bench audit: one worker exchanges nothing (horovodrun -np 2 ...)")
    job = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    ring = exchange.ring()

    def audit(parts: int) -> Auditor:
        return Auditor(job.model, ring, every=1, check=BoundCheck(ring, job.reduction), parts=parts)

    contestants = {
        WITHOUT: our_step(job, exchange),
        PART: our_step(job, exchange, audit(PARTS)),
        WHOLE: our_step(job, exchange, audit(1)),
    }
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ring.close()
    ratios = {name: ratio(seconds, name, WITHOUT) for name in (PART, WHOLE)}
    ratios[f"all at every {RARELY}th step"] = _spread_out(ratios[WHOLE])
    return Measured(describe(options), seconds, ratios)


def _spread_out(every_step: Ratio) -> Ratio:
    """Return the ratio if one step in RARELY bears the cost; more precise than a measurement."""
    return Ratio(*(1 + (value - 1) / RARELY for value in astuple(every_step)))


def bench_step(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step by loop and round, and our ratios to other loops.

    The single-device loop runs on all workers at the same time, without exchange: the limit of
    this machine. "In step": after each step all wait for the slowest, as any exchange requires.
    """
    contestants = {}
    if exchange.size > 1:
        bare = make_job(options.model, options.batch_size, exchange)
        bare = replace(bare, reduction=AVERAGE).distributed(exchange)
        contestants[BARE] = bare_step(bare, exchange)
    alone = bare_step(make_job(options.model, options.batch_size, SingleProcess()), SingleProcess())
    contestants[ALONE] = alone
    if exchange.size > 1:
        contestants[IN_STEP] = _in_step(alone, exchange)
    # Ours last: the exchange monitors the parameters of the optimizer that it distributed last.
    ours = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    contestants[OURS] = our_step(ours, exchange)
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ratios = {name: ratio(seconds, OURS, name) for name in contestants if name != OURS}
    return Measured(describe(options), seconds, ratios)


def _in_step(step: Callable[[], None], exchange: Exchange) -> Callable[[], None]:
    nothing = torch.zeros(1)

    def step_and_wait() -> None:
        step()
        exchange.sum_later(nothing, "hvdtrain.bench.step")()

    return step_and_wait


def bench_checkpoint(options: Options, exchange: Exchange) -> Measured:
    """Collective: measure the seconds per step without and with a checkpoint in every round."""
    steps = options.steps
    job = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    step = our_step(job, exchange)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), KEEP)
        contestants = {
            NO_CHECKPOINTS: step,
            BACKGROUND: _saving(step, job, exchange, checkpoints, steps, wait=False),
            WAITED: _saving(step, job, exchange, checkpoints, steps, wait=True),
        }
        seconds = run_rounds(contestants, options.rounds, steps, exchange)
        checkpoints.wait()
    ratios = {name: ratio(seconds, name, NO_CHECKPOINTS) for name in (BACKGROUND, WAITED)}
    return Measured(describe(options), seconds, ratios)


def _saving(
    step: Callable[[], None],
    job: Job,
    exchange: Exchange,
    checkpoints: Checkpoints,
    interval: int,
    wait: bool,
) -> Callable[[], None]:
    numbers = itertools.count(1)
    meter = Meter(exchange, job.sampler.samples)

    def step_and_save() -> None:
        step()
        number = next(numbers)
        if number % interval != interval // 2:  # in the middle of a round
            return
        snapshot = capture(job, State(Position(number, number), meter), exchange, {})
        if snapshot is not None:
            checkpoints.save(snapshot, is_best=False)
            if wait:
                checkpoints.wait()

    return step_and_save
