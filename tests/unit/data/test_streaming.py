"""Reading ahead in other processes: the right batches, and an end where something goes wrong."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import hvdtrain
from hvdtrain.data import ReadOptions, load_dataset
from hvdtrain.data.feeding import stream
from hvdtrain.data.reading import StreamedSplit
from hvdtrain.errors import TrainingError, UsageError
from tests.unit import readable
from tests.unit.readable import Numbers, Squares

ROOT = Path(hvdtrain.__file__).parents[1]
GONE_S = 60.0  # readers have so long to end once the training process is gone
BATCHES = [np.array(numbers, dtype=np.int64) for numbers in ([5, 3, 9], [], [0], [39, 38, 1, 2])]

# A training process with two readers, which prints their numbers and waits to be killed.
TRAINER = """
import sys, time
import numpy as np
from hvdtrain.data.reading import StreamedSplit
from tests.unit.readable import Numbers

if __name__ == "__main__":
    split = StreamedSplit(Numbers(), 2, False, stay=True)
    batches = split.stream([np.array([i]) for i in range(40)], 0)
    print(*{int(next(batches).batch[1]) for _ in range(6)}, flush=True)
    time.sleep(60)
"""


def read(split: StreamedSplit, epoch: int = 0) -> list[list[int]]:
    return [loaded.batch[0].tolist() for loaded in split.stream(BATCHES, epoch)]


@pytest.mark.parametrize("readers", [0, 2])
def test_reading_leaves_the_random_numbers_of_the_run(readers: int) -> None:
    """Fails if a start to read draws a random number: a run that is resumed within an epoch starts
    once more. Or if readers have the same random numbers in two epochs.
    """
    split = StreamedSplit(Numbers(), readers, False, stay=False)
    torch.manual_seed(3)
    before, seeds = torch.get_rng_state(), set()
    for epoch in range(2):
        read(split, epoch)
        seeds.add(split._generator.initial_seed())
    assert torch.equal(torch.get_rng_state(), before)
    assert len(seeds) == 2


@pytest.mark.parametrize("readers", [0, 1, 2])
def test_batches_come_in_order_epoch_after_epoch(readers: int) -> None:
    """Fails when batches are mixed up, an empty one is lost, or one of an abandoned epoch comes."""
    split = StreamedSplit(Numbers(), readers, False, stay=True)
    everyone: set[int] = set()
    for epoch in range(3):
        expected = [[1000 * epoch + int(index) for index in batch] for batch in BATCHES]
        assert read(split, epoch) == expected
        begun = split.stream([np.array([index]) for index in range(40)], epoch)
        started = [next(begun).batch for _ in range(3)]
        assert [numbers.tolist() for numbers, _ in started] == [
            [1000 * epoch + i] for i in (0, 1, 2)
        ]
        everyone |= {int(process) for _, process in started}
        begun.close()  # half-way
        assert list(split.stream([], epoch)) == []
    assert len(everyone) == max(readers, 1)  # over all epochs: the processes stay
    assert (os.getpid() in everyone) == (readers == 0)
    assert split.batch(np.array([7, 4]), 2)[0].tolist() == [2007, 2004]


@pytest.mark.parametrize("readers", [0, 1])
def test_bad_samples_end_training_or_are_counted(readers: int) -> None:
    """Fails when a bad sample is not named in one line, or its batch is miscounted."""
    with pytest.raises(TrainingError, match=r"^sample 9 is bad$"):
        read(StreamedSplit(Numbers(bad=(9,)), readers, False, stay=False))
    split = StreamedSplit(Numbers(bad=(9, 0)), readers, True, stay=False)
    loaded = list(split.stream(BATCHES, 1))
    assert [(one.samples, one.bad) for one in loaded] == [(2, 1), (0, 0), (0, 1), (4, 0)]
    assert loaded[0].batch[0].tolist() == [1005, 1003]


@pytest.mark.parametrize("readers", [0, 1])
def test_a_mistake_in_reading_is_raised(readers: int) -> None:
    """Fails when a reader's surprise is swallowed, or training waits for its batch for ever."""
    split = StreamedSplit(Numbers(raises_at=9), readers, True, stay=True)
    with pytest.raises(LookupError, match="a reader's own mistake"):
        read(split)


def test_a_killed_reader_ends_training() -> None:
    """Fails when training waits for ever for what a killed process was to read."""
    split = StreamedSplit(Numbers(pause_s=0.05), 2, False, stay=True)
    batches = split.stream([np.array([index]) for index in range(40)], 0)
    os.kill(int(next(batches).batch[1]), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(TrainingError, match="a process that reads data ahead has ended: "):
        list(batches)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError("reset by peer")])
