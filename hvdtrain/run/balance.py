"""Shares in proportion to the speed of the workers: `--rank-weights auto`."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.log import say
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import TaskData, share_out
from hvdtrain.topology import Topology
from hvdtrain.train.job import Job

WARM_UP, MEASURED = 2, 5  # repetitions of the first step
ALIKE = 0.1  # ranks whose speeds differ by less are taken as equal


def balance(
    config: TrainConfig,
    source: TaskData,
    global_batch_size: int,
    exchange: Exchange,
    topology: Topology,
    before: str | None,
) -> tuple[TrainConfig, TaskData]:
    """Collective: return the configuration with weights of the ranks, and the shares that follow.

    `before`: the weights with which the run was started, kept for the same number of ranks: they
    decide which rank computes what. Without them the speeds are measured.
    """
    weights = before
    if before is None or len(before.split(",")) != exchange.size:
        weights = None
        if exchange.size > 1:
            job = run_on_all(
                exchange,
                "balance",
                lambda: prepare(config, global_batch_size, source, exchange, topology),
            )
            weights = ",".join(map(str, measure_weights(job, exchange)))
    if exchange.rank == 0 and weights:
        say(f"rank weights: {weights} ({'as before' if weights == before else 'measured'})")
    config = replace(config, batch=replace(config.batch, rank_weights=weights))
    shares = share_out(config, exchange.size)
    return config, replace(source, shares=shares, valid_shares=shares)


def measure_weights(job: Job, exchange: Exchange) -> tuple[float, ...]:
    """Collective: return a weight for each rank, in proportion to its speed; the fastest has 1.

    All ranks compute their shares of the first global batch several times, at the same time, as
    those of a host share its memory. Nothing is exchanged or updated, but the model's buffers, its
    gradients and the random generators change: prepare another job afterwards.
    """
    batch = next(iter(job.sampler.global_batches(0)))
    seconds = []
    for _ in range(WARM_UP + MEASURED):
        loaded = list(job.feed.step(batch, exchange.rank).batches)
        exchange.all_gather_object(None, "hvdtrain.balance.begin")
        began_s = time.perf_counter()
        for part in loaded:
            with job.update.autocast():
                loss = job.task.loss(job.model, part.on(job.device)).loss
            job.update.scale(loss).backward()
        if job.device.type != "cpu":
            torch.accelerator.synchronize(job.device)
        seconds.append(time.perf_counter() - began_s)
    samples = sum(part.samples for part in loaded)
    speed = samples / statistics.median(seconds[WARM_UP:]) if samples else None
    return as_weights(exchange.all_gather_object(speed, "hvdtrain.balance.speeds"))


def as_weights(speeds: Sequence[float | None]) -> tuple[float, ...]:
    """Return weights of two digits for these speeds; None, of a rank without samples, counts as the
    mean of the others.
    """
    measured = [speed for speed in speeds if speed]
    if not measured or min(measured) >= max(measured) * (1 - ALIKE):
        return (1.0,) * len(speeds)
    mean, fastest = statistics.fmean(measured), max(measured)
    return tuple(max(round((speed or mean) / fastest, 2), 0.01) for speed in speeds)
