"""Splits made of data sets and loaders of others: the same samples and random numbers anywhere."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import hvdtrain
from hvdtrain import IterableSplit, MapSplit, split_of
from hvdtrain.data import GlobalBatchSampler, Shares, TensorSplit, VirtualShares
from hvdtrain.data.feeding import Feed, PartSplit, stream
from hvdtrain.data.splits import difference, fingerprint
from hvdtrain.errors import TrainingError, UsageError
from tests.unit.readable import (
    Begun,
    Changed,
    Counting,
    Flow,
    Noisy,
    Opened,
    begin,
    joined,
    open_file,
)

BATCHES = [np.array(numbers, dtype=np.int64) for numbers in ([5, 3, 9], [0], [39, 38, 1, 2])]


def rows(batch: Any) -> list[list[float]]:
    """Return the samples of a batch of `Noisy`, whichever way it was collated."""
    x = batch["x"] if "word" in batch else batch["x"].T
    return x.tolist()


def by_number(split: Any, batches: Any = BATCHES, epoch: int = 0) -> dict[int, list[float]]:
    loaded = list(stream(split, batches, epoch))
    assert [it.samples for it in loaded] == [len(batch) for batch in batches]
    found = [row for it in loaded for row in rows(it.batch)]
    assert [row[0] for row in found] == np.concatenate(batches).tolist()
    return {int(row[0]): row[1:] for row in found}


MAKERS: dict[str, Callable[[int], Any]] = {
    "split": lambda readers: MapSplit(Noisy(), readers=readers),
    "own collate": lambda readers: MapSplit(Noisy(), joined, readers),
    "loader": lambda readers: split_of(DataLoader(Noisy(), batch_size=7, num_workers=readers)),
    "shuffled loader": lambda readers: split_of(
        DataLoader(Noisy(), 3, shuffle=True, collate_fn=joined, num_workers=readers)
    ),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_random_numbers_are_those_of_the_sample(name: str) -> None:
    """Fails if they depend on processes, batches or earlier samples, are those of another epoch or
    number, or if reading changes the random numbers of the run.
    """
    torch.manual_seed(1)
    generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    here = MAKERS[name](0)
    expected = by_number(here)
    assert len({number for row in expected.values() for number in row}) == 3 * 8
    again = [np.array([number]) for number in sorted(expected)]
    assert by_number(here, again) == expected
    assert by_number(here, epoch=1) != expected
    elsewhere = MAKERS[name](2)
    assert by_number(elsewhere, epoch=1) == by_number(here, epoch=1)
    assert by_number(elsewhere) == expected
    texts = [[str(it.batch) for it in stream(one, BATCHES, 2)] for one in (here, elsewhere)]
    assert texts[0] == texts[1]  # with what collate has drawn
    assert rows(here.batch(np.array([9, 5]), 0)) == [[9, *expected[9]], [5, *expected[5]]]
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(after[0], generators[0]) and after[1:] == generators[1:]


def test_seeds_give_other_augmentation() -> None:
    """Fails if the seed of a run has no effect on random augmentation."""
    made = [MapSplit(Noisy(), seed=1), split_of(Noisy(), seed=2), split_of(DataLoader(Noisy()), 3)]
    assert len({str(by_number(split)) for split in made}) == 3


def test_a_loader_begins_its_own_processes() -> None:
    """Fails if `worker_init_fn` of a loader is not called in the processes that read."""
    split = split_of(DataLoader(Begun(), num_workers=2, worker_init_fn=begin))
    loaded = list(stream(split, [np.array([0])] * 4, 0))
    assert {int(it.batch) for it in loaded} == {0, 1}


def test_processes_know_their_data_set() -> None:
    """Fails if `get_worker_info().dataset` is not the data set that is read, as in torch."""
    split = split_of(DataLoader(Opened(), 4, num_workers=2, worker_init_fn=open_file))
    assert [it.batch.tolist() for it in stream(split, EIGHT, 0)] == [[10] * 4, [11] * 4]


EIGHT = [np.arange(4), np.arange(4, 8)]


def values_of(split: Any, epoch: int) -> list[float]:
    """Return what all samples of an epoch have in common."""
    columns = zip(*(loaded.batch for loaded in stream(split, EIGHT, epoch)), strict=True)
    found = [set(torch.cat(column).tolist()) for column in columns]
    return [it.pop() if len(it) == 1 else math.nan for it in found]


@pytest.mark.parametrize("readers", [0, 1])
def test_a_data_set_that_is_changed_between_epochs(readers: int) -> None:
    """Fails if an epoch is read from the data set as it was in an earlier one, or processes begin
    anew although nothing has changed.
    """
    data = Changed()
    split = split_of(DataLoader(data, 4, num_workers=readers))
    found = [values_of(split, 0)]
    for epoch, change in enumerate(
        (
            lambda: None,
            lambda: setattr(data, "level", 2),
            lambda: data.values.add_(1),
            lambda: data.array.__setitem__(0, 4),
            lambda: None,
        ),
        start=1,
    ):
        change()
        found.append(values_of(split, epoch))
    seen = [(level, total) for level, total, _ in found]
    assert seen == [(0, 0), (0, 0), (2, 0), (2, 3), (2, 7), (2, 7)]
    processes = [process for *_, process in found]
    assert processes[0] == processes[1] and processes[4] == processes[5]
    assert len({*processes}) == (4 if readers else 1)


def test_persistent_processes_keep_their_data_set() -> None:
    """Fails if processes of a DataLoader with `persistent_workers` begin anew."""
    data = Changed()
    split = split_of(DataLoader(data, 4, num_workers=1, persistent_workers=True))
    first = values_of(split, 0)
    data.level = 1
    assert values_of(split, 1) == first


@pytest.mark.parametrize("readers", [0, 1])
def test_set_epoch_is_called_once_an_epoch(readers: int) -> None:
    """Fails if `set_epoch` is called for each sample or batch, or not in the training process, or
    if it makes processes begin anew; or if another split over the same data set, as for validation,
    leaves its epoch behind.
    """
    data = Counting()
    split = split_of(DataLoader(data, 4, num_workers=readers))
    for epoch in range(3):
        assert values_of(split, epoch) == [epoch, epoch + 1]
        assert (data.epoch, data.calls) == (epoch, epoch + 1)
    if readers:
        return
    batches = stream(split, EIGHT, 3)
    first = next(batches)
    assert values_of(split_of(data), 0)[0] == 0
    assert [it[0].tolist() for it in (first.batch, next(batches).batch)] == [[3] * 4] * 2


def test_splits_are_taken_as_they_are() -> None:
    """Fails if a split is wrapped, and loses how it reads ahead."""
    split = MapSplit(Noisy())
    assert split_of(split) is split
    assert isinstance(split_of([1, 2, 3]), MapSplit)
    assert split_of([4, 5, 6]).batch(np.array([2, 0])).tolist() == [6, 4]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: split_of(Flow()), "Flow cannot be read by number .*IterableSplit"),
        (lambda: split_of(DataLoader(Flow())), "Flow cannot be read by number .*IterableSplit"),
        (lambda: MapSplit(itertools.count()), "count cannot be read by number"),
        (lambda: MapSplit(type("Any", (), {"__getitem__": None.__eq__})()), "Any has no __len__"),
        (lambda: split_of(DataLoader(Noisy(), batch_size=None)), "returns batches"),
        (lambda: MapSplit(Noisy(), lambda it: it, readers=1), "readers=0, num_workers=0"),
        (lambda: IterableSplit(Flow(), 0), "length=0: must be at least 1"),
        (lambda: IterableSplit(iter([1, 2]), 2), "list_iterator can be iterated only once"),
    ],
)
def test_what_cannot_be_a_split_is_refused(make: Callable[[], Any], expected: str) -> None:
    """Fails if it goes further than a message that names it."""
    with pytest.raises(UsageError, match=f"hvdtrain.*{expected}"):
        make()


@pytest.mark.parametrize("readers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(readers: int) -> None:
    """Fails if the number of the sample, or the reason, is lost."""
    split = MapSplit(Noisy(lost=9), readers=readers)
    with pytest.raises(TrainingError, match=r"^sample 9 of Noisy: OSError: it is lost$"):
        list(stream(split, BATCHES, 0))


def test_a_sample_that_is_none_is_named() -> None:
    """Fails if only the type is reported, which does not tell which of a million samples it is; or
    if a `collate_fn` that leaves such samples out is not taken.
    """
    samples: Any = [torch.ones(2) if number != 4 else None for number in range(6)]
    batches = [np.array([3, 4, 5])]
    with pytest.raises(TrainingError, match="sample 4 of list is None, of which no batch can be"):
        list(stream(MapSplit(samples), batches, 0))

    def without_none(found: list[Any]) -> torch.Tensor:
        return torch.stack([it for it in found if it is not None])

    (loaded,) = stream(MapSplit(samples, without_none), batches, 0)
    assert len(loaded.batch) == 2


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable", "tensors", "part"])
def test_a_sample_stands_in_for_a_share_without_any(kind: str, readers: int) -> None:
    """Fails if a rank without samples has nothing to give a model whose layers are synchronised, or
    if the sample counts; if random numbers of the run are drawn for it; or if one is read that this
    host has not.
    """
    data = [(torch.tensor([float(number)]), number) for number in range(8)]
    split: Any = MapSplit(data, readers=readers)
    if kind == "iterable":
        split = IterableSplit(data, 8)
    elif kind == "tensors":
        split = TensorSplit(torch.arange(8.0)[:, None], torch.arange(8))
    elif kind == "part":
        split = PartSplit(split, 100, 200)
    first = 100 if kind == "part" else 0
    feed = Feed(split, GlobalBatchSampler(8, 3, 0), Shares(3, (1, 0, 1)), 1, everyone=True)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for samples in ([0, 1, 2], [3], [4, 5]):
        step = feed.step(np.array(samples) + first, 1)
        (loaded,) = step.batches
        assert (loaded.samples, loaded.bad, list(step.passes)) == (0, 0, [(1, 0)])
        assert loaded.batch[0].shape == (1, 1) and len(loaded.batch[1]) == 1
    assert torch.equal(torch.get_rng_state(), before)


SHARES = {
    "1": Shares(1),
    "2": Shares(2),
    "3": Shares(3, [1, 0, 2]),
    "virtual": VirtualShares(Shares(5), [2, 2, 1]),
    "alone": VirtualShares(Shares(5), [5]),
}


def steps_of(split: Any, shares: Any, cursor: int, micro_batches: int) -> Iterator[list[Any]]:
    """Yield the samples of each step over all ranks, sorted."""
    ranks = 3 if len(shares.weights) in (3, 5) else len(shares.weights)
    ranks = 1 if shares is SHARES["alone"] else ranks
    sampler = GlobalBatchSampler(len(split), 11, 5, shuffle=not getattr(split, "in_order", False))
    feeds = [Feed(split, sampler, shares, micro_batches, False) for _ in range(ranks)]
    all_ranks = [feed.epoch(cursor, 10, rank) for rank, feed in enumerate(feeds)]
    for steps in zip(*all_ranks, strict=True):
        pairs = [zip(step.passes, step.batches, strict=True) for step in steps]
        loaded = list(itertools.chain.from_iterable(pairs))
        assert sum(it.samples for _, it in loaded) == steps[0].samples
        for (share, number), it in loaded:
            cut = np.array_split(steps[0].indices, micro_batches)[number]
            assert [row[0] for row in rows(it.batch)] == shares.of(cut, share).tolist()
        yield sorted(row for _, it in loaded for row in rows(it.batch))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make", [lambda: MapSplit(Noisy()), lambda: IterableSplit(Flow(), 40)])
def test_ranks_read_what_one_would(make: Callable[[], Any], micro_batches: int) -> None:
    """Fails if samples, or their random numbers, depend on the number of ranks, or on where in an
    epoch a run was resumed.
    """
    expected = list(steps_of(make(), SHARES["1"], 40, 1))
    assert [len(step) for step in expected] == [11, 11, 11, 7]
    for shares in SHARES.values():
        assert list(steps_of(make(), shares, 40, micro_batches)) == expected
        assert list(steps_of(make(), shares, 40 + 22, micro_batches)) == expected[2:]


def test_an_iterable_comes_in_its_order() -> None:
    """Fails if samples are shuffled, epochs are alike, or an epoch goes on where one ended."""
    flow = Flow(50)
    split = IterableSplit(flow, 40)
    epochs = [list(itertools.chain(*steps_of(split, SHARES["1"], 40 * it, 1))) for it in (0, 1)]
    assert [row[0] for row in epochs[0]] == [row[0] for row in epochs[1]] == list(range(40))
    assert all(one != other for one, other in zip(*epochs, strict=True))
    assert flow.started == 2
    found = split.batch(np.array([7, 3, 7]))
    assert rows(found) == [epochs[0][it] for it in (7, 3, 7)]


def test_an_iterable_that_ends_early_is_named() -> None:
    """Fails if training goes on with fewer samples than were stated."""
    split = IterableSplit(Flow(30), 40)
    with pytest.raises(TrainingError, match="Flow ended after 30 samples; its stated length is 40"):
        list(steps_of(split, SHARES["1"], 0, 1))
    with pytest.raises(ValueError, match="sample 3 after 5"):
        list(split.stream([np.array([5]), np.array([3])], 0))


class Passes(Flow):
    """A data set whose samples are numbered on in each pass."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        first = self.epoch * len(self.samples)
        for sample in super().__iter__():
            sample["x"][0] += first
            yield sample


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_iterable_without_a_length_begins_anew(micro_batches: int) -> None:
    """Fails if samples depend on the number of ranks, or on where a run was resumed; if the batch
    in which the data end is cut; or if a pass has the number of another.
    """
    split = IterableSplit(Passes(40))
    expected = list(steps_of(split, SHARES["1"], 0, 1))
    numbers = [[row[0] for row in step] for step in expected]
    assert numbers == np.arange(110).reshape(10, 11).tolist()
    assert len({row[1] for step in expected for row in step}) == 110  # of random numbers
    for shares in SHARES.values():
        assert list(steps_of(split, shares, 0, micro_batches)) == expected
        assert list(steps_of(split, shares, 55, micro_batches))[:5] == expected[5:]
    assert rows(split.batch(np.array([3, 41]))) == [expected[0][3], expected[3][8]]


