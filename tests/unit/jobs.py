"""Small jobs for tests: data whose samples' losses differ, and small networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from hvdtrain.audit import Audits
from hvdtrain.data import GlobalBatchSampler, Shares, SharesLike, TensorSplit, VirtualShares
from hvdtrain.data.feeding import Feed
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Dataset
from hvdtrain.errors import Stopped
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.pulse import Pulse
from hvdtrain.run.hooks import StepProfiler
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from hvdtrain.train.batchnorm import convert_to_sync
from hvdtrain.train.checkpoint import Snapshot
from hvdtrain.train.clock import PhaseClock
from hvdtrain.train.evaluate import Evaluation, evaluate
from hvdtrain.train.interfaces import Balancer, Hooks, StepHook
from hvdtrain.train.job import Intervals, Job
from hvdtrain.train.loop import TrainingLoop, train
from hvdtrain.train.metering import Meter, StepSums, Totals
from hvdtrain.train.progress import Outcome, State
from hvdtrain.train.schedules import make_schedule
from hvdtrain.train.state import capture, restore
from hvdtrain.train.step import train_step
from hvdtrain.train.update import Update
from tests.unit.threads import connect, run_ranks

SHAPE = (1, 4, 4)
CLASSES = 7
CPU = torch.device("cpu")


class LoggedSplit(TensorSplit):
    """Remembers which samples were asked for, batch by batch."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(inputs, labels)
        self.log: list[list[int]] = []

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        self.log.append(indices.tolist())
        return super().batch(indices, epoch)


def made_up_data(samples: int, dtype: torch.dtype = torch.float64, valid: int = 9) -> Dataset:
    """Images of many magnitudes, so that losses differ and a wrong weight shows."""
    generator = torch.Generator().manual_seed(3)

    def split(count: int) -> LoggedSplit:
        inputs = torch.randn((count, *SHAPE), generator=generator, dtype=torch.float64)
        inputs *= torch.linspace(0.1, 4, count, dtype=torch.float64)[:, None, None, None]
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return LoggedSplit(inputs.to(dtype), labels)

    return Dataset("made up", SHAPE, CLASSES, split(samples), split(valid))


def plain(shape: tuple[int, int, int] = SHAPE, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 8), nn.Tanh(), nn.Linear(8, classes)
    )


def with_batch_norm(shape: tuple[int, int, int] = SHAPE, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * (shape[1] - 2) * (shape[2] - 2), 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, classes),
    )


def with_dropout(shape: tuple[int, int, int] = SHAPE, classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(with_batch_norm(shape, classes), nn.Dropout(0.3))


def classification(dataset: Dataset, dtype: torch.dtype = torch.float64) -> Classification:
    """The task of learning `dataset`; its network is built elsewhere."""
    settings = Settings("made up", dataset.name, Path(), 0, dtype)
    return Classification(settings, dataset, plain)


def evaluate_on(
    model: nn.Module, dataset: Dataset, exchange: Exchange, stop_requested: Any = lambda: False
) -> Evaluation:
    """Over the valid split of `dataset`."""
    shares = Shares(exchange.size)
    return evaluate(
        model, classification(dataset), dataset.valid, shares, exchange, CPU, stop_requested
    )


def one_step(
    job: Job, exchange: Exchange, audit: StepHook, step: int, indices: Indices
) -> StepSums:
    """A step on samples of one's own choice."""
    data = job.feed.step(indices, exchange.rank)
    return train_step(job, exchange, audit, step, data, PhaseClock(Pulse()))


def make_job(
    dataset: Dataset,
    batch: int,
    exchange: Exchange,
    *,
    build: Any = plain,
    lr: float = 0.05,
    total_steps: int = 10,
    accum: int = 1,
    weights: Sequence[float] | None = None,
    virtual: int | None = None,
    sync_bn: bool = False,
    dtype: torch.dtype = torch.float64,
    **update: Any,
) -> Job:
    """SGD with momentum and weight decay, warm-up and cosine decay. Call it in one thread."""
    torch.manual_seed(11)
    model = build().to(dtype)
    if sync_bn:
        convert_to_sync(model, exchange)
    task = classification(dataset, dtype)
    shares: SharesLike = Shares(exchange.size, weights)
    if virtual is not None:
        shares = VirtualShares(Shares(virtual), shares.sizes(virtual))
    sampler = GlobalBatchSampler(len(dataset.train), batch, seed=5)
    job = Job(
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01),),
        update=Update(model, CPU, **update),
        task=task,
        data=task.build_data(),
        feed=Feed(dataset.train, sampler, shares, accum, sync_bn),
        valid_shares=shares,
        schedule=make_schedule("cosine", lr, total_steps, warmup_steps=2),
        total_steps=total_steps,
        device=CPU,
        intervals=Intervals(log=2, evaluation=1, hash=3),
        seed=5,
    )
    return job.distributed(exchange)


