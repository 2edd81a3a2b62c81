"""Random numbers of samples: those of the sample wherever something draws, and free elsewhere."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hvdtrain import MapSplit, split_of
from hvdtrain.data import drawing, map_samples
from hvdtrain.data.feeding import stream
from hvdtrain.errors import TrainingError

SEED, EPOCH = 3, 1
DRAWERS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
    "numpy": np.random.random,
    "numpy normal": np.random.standard_normal,  # every other one is kept back
    "random": random.random,
    "random normal": lambda: random.gauss(0, 1),
    "reseeded": lambda: torch.manual_seed(5).initial_seed() / 8,
}


class Late(Dataset[Any]):
    """Sample i is (i, a random number from number `start` on, before that 0)."""

    def __init__(self, draw: Callable[[], float], start: int = 20, lost: int = -1) -> None:
        self.draw, self.start, self.lost = draw, start, lost
        self.calls: list[list[int]] = []  # of __getitems__

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.lost:
            raise OSError("it is lost")
        drawn = self.draw() if index >= self.start else 0.0
        return torch.tensor([index, drawn], dtype=torch.float64)

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        self.calls.append(numbers)
        return [self[number] for number in numbers]


def batches_of(size: int, samples: int = 40) -> list[Any]:
    return [np.arange(start, min(start + size, samples)) for start in range(0, samples, size)]


def read(split: Any, size: int) -> list[list[float]]:
    return [row for it in stream(split, batches_of(size), EPOCH) for row in it.batch.tolist()]


def generators() -> list[Any]:
    numpy = np.random.get_state()
    return [torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2:], random.getstate()]


@pytest.fixture(params=[False, True], ids=["plain", "kept back"])
def of_the_run(request: pytest.FixtureRequest) -> list[Any]:
    """Return the generators of a run, some of which keep a normal number back."""
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    if request.param:
        _ = torch.randn(()), np.random.standard_normal(), random.gauss(0, 1)
    return generators()


@pytest.mark.parametrize("name", list(DRAWERS))
@pytest.mark.parametrize("size", [1, 7, 25])
def test_what_begins_to_draw_late_has_the_numbers_of_each_sample(
    name: str, size: int, of_the_run: list[Any]
) -> None:
    """Fails if a sample that draws after others did not is read with the numbers of the run, or of
    the batch; or if reading changes those of the run, also a normal number that was kept back.
    """
    data = Late(DRAWERS[name])
    expected = []
    for number in range(len(data)):
        with drawing.drawing(SEED, EPOCH, number):
            expected.append(data[number].tolist())
    assert read(MapSplit(data, seed=SEED), size) == expected
    assert generators() == of_the_run


@pytest.mark.parametrize("name", list(DRAWERS))
def test_a_collate_that_begins_to_draw_late(name: str, of_the_run: list[Any]) -> None:
    """Fails if a batch has other numbers than those of its first sample, or gets samples that its
    collate function has changed in an attempt before.
    """

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        first = int(samples[0][0])
        assert len(samples) == 10
        del samples[:2]
        drawn = DRAWERS[name]() if first >= 20 else 0.0
        return torch.tensor([[first, drawn]], dtype=torch.float64)

    expected = []
    for first in range(0, 40, 10):
        with drawing.drawing(SEED, EPOCH, first, drawing.OF_BATCH):
            expected.append(collate([torch.tensor([first])] * 10).tolist()[0])
    split = MapSplit(Late(lambda: 0.0), collate, seed=SEED)
    assert read(split, 10) == expected
    assert generators() == of_the_run


def test_a_data_set_that_draws_nothing_is_read_as_torch_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if samples that need no random numbers are read one by one, or generators are seeded
    for each, which takes longer than the reading itself.
    """
    seeded: list[int] = []

    def seed_for(seed: int, epoch: int, index: int, purpose: int = 0) -> None:
        seeded.append(index)

    monkeypatch.setattr(map_samples, "seed_for", seed_for)
    data = Late(lambda: 0.0)
    for dataset in (data, Subset(data, range(40))):
        data.calls.clear()
        seeded.clear()
        assert [row[0] for row in read(MapSplit(dataset), 10)] == list(range(40))
        assert data.calls[10:] == [list(it) for it in batches_of(10)[1:]]
        assert seeded == [*range(10), 0]  # in the first batch, which is watched