def test_a_reader_killed_while_it_hands_over_ends_training(error: Exception, monkeypatch) -> None:
    """Fails when the moment at which a process is killed makes its end a surprise."""

    def broken() -> Iterator[Any]:
        raise error
        yield

    split = StreamedSplit(Numbers(), 1, False, stay=True)
    monkeypatch.setattr(split, "_make_loader", broken)
    with pytest.raises(TrainingError, match="a process that reads data ahead has ended: "):
        read(split)


def test_readers_end_with_a_killed_trainer() -> None:
    """Fails when processes are left behind by a training process that was killed outright."""
    command = [sys.executable, "-c", TRAINER]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        readers = [psutil.Process(int(number)) for number in trainer.stdout.readline().split()]
        family = psutil.Process(trainer.pid).children(recursive=True)
        trainer.kill()
    _, left = psutil.wait_procs([*readers, *family], timeout=GONE_S)
    for process in left:
        process.kill()
    assert len(readers) == 2 and not left, f"left behind: {left}"


def load(name: str, **options):
    return load_dataset(name, Path(), 0, torch.float64, ReadOptions(**options))


def test_a_torch_data_set_is_read_by_other_processes() -> None:
    """Fails when samples, classes, shape or type of a user's torch data set are different."""
    data = load("tests.unit.readable:squares", readers=1)
    assert (data.shape, data.classes, data.class_names) == ((2, 4, 4), 3, ("a", "b", "c"))
    assert (len(data.train), len(data.valid)) == (30, 6)
    loaded = list(stream(data.train, [np.array([4, 29]), np.array([], dtype=np.int64)], 0))
    inputs, labels = loaded[0].batch
    assert inputs.dtype == torch.float64 and inputs[:, 0, 0, 0].tolist() == [4, 29]
    assert labels.tolist() == [1, 2] and labels.dtype == torch.int64
    assert loaded[1].batch[0].shape == (0, 2, 4, 4)
    assert data.valid.batch(np.array([5]))[1].tolist() == [2]


@pytest.mark.parametrize(
    ("spoilt", "expected"),
    [
        ({"raises": 2}, "OSError: sample 2 is lost"),
        ({"image": torch.zeros(2, 4, 5)}, r"shape \[2, 4, 5\], where others have \[2, 4, 4\]"),
        ({"image": torch.zeros(2, 4, 4).long()}, "expected a floating-point tensor, not torch."),
        ({"image": "picture"}, "expected a floating-point tensor, not <class 'str'>"),
        ({"image": torch.full((2, 4, 4), torch.nan)}, "pixels are not all finite"),
        ({"label": 3}, "class 3: out of range for 3 classes"),
        ({"label": -1}, "class -1: out of range for 3 classes"),
        ({"label": "cat"}, "class 'cat': expected a whole number"),
        ({"label": 1.5}, "class 1.5: expected a whole number"),
    ],
)
def test_bad_samples_of_torch_data_sets_are_named(spoilt, expected: str, monkeypatch) -> None:
    """Fails when a sample that does not fit the others is trained on, or not named."""
    monkeypatch.setattr(readable, "squares", lambda: (Squares(9, **spoilt), Squares(3)))
    name = "tests.unit.readable:squares"
    with pytest.raises(TrainingError, match=f"--data={name}: sample 2: .*{expected}"):
        list(stream(load(name).train, [np.array([0, 2])], 0))


def no_names() -> Squares:
    nameless = Squares(3)
    del nameless.classes
    return nameless


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((Squares(0), Squares(3)), "has no samples"),
        ((Squares(3), Squares(0)), "has no samples"),
        ((Squares(3), itertools.count()), "map-style"),
        ((Squares(3, raises=0), Squares(3)), "OSError: sample 0 is lost"),
        ((no_names(), Squares(3)), "no `classes`"),
        (([(torch.zeros(3), 1)], Squares(3)), "no `classes`"),
        ((Squares(3), Squares(3), Squares(3)), "returned tuple"),
    ],
)
def test_wrong_torch_data_sets_are_refused(made, expected: str, monkeypatch) -> None:
    """Fails when what a plug-in returned goes further than a message that names it."""
    monkeypatch.setattr(readable, "squares", lambda: made)
    with pytest.raises(UsageError, match=f"--data=tests.unit.readable:squares: .*{expected}"):
        load("tests.unit.readable:squares")