def equal(one: Any, other: Any) -> bool:
    """Whether two structures hold the same, tensors to the bit (and NaN is NaN)."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(equal(*pair) for pair in pairs)
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def timeless(totals: Totals) -> Totals:
    """Without what differs from run to run."""
    return replace(totals, samples_per_s=0.0, phases_s={})


@dataclass
class Recording:
    """An Observer: the records it received, without what differs from run to run."""

    records: list[tuple[Any, ...]] = field(default_factory=list)

    def interval_end(self, totals: Totals, lr: float) -> None:
        self.records.append(("step", self._timeless(totals), lr))

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        self.records.append(("epoch", self._timeless(totals), evaluation, lr))

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        self.records.append(("evaluation", self._timeless(totals), evaluation))

    def up_to(self, step: int) -> list[tuple[Any, ...]]:
        return [record for record in self.records if record[1].step <= step]

    def _timeless(self, totals: Totals) -> Totals:
        return timeless(totals)


class MemoryKeeper:
    """A Keeper in memory; it is asked to stop when `stop_requested` is called the n-th time."""

    def __init__(self, exchange: Exchange, stop_at: int | None = None) -> None:
        self._exchange = exchange
        self._stop_at = stop_at
        self.asked = 0
        self.snapshot: Snapshot | None = None
        self.saved_in_memory: list[int] = []

    def stop_requested(self) -> bool:
        self.asked += 1
        return self._stop_at is not None and self.asked >= self._stop_at

    def save(self, job: Job, state: State, evaluation: Evaluation | None) -> None:
        self.snapshot = capture(job, state, self._exchange, {})

    def save_in_memory(self, job: Job, state: State) -> None:
        self.saved_in_memory.append(state.step)

    def stop(self) -> NoReturn:
        raise Stopped(15)


@dataclass
class Ran:
    """One part of a run: its end, or where it stopped."""

    outcome: Outcome | None
    snapshot: Snapshot | None
    recording: Recording
    asked: int


def run_job(
    job: Job,
    exchange: Exchange,
    state: dict[str, Any] | None = None,
    stop_at: int | None = None,
    balancer: Balancer | None = None,
) -> Ran:
    """Train as the command does, from the beginning or from `state`."""
    at = State(Meter(exchange, job.sampler.samples, job.task.metrics))
    recording = Recording()
    if state is not None:
        restore(state, job, at)
    keeper = MemoryKeeper(exchange, stop_at)
    profiler = StepProfiler(None, Path(), SingleProcess())
    outcome = None
    try:
        hooks = Hooks(Audits(), recording, keeper, profiler, balancer=balancer)
        outcome = train(TrainingLoop(job, at, exchange, hooks))
    except Stopped:
        assert stop_at is not None
    return Ran(outcome, keeper.snapshot, recording, keeper.asked)


def check_ranks_and_resumption(make: Callable[[Exchange], Job], size: int) -> Job:
    """Assert that a job ends the same on `size` ranks, and after a stop; return that of one rank.

    `make`: returns a new one, of more than 5 steps, for an exchange.
    """
    alone = make(SingleProcess())
    run_job(alone, SingleProcess())
    stopped = run_job(make(SingleProcess()), SingleProcess(), stop_at=5)
    resumed = make(SingleProcess())
    assert stopped.snapshot is not None
    run_job(resumed, SingleProcess(), state=stopped.snapshot.state)
    assert equal(resumed.model.state_dict(), alone.model.state_dict())

    exchanges = connect(size)
    jobs = [make(exchange) for exchange in exchanges]
    run_ranks(exchanges, lambda it: run_job(jobs[it.rank].distributed(it), it))
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(jobs[0].model.state_dict()[name], weight, rtol=1e-12, atol=1e-14)
    return alone
