"""Virtual workers that move between ranks while a run goes on: no bit changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.data import GlobalBatchSampler, Shares, VirtualShares
from hvdtrain.data.feeding import Feed, Loaded
from hvdtrain.data.reading import StreamedSplit
from hvdtrain.data.sampler import Indices
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Totals
from tests.unit.jobs import Ran, equal, made_up_data, make_job, run_job, with_batch_norm
from tests.unit.readable import Numbers
from tests.unit.threads import ThreadExchange, connect, run_ranks

VIRTUAL, STEPS = 4, 11
DATA = made_up_data(29, torch.float32)  # batches of 10, 10 and 9, in 4 shares each
# By rank, after a step; epochs end after steps 3, 6 and 9.
MOVES = {
    2: {2: [1, 3], 4: [3, 1], 6: [0, 4], 8: [2, 2]},
    3: {2: [1, 1, 2], 4: [1, 2, 1], 6: [0, 4, 0], 8: [2, 1, 1]},
}


class Counting(nn.Module):
    """A layer with a buffer that has no value at first, and then counts weighted passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            before = torch.zeros(2) if self.seen is None else self.seen
            self.seen = before * 0.9 + images.detach().mean()
        return images


@dataclass
class Planned:
    """A balancer that makes these moves."""

    job: Job
    moves: Mapping[int, list[int]]
    made: int = 0

    def interval_end(self, totals: Totals) -> None:
        if counts := self.moves.get(totals.step):
            self.job.reassign(counts)
            self.made += 1


CASES: dict[str, dict[str, Any]] = {
    "lazy buffer": {"build": lambda: nn.Sequential(Counting(), with_batch_norm())},
    "average": {"build": with_batch_norm, "ema_decay": 0.9},
    # Too few samples for the batch norm of each pass.
    "two passes": {
        "build": lambda: nn.Sequential(Counting(), nn.Flatten(), nn.Linear(16, 7)),
        "accum": 2,
    },
}


def job_on(exchange: Exchange, case: str = "lazy buffer") -> Job:
    settings = {"total_steps": STEPS, "virtual": VIRTUAL, "dtype": torch.float32, **CASES[case]}
    job = make_job(DATA, 10, exchange, **settings)
    return replace(job, intervals=replace(job.intervals, evaluation_steps=4))


def ran(
    make: Callable[[Exchange], Job], size: int, state: Any = None, stop_at: int | None = None
) -> Ran:
    """Return what rank 0 has of a run with the moves of its number of ranks."""
    exchanges: list[Any] = [SingleProcess()] if size == 1 else connect(size)
    jobs = [make(exchange) for exchange in exchanges]
    planned = [Planned(job, MOVES.get(size, {})) for job in jobs]

    def work(exchange: ThreadExchange) -> Ran:
        balancer = planned[exchange.rank]
        return run_job(balancer.job, exchange, copy.deepcopy(state), stop_at, balancer)

    return work(exchanges[0]) if size == 1 else run_ranks(exchanges, work)[0]


def learned(result: Ran) -> dict[str, Any]:
    """Return all of a checkpoint that must not depend on the ranks."""
    assert result.snapshot is not None
    state = result.snapshot.state
    names = ("step", "samples_seen", "model", "optimizer", "ranks", "evaluation")
    return {name: state[name] for name in names} | {"sha256": result.snapshot.params_sha256}


@pytest.mark.parametrize("case", CASES)
def test_moves_change_no_bit(case: str) -> None:
    """Fails if buffers, running statistics or samples of a virtual worker stay behind, go to
    another one, or are there twice; or if an evaluation or a checkpoint lacks some.
    """
    make = partial(job_on, case=case)
    alone = ran(make, 1)
    for size in MOVES:
        moved = ran(make, size)
        assert equal(learned(moved), learned(alone)), size
        evaluations = [
            [record[2] for record in run.recording.records if record[0] != "step"]
            for run in (moved, alone)
        ]
        assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 6


def test_a_run_resumed_between_moves() -> None:
    """Fails if a checkpoint after a move has the states of virtual workers in another order."""
    alone = ran(job_on, 1)
    for size in MOVES:
        stopped = ran(job_on, size, stop_at=5)  # after two moves, within an epoch
        assert stopped.snapshot is not None and stopped.outcome is None
        for other in (1, 2, 3):
            resumed = ran(job_on, other, state=stopped.snapshot.state)
            assert equal(learned(resumed), learned(alone)), (size, other)


class Begun(StreamedSplit):
    """Counts how often reading began."""

    begun = 0

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        self.begun += 1
        return super().stream(batches, epoch)


@pytest.mark.parametrize("readers", [0, 2])
def test_what_is_read_ahead_is_read_again(readers: int) -> None:
    """Fails if a rank goes on with samples of virtual workers that have moved, skips some, or
    begins the epoch anew; or if a rank that keeps its own reads them again.
    """
    sampler = GlobalBatchSampler(40, 10, seed=5)
    moves = {0: [1, 3, 1], 2: [2, 2, 1]}
    shares = [VirtualShares(Shares(5), [2, 2, 1]) for _ in range(3)]
    splits = [Begun(Numbers(), readers, False, stay=True) for _ in range(3)]
    feeds = [Feed(split, sampler, own, 2, False) for split, own in zip(splits, shares, strict=True)]
    streams = [feed.epoch(0, 10, rank) for rank, feed in enumerate(feeds)]
    expected = list(sampler.global_batches(0))
    for number, steps in enumerate(zip(*streams, strict=True)):
        for rank, step in enumerate(steps):
            assert step.indices.tolist() == expected[number].tolist()
            assert {share for share, _ in step.passes} == set(shares[rank].of_rank(rank))
            for (share, part), loaded in zip(step.passes, step.batches, strict=True):
                cut = np.array_split(step.indices, 2)[part]
                assert loaded.batch[0].tolist() == shares[rank].of(cut, share).tolist()
        for own in shares:
            own.assign(moves.get(number, own.counts))
    assert number == 3
    assert [split.begun for split in splits] == [3, 3, 1]


def test_counts_must_add_up() -> None:
    """Fails if a virtual worker can get lost, or be computed twice."""
    shares = VirtualShares(Shares(5), [2, 2, 1])
    with pytest.raises(ValueError, match=r"\[2, 2, 2\] of 5 virtual workers"):
        shares.assign([2, 2, 2])
    assert shares.counts == [2, 2, 1]