def test_an_iterable_without_a_length_that_is_empty_is_named() -> None:
    """Fails if the next pass over a data set without samples is begun for ever."""
    with pytest.raises(TrainingError, match=r"Flow ended after 0 samples$"):
        next(IterableSplit(Flow(0)).stream([np.array([0])], 0))


class Digested(Noisy):
    """A data set with a fingerprint of its own."""

    def fingerprint(self) -> str:
        return f"noisy {self.count}"


@pytest.mark.parametrize(
    ("dataset", "texts"),
    [
        (Noisy(), 0),
        (Digested(), 1),
        (Subset(Noisy(), range(3)), 0),
        (ConcatDataset([Noisy(), Noisy()]), 0),
        (TensorDataset(torch.zeros(4)), 0),
        (range(10**9), 0),
    ],
)
def test_fingerprints_of_data_sets(dataset: Any, texts: int) -> None:
    """Fails if what identifies a data set is lost, or one without it is read."""
    found = fingerprint(split_of(dataset))
    assert (found["samples"], found["texts"]) == (len(dataset), texts)
    assert difference(found, fingerprint(MapSplit(dataset)), None) is None


def test_names_are_public() -> None:
    """Fails if a name of the documents cannot be imported."""
    assert {"MapSplit", "IterableSplit", "split_of"} <= {*hvdtrain.__all__}
    assert Path(hvdtrain.MapSplit.__init__.__code__.co_filename).name == "adapters.py"
