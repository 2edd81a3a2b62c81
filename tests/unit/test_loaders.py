"""What of a DataLoader is taken, and which of them are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader

from hvdtrain import split_of
from hvdtrain.data.adapters import batch_size_of
from hvdtrain.errors import UsageError

DATA = data.TensorDataset(torch.arange(40.0))
WEIGHTS = [1.0] * 40


class Hard(data.RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1] * 20)


class Weighted(data.DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1] * 20)


class Buckets(data.BatchSampler):
    pass


class Again(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def batched(sampler: Any, kind: type[data.BatchSampler] = data.BatchSampler) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=kind(sampler, 8, False))


TAKEN: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(DATA, 8),
    "shuffled": lambda: DataLoader(DATA, 8, shuffle=True),
    "distributed": lambda: DataLoader(DATA, 8, sampler=data.DistributedSampler(DATA, 2, 1)),
    "all at random": lambda: DataLoader(DATA, 8, sampler=data.RandomSampler(DATA, num_samples=40)),
    "batches": lambda: batched(data.RandomSampler(DATA)),
    "batches in order": lambda: batched(data.SequentialSampler(DATA)),
}
REFUSED: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "derived": (lambda: DataLoader(DATA, 8, sampler=Hard(DATA)), "a Hard"),
    "derived, distributed": (
        lambda: DataLoader(DATA, 8, sampler=Weighted(DATA, 1, 0)),
        "a Weighted",
    ),
    "weighted": (
        lambda: DataLoader(DATA, 8, sampler=data.WeightedRandomSampler(WEIGHTS, 40)),
        "a WeightedRandomSampler",
    ),
    "subset": (
        lambda: DataLoader(DATA, 8, sampler=data.SubsetRandomSampler(range(4))),
        "a SubsetRandomSampler",
    ),
    "replacement": (
        lambda: DataLoader(DATA, 8, sampler=data.RandomSampler(DATA, replacement=True)),
        "a RandomSampler that does not take each sample once",
    ),
    "some": (
        lambda: DataLoader(DATA, 8, sampler=data.RandomSampler(DATA, num_samples=16)),
        "a RandomSampler that does not take each sample once",
    ),
    "others": (
        lambda: DataLoader(DATA, 8, sampler=data.SequentialSampler(range(4))),
        "a SequentialSampler that does not take each sample once",
    ),
    "others, distributed": (
        lambda: DataLoader(DATA, 8, sampler=data.DistributedSampler(range(4), 1, 0)),  # type: ignore[arg-type]
        "a DistributedSampler that does not take each sample once",
    ),
    "numbers": (lambda: DataLoader(DATA, 8, sampler=[3, 4]), "a list"),
    "batches": (lambda: batched(data.RandomSampler(DATA), Buckets), "batches by Buckets"),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[3, 4]]), "batches by list"),
    "batches of weighted": (
        lambda: batched(data.WeightedRandomSampler(WEIGHTS, 40)),
        "a WeightedRandomSampler",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_loaders_that_order_all_samples_are_taken(name: str) -> None:
    """Fails if a usual DataLoader is refused, or its batch size is lost."""
    loader = TAKEN[name]()
    assert len(split_of(loader)) == 40
    assert batch_size_of(loader) == 8


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_whose_order_would_be_lost_are_refused(name: str) -> None:
    """Fails if a sampler that takes other samples than each once is ignored, silently."""
    make, found = REFUSED[name]
    with pytest.raises(UsageError, match=f"the DataLoader has {found}, but the order"):
        split_of(make())


def test_an_iterable_in_a_loader_is_refused_for_what_it_is() -> None:
    """Fails if the sampler that torch gives to an iterable data set is blamed."""
    with pytest.raises(UsageError, match=r"Again cannot be read by number.*IterableSplit"):
        split_of(DataLoader(Again(), 4))
