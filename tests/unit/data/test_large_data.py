"""A billion samples: memory and start do not depend on how many there are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.data import GlobalBatchSampler, PlacedShares, Shares, TensorSplit, VirtualShares
from hvdtrain.data.feeding import Feed, Loaded, stream
from hvdtrain.data.reading import StreamedSplit
from hvdtrain.data.sampler import Indices
from hvdtrain.data.transforms import AugmentedSplit
from tests.unit import commands
from tests.unit.readable import Numbers

BILLION = 10**9
MOST_KB = 10**6  # of memory, in a process with torch
MORE_KB = 10**5  # than the same run with few samples; one byte per sample would be ten times that
SLOWER = 20  # than the same run with few samples: leaves room for a busy machine
TASK = """
import os, torch, hvdtrain

class Computed:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def batch(self, indices, epoch=0):
        with open("read.txt", "a") as file:
            print(*indices, file=file)
        return torch.from_numpy(indices % 997 / 997).float()[:, None]

class Line(hvdtrain.Task):
    def build_data(self):
        return hvdtrain.Splits("computed", Computed(int(os.environ["SAMPLES"])), Computed(100))

    def build_model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, x):
        return hvdtrain.Sums((model(x) - x).square().sum(), len(x))
"""
MEASURED = f"""
import resource, sys, time
sys.path.insert(0, "")
started = time.monotonic()
try:
    exec({commands.CALL!r})
finally:
    seconds = time.monotonic() - started
    print("measured", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, seconds)
"""


def train(folder: Path, samples: int, *flags: str) -> tuple[int, float]:
    """Train the task on so many samples; return peak memory (kB) and seconds."""
    (folder / "mine.py").write_text(TASK)
    arguments = ["--task=mine:Line", "--global-batch-size=64", "--experiment=run", *flags]
    arguments += ["--eval-batch-size=100"]  # to tell them from those of training
    variables = {"SAMPLES": str(samples)}
    done = commands.run_code(MEASURED, folder, "train", *arguments, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    memory, seconds = done.stdout.rpartition("measured")[2].split()
    return int(memory), float(seconds)


def read(folder: Path) -> list[list[int]]:
    """Return the samples of the batches that the task was asked for."""
    lines = (folder / "read.txt").read_text().splitlines()
    return [[int(number) for number in line.split()] for line in lines]


def hash_of(folder: Path) -> str:
    return str(json.loads((folder / "runs/run/summary.json").read_text())["params_sha256"])


def test_a_billion_samples_start_as_a_few_do(tmp_path: Path) -> None:
    """Fails if any part of a run keeps something of every sample, or iterates over all of them."""
    few, many = tmp_path / "few", tmp_path / "many"
    few.mkdir()
    many.mkdir()
    few_kb, few_s = train(few, 10**4, "--max-steps=3")
    many_kb, many_s = train(many, BILLION, "--max-steps=3")
    assert many_kb < min(MOST_KB, few_kb + MORE_KB)
    assert many_s < SLOWER * few_s
    batches = [batch for batch in read(many) if len(batch) == 64]
    expected = GlobalBatchSampler(BILLION, 64, 0).samples_at(0, 0, 3 * 64)
    assert list(itertools.chain.from_iterable(batches)) == expected.tolist()


def test_a_resume_within_an_epoch_reads_on(tmp_path: Path) -> None:
    """Fails if a resumed run reads samples before its cursor, or ends with other parameters."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    train(whole, BILLION, "--max-steps=5", "--sched=constant")
    train(cut, BILLION, "--max-steps=2", "--sched=constant")
    (cut / "read.txt").unlink()
    train(cut, BILLION, "--max-steps=5", "--sched=constant", "--resume=auto")
    steps = [[batch for batch in read(it) if len(batch) == 64] for it in (whole, cut)]
    assert steps[1] == steps[0][2:]
    assert hash_of(cut) == hash_of(whole)


ORDERED = """
import torch, hvdtrain
from mine import Line

class Ordered(Line):
    def build_data(self):
        collate = lambda them: torch.tensor(them)[:, None] / 100
        split = hvdtrain.IterableSplit(range(100), 100, collate)
        return hvdtrain.Splits("ordered", split, split)
"""