def test_a_collate_that_draws_leaves_samples_together() -> None:
    """Fails if a collate function that draws, as for masks of words, slows down reading too."""
    data = Late(lambda: 0.0)
    split = MapSplit(data, lambda samples: torch.stack(samples) + 0 * torch.rand(()))
    read(split, 10)
    assert data.calls[10:] == [list(it) for it in batches_of(10)[1:]]


def test_the_seed_of_the_run_cannot_be_read() -> None:
    """Fails if a data set that derives numbers from torch's seed, without drawing, has others on
    another rank, whose seed differs.
    """
    found = []
    for run_seed in (1, 2):
        torch.manual_seed(run_seed)
        found.append(read(MapSplit(Late(lambda: torch.initial_seed() % 1000, 0), seed=SEED), 10))
    assert found[0] == found[1]


class Whole(TensorDataset):
    """A data set that returns batches."""

    def __getitems__(self, numbers: list[int]) -> Any:
        return tuple(it[numbers] + 0 * torch.rand(()) for it in self.tensors)


def test_a_data_set_that_returns_batches_works_as_in_torch() -> None:
    """Fails if what `__getitems__` returns does not reach the collate function as it is."""
    data = Whole(torch.arange(40.0), torch.ones(40, 2))
    loader = DataLoader(data, 7, collate_fn=lambda batch: batch)
    before = torch.get_rng_state()
    ours = list(stream(split_of(loader), batches_of(7), EPOCH))
    assert before.equal(torch.get_rng_state())
    for one, (x, y) in zip(ours, loader, strict=True):
        assert one.batch[0].equal(x) and one.batch[1].equal(y)


def test_a_sample_that_is_lost_late_is_named() -> None:
    """Fails if the number of a sample is lost where a batch is read together."""
    with pytest.raises(TrainingError, match=r"^sample 33 of Late: OSError: it is lost$"):
        read(MapSplit(Late(lambda: 0.0, lost=33)), 10)


def test_a_replaced_generator_of_numpy() -> None:
    """Fails if a draw goes unseen, or is not taken back, where NumPy's global generator has been
    replaced.
    """
    before = np.random.mtrand.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(4))
    try:
        with drawing.kept():
            mark = drawing.marks()
            assert drawing.marks() == mark
            np.random.random(624)
            assert drawing.marks() != mark
        state = np.random.get_state()
        with drawing.drawing(1, 2, 3):
            np.random.random()
        assert np.array_equal(np.random.get_state()[1], state[1])
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_memory_of_a_generator_is_its_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the quick way to read a generator is not used here, or reads something else than the
    state; or if the slow way, without it, misses a draw.
    """
    watched, draw, get_state = {
        "numpy": (drawing._numpy, np.random.random, np.random.get_state),
        "python": (drawing._python, random.random, random.getstate),
    }[name]
    assert getattr(drawing, f"_{name}_layout_is_known")()
    np.random.seed(4)
    random.seed(4)
    for _ in range(700):  # more than a turn of the generator
        quick = [watched.get() for _ in range(2)]  # the second from memory alone
        assert all(pickle.dumps(state) == pickle.dumps(get_state()) for state in quick)
        mark = watched.mark()
        draw()
        assert watched.mark() != mark
    monkeypatch.setattr(drawing, f"_{name}_layout_is_known", lambda: False)
    mark = watched.mark()
    assert watched.mark() == mark
    draw()
    assert watched.mark() != mark
