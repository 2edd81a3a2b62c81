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
from hvdtrain.data.splits import check_split
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
# Those that do more than to order all samples, and the name of what does.
ORDERED: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "derived": (lambda: DataLoader(DATA, 8, sampler=Hard(DATA)), "Hard"),
    "weighted": (
        lambda: DataLoader(DATA, 8, sampler=data.WeightedRandomSampler(WEIGHTS, 40)),
        "WeightedRandomSampler",
    ),
    "subset": (
        lambda: DataLoader(DATA, 8, sampler=data.SubsetRandomSampler(range(4))),
        "SubsetRandomSampler",
    ),
    "replacement": (
        lambda: DataLoader(DATA, 8, sampler=data.RandomSampler(DATA, replacement=True)),
        "RandomSampler",
    ),
    "some": (
        lambda: DataLoader(DATA, 8, sampler=data.RandomSampler(DATA, num_samples=16)),
        "RandomSampler",
    ),
    "others": (
        lambda: DataLoader(DATA, 8, sampler=data.SequentialSampler(range(4))),
        "SequentialSampler",
    ),
    "numbers": (lambda: DataLoader(DATA, 8, sampler=[3, 4]), "list"),
    "batches": (lambda: batched(data.RandomSampler(DATA), Buckets), "Buckets"),
    "list of batches": (lambda: DataLoader(DATA, batch_sampler=[[3, 4]]), "list"),
    "batches of weighted": (
        lambda: batched(data.WeightedRandomSampler(WEIGHTS, 40)),
        "WeightedRandomSampler",
    ),
}
PARTS: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {  # of each rank
    "derived": (lambda: DataLoader(DATA, 8, sampler=Weighted(DATA, 1, 0)), "a Weighted"),
    "of others": (
        lambda: DataLoader(DATA, 8, sampler=data.DistributedSampler(range(4), 1, 0)),  # type: ignore[arg-type]
        "a DistributedSampler",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_loaders_that_order_all_samples_are_taken(name: str) -> None:
    """Fails if a usual DataLoader is refused, or its batch size is lost."""
    loader = TAKEN[name]()
    assert len(split_of(loader)) == 40
    assert split_of(loader).order is None
    assert batch_size_of(loader) == 8


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_a_sampler_is_taken_for_training_alone(name: str) -> None:
    """Fails if a sampler is ignored, silently, or samples are evaluated other than once each."""
    make, expected = ORDERED[name]
    split = split_of(make())
    assert split.order is not None and split.order.name == expected
    with pytest.raises(UsageError, match=f"--data=x: the DataLoader has a {expected}, but each"):
        check_split("--data", "x", "valid", split)
    check_split("--data", "x", "train", split)


@pytest.mark.parametrize("name", PARTS)
def test_samplers_of_parts_are_refused(name: str) -> None:
    """Fails if a sampler that gives each rank a part is taken for the order of all samples."""
    make, expected = PARTS[name]
    with pytest.raises(UsageError, match=f"has {expected}, which gives each rank a part"):
        split_of(make())


def test_an_iterable_in_a_loader_is_refused_for_what_it_is() -> None:
    """Fails if the sampler that torch gives to an iterable data set is blamed."""
    with pytest.raises(UsageError, match=r"Again cannot be read by number.*IterableSplit"):
        split_of(DataLoader(Again(), 4))