def test_an_iterable_is_no_part_of_a_host(tmp_path: Path) -> None:
    """Fails if samples that come in order are merged with those of other hosts."""
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "ordered.py").write_text(ORDERED)
    flags = ["--task=ordered:Ordered", "--max-steps=1", "--global-batch-size=9"]
    shared = commands.run(tmp_path, "train", *flags)
    assert shared.returncode == 0, shared.stdout + shared.stderr
    done = commands.run(tmp_path, "train", *flags, "--data-placement=per-host")
    assert done.returncode == 2
    assert "--data-placement=per-host: samples that are read in order" in done.stderr


class Endless:
    """A split that reads so many batches ahead, and counts what it takes."""

    may_skip = False

    def __init__(self, samples: int, ahead: int) -> None:
        self.samples, self.ahead, self.taken = samples, ahead, 0

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        return torch.from_numpy(indices.copy())

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        queue: list[Indices] = []
        for indices in batches:
            self.taken += 1
            queue.append(indices)
            if len(queue) > self.ahead:
                yield self._load(queue.pop(0), epoch)
        yield from (self._load(indices, epoch) for indices in queue)

    def _load(self, indices: Indices, epoch: int) -> Loaded:
        return Loaded(self.batch(indices, epoch), len(indices))


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "shares",
    [
        Shares(3),
        Shares(3, [0, 1, 3]),
        VirtualShares(Shares(5), [2, 1, 2]),
        PlacedShares([BILLION - 50, 50], [0, 0, 1], [1, 1, 1]),
    ],
    ids=["equal", "weights", "virtual", "placed"],
)
def test_a_step_has_its_own_batches(shares: Any, micro_batches: int, ahead: int) -> None:
    """Fails if what is read ahead comes with another step, or more is planned than is read ahead:
    then this test would not end, or not within memory.
    """
    parts = [BILLION - 50, 50] if isinstance(shares, PlacedShares) else []
    sampler = GlobalBatchSampler(BILLION, 7, 3, parts)
    cursor = 4 * BILLION + BILLION // 2
    for rank in range(2):
        split = Endless(BILLION, ahead)
        feed = Feed(split, sampler, shares, micro_batches, everyone=False)
        for data in itertools.islice(feed.epoch(cursor, BILLION, rank), 9):
            expected = feed.step(data.indices, rank)
            loaded = list(data.batches)
            assert list(data.passes) == list(expected.passes)
            own = [
                shares.of(cut, share).tolist()
                for share in shares.of_rank(rank)
                for cut in np.array_split(data.indices, micro_batches)
            ]
            assert [it.batch.tolist() for it in loaded] == [part for part in own if part]
    start = cursor - 4 * BILLION
    first = next(feed.epoch(cursor, BILLION, 0)).indices
    np.testing.assert_array_equal(first, sampler.samples_at(4, start, start + 7))
    np.testing.assert_array_equal(
        next(feed.epoch(5 * BILLION - 2, BILLION, 0)).indices,
        sampler.samples_at(4, BILLION - 2, BILLION),
    )


@pytest.mark.parametrize("readers", [0, 2])
def test_readers_take_only_what_they_read_ahead(readers: int) -> None:
    """Fails if a split asks for all batches of an epoch when it starts."""
    taken = 0

    def batches() -> Iterator[Indices]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield np.array([number % 40])

    streamed = StreamedSplit(Numbers(), readers, False, stay=False)
    loaded = stream(streamed, batches(), 0)
    assert [int(next(loaded).batch[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert taken <= 5 + 2 * readers
    loaded.close()
    images = TensorSplit(torch.zeros(40, 1, 3, 3), torch.arange(40))
    augmented = stream(AugmentedSplit(images, 0, 0.5, 1), batches(), 0)
    assert [int(next(augmented).batch[1]) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shares", "samples"),
    [
        (Shares(4, [1, 0, 2, 5]), 1003),
        (VirtualShares(Shares(5), [2, 3]), 12),
        (PlacedShares([10, 0, 7], [0, 0, 1, 2, 2], [1, 2, 1, 3, 1]), 17),
        (Shares(6), 3),
    ],
)
def test_parts_of_all_samples_are_ranges(shares: Any, samples: int) -> None:
    """Fails if an evaluation leaves out, repeats or exchanges samples of ranks."""
    every = np.arange(samples)
    for share in range(len(shares.weights)):
        assert list(shares.of_all(samples, share)) == shares.of(every, share).tolist()
