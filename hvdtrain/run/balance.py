"""Shares in proportion to the speed of the workers: `--rank-weights auto`.

Speeds are measured before the first step. Virtual workers also follow them while the run goes on:
they move between ranks, which changes no bit. Without virtual workers other shares would be summed
and rounded in another way, so the shares stay.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import AUTO
from hvdtrain.data import Shares, SharesLike, VirtualShares
from hvdtrain.data.feeding import in_order
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.log import few, say
from hvdtrain.records.stragglers import BLOCK_STEPS, SHORTEST_S, Row
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import TaskData, share_out
from hvdtrain.topology import Topology
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Totals

WARM_UP, MEASURED = 2, 5  # repetitions of the first step
ALIKE = 0.1  # ranks whose speeds differ by less are taken as equal
GAIN = 0.1  # part of the time of the slowest rank that a move must save
INTERVALS = 2  # in a row, in each of which it would have


def balance(
    config: TrainConfig,
    source: TaskData,
    global_batch_size: int,
    exchange: Exchange,
    topology: Topology,
    before: str | None,
) -> tuple[TrainConfig, TaskData]:
    """Collective: return the configuration with weights of the ranks, and the shares that follow.

    `before`: the weights with which the run was started, kept for the same number of ranks, as they
    decide how sums are rounded; not so with virtual workers. Otherwise the speeds are measured.
    """
    virtual = config.batch.virtual_workers
    weights = before if virtual is None else None
    if weights is None or len(weights.split(",")) != exchange.size:
        weights = None
        if exchange.size > 1:
            job = run_on_all(
                exchange,
                "balance",
                lambda: prepare(config, global_batch_size, source, exchange, topology),
            )
            weights = ",".join(map(str, measure_weights(job, exchange)))
    text = f"rank weights: {weights} ({'as before' if weights == before else 'measured'})"
    shares: SharesLike
    if virtual is None:
        config = replace(config, batch=replace(config.batch, rank_weights=weights))
        shares = share_out(config, exchange.size)
    else:  # the configuration still says that they are measured: a resumed run does so again
        seconds = [1 / float(weight) for weight in (weights or "1").split(",")]
        shares = VirtualShares(Shares(virtual), counts_for(seconds, virtual))
        text += f", virtual workers by rank: {few(shares.counts, most=16)}"
    if exchange.rank == 0 and weights:
        say(text)
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


def counts_for(seconds: Sequence[float], workers: int) -> list[int]:
    """Return how many of the virtual workers each rank computes so that the last rank to end does
    so as early as possible; each has one at least, so that its speed stays known.

    `seconds`: that a rank takes for one of them.
    """
    counts = [1] * len(seconds)
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]  # with one more
    heapify(ends)
    for _ in range(workers - len(seconds)):
        rank = ends[0][1]
        counts[rank] += 1
        heapreplace(ends, ((counts[rank] + 1) * seconds[rank], rank))
    return counts


def gain(seconds: Sequence[float], before: Sequence[int], after: Sequence[int]) -> float:
    """Return the part of the time of the slowest rank that other counts would save."""
    slowest = [
        max(n * each for n, each in zip(counts, seconds, strict=True)) for counts in (before, after)
    ]
    return 1 - slowest[1] / slowest[0]


class Moves:
    """The decisions to move virtual workers between ranks, from the times that the ranks take.

    An interval has BLOCK_STEPS steps or more. The counts that suit INTERVALS of them together
    replace the present ones if they would have saved GAIN in each. The first interval does not
    count, nor does the one after a move: what is done once would count as speed.
    """

    def __init__(self, step: int) -> None:
        """`step`: after which the run begins."""
        self._since = step
        self._forget()

    def _forget(self) -> None:
        self._is_first = True
        self._seconds: list[float] = []  # of each rank, in this interval
        self._intervals: deque[list[float]] = deque(maxlen=INTERVALS)

    def judge(
        self, rows: Sequence[Row], step: int, counts: Sequence[int]
    ) -> tuple[list[int], list[float]] | None:
        """Return the counts that replace the present `counts` of virtual workers by rank, and the
        seconds that each rank takes for one of them; None: they stay.

        `rows`: of all ranks, in the steps up to `step` since the last call.
        """
        before, steps = self._seconds or [0.0] * len(rows), step - self._since
        self._seconds = [s + sum(row[1:]) for s, row in zip(before, rows, strict=True)]
        if steps < BLOCK_STEPS:
            return None
        both = zip(self._seconds, counts, strict=True)
        self._intervals.append([max(s, SHORTEST_S) / n / steps for s, n in both])
        self._since, self._seconds = step, []
        if self._is_first:
            self._is_first = False
            self._intervals.clear()
        if len(self._intervals) < INTERVALS:
            return None
        mean = [statistics.fmean(of_rank) for of_rank in zip(*self._intervals, strict=True)]
        better = counts_for(mean, sum(counts))
        if min(gain(seconds, counts, better) for seconds in self._intervals) < GAIN:
            return None
        self._forget()
        return better, mean


@dataclass(frozen=True)
class Follower:
    """The balancer of a run whose virtual workers follow the speeds of the ranks."""

    job: Job
    exchange: Exchange
    shares: VirtualShares
    moves: Moves

    def interval_end(self, totals: Totals) -> None:
        """Collective: move virtual workers, if that was decided. All ranks decide the same, as they
        have the same times.
        """
        before = self.shares.counts
        if (decision := self.moves.judge(totals.of_ranks, totals.step, before)) is None:
            return
        after, seconds = decision
        self.job.reassign(after)
        if self.exchange.rank == 0:
            changes = enumerate(zip(before, after, strict=True))
            fast, slow = seconds.index(min(seconds)), seconds.index(max(seconds))
            say(
                f"step {totals.step}: virtual workers move: "
                + few([f"rank {rank} {old} -> {new}" for rank, (old, new) in changes if old != new])
                + f"; one takes {1000 * seconds[slow]:.3g} ms on rank {slow}, "
                f"{1000 * seconds[fast]:.3g} ms on rank {fast}"
            )


def follower_of(config: TrainConfig, job: Job, exchange: Exchange, step: int) -> Follower | None:
    """Return the balancer of a run that begins after `step`, if its virtual workers may move."""
    shares = job.feed.shares
    if config.batch.rank_weights != AUTO or exchange.size == 1:
        return None
    assert isinstance(shares, VirtualShares)
    reason = None
    if in_order(job.data.train):
        reason = "the samples are read in order, which would begin anew"
    elif job.device.type != "cpu":
        reason = f"{job.device.type} may lack memory for the gradients of more of them"
    if reason is None:
        return Follower(job, exchange, shares, Moves(step))
    if exchange.rank == 0:
        say(f"rank weights: virtual workers stay on their ranks: {reason}")
    return None
