"""Splits made of a torch DataLoader, of any data set that is read by number, or of an iterable.

What has `__len__` and `__getitem__` serves: data sets of torch, `datasets.Dataset` of Hugging Face,
`litdata.StreamingDataset` (shards on disk). Reading a sample draws its random numbers from seed,
epoch and number (`hvdtrain.data.drawing`).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.drawing import OF_BATCH, OF_EPOCH, kept, seed_for
from hvdtrain.data.feeding import Loaded
from hvdtrain.data.loader_order import LoaderOrder, order_of
from hvdtrain.data.map_samples import (
    Collate,
    MapSamples,
    begin_epoch,
    fingerprint_of,
)
from hvdtrain.data.reading import BeginReader, StreamedSplit, digest_of
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Split
from hvdtrain.errors import TrainingError, UsageError, first_problem

ENDLESS = 1 << 52  # samples of an epoch that no run reaches; floats hold it exactly
NO_MORE = object()  # in place of a sample


class MapSplit(StreamedSplit):
    """A split of a data set that is read by number: one with `__len__` and `__getitem__`."""

    batch_size: int | None = None  # samples to evaluate at a time; None: as by default
    order: LoaderOrder | None = None  # of a DataLoader's own sampler; None: the run's

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        readers: int = 0,
        seed: int = 0,
        begin_reader: BeginReader | None = None,
        send_once: bool = False,
    ) -> None:
        """Raise UsageError for a data set without length or random access, or, with `readers`, one
        that cannot be sent to other processes.

        `collate`: makes a batch of a list of samples; by default torch's. `readers`: the number of
        processes that read ahead; 0: read in the training process. `seed`: of random augmentation,
        usually the run's. `begin_reader`: called in each reader process, with its number.
        `send_once`: processes keep the data set that they were sent first; by default they begin
        anew in each epoch for which it was changed.
        """
        _check_random_access(dataset)
        samples = MapSamples(dataset, collate or default_collate, seed)
        self._parts = (dataset, samples.make_batch, begin_reader)
        self._sent = digest_of(*self._parts) if readers else ""
        self._is_sent_once = send_once
        super().__init__(samples, readers, stay=True, begin_reader=begin_reader)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        """Yield the batches of these samples, with the data set as it is when this is called."""
        if self._readers:
            dataset = self._parts[0]
            now = self._sent if self._is_sent_once else digest_of(*self._parts)
            if now != self._sent:
                self._loader = None  # other processes begin, with the data set as it is now
            begin_epoch(dataset, epoch)  # readers do so too, each with its own
            is_changed = hasattr(dataset, "set_epoch") and not self._is_sent_once
            self._sent = digest_of(*self._parts) if is_changed else now
        return super().stream(batches, epoch)


@overload
def split_of(source: DataLoader[Any], seed: int = 0) -> MapSplit: ...


@overload
def split_of(source: Any, seed: int = 0) -> Split: ...


def split_of(source: Any, seed: int = 0) -> Split:
    """Return the split of a torch DataLoader, or of a data set that is read by number.

    A DataLoader contributes its data set, `collate_fn`, `num_workers` and `worker_init_fn`, its
    batch size for evaluation, and a sampler or batch sampler that does more than to order all
    samples (`hvdtrain.data.loader_order`). Otherwise steps are global batches in the order of the
    run. `seed`: as for `MapSplit`. A split is returned as it is. Raises UsageError for anything
    else, and for a sampler that gives each rank a part.
    """
    if isinstance(source, DataLoader):
        if source.batch_size is None and getattr(source, "batch_sampler", None) is None:
            raise UsageError(
                "hvdtrain.split_of: this DataLoader has batch_size=None, so its data set returns "
                "batches. Give it a data set of single samples"
            )
        split = MapSplit(
            source.dataset,
            source.collate_fn,
            source.num_workers,
            seed,
            begin_reader=source.worker_init_fn,
            send_once=source.persistent_workers,
        )
        split.batch_size, split.order = batch_size_of(source), order_of(source)
        return split
    # `datasets.Dataset` has a method `batch`, too, which is something else.
    if hasattr(source, "batch") and hasattr(source, "__len__") and not _has_items(source):
        return cast(Split, source)
    return MapSplit(source, seed=seed)


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the batch size of a DataLoader, which may be that of its batch sampler."""
    size = loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) if size is None else size


def _has_items(dataset: Any) -> bool:
    # torch's base class has a `__getitem__` that only raises, also for iterable data sets.
    return getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)


def _check_random_access(dataset: Any) -> None:
    kind = type(dataset).__name__
    by_name = isinstance(dataset, Mapping) and 0 not in dataset
    are_tensors = isinstance(dataset, tuple) and all(
        isinstance(sample, torch.Tensor) for sample in dataset
    )
    problem = first_problem(
        (
            by_name or are_tensors,
            f"a {kind} is not a data set of samples. Of tensors, make "
            "torch.utils.data.TensorDataset(*tensors) or StackDataset(**by_name); of samples, a "
            "list",
        ),
        (
            not _has_items(dataset),
            f"{kind} cannot be read by number (it has no __getitem__). For a data set that is only "
            "iterated: hvdtrain.IterableSplit(dataset, length), or without a length and with "
            "max_steps",
        ),
        (not hasattr(dataset, "__len__"), f"{kind} has no __len__"),
    )
    if problem:
        raise UsageError(f"hvdtrain.MapSplit: {problem}")


class IterableSplit:
    """A split of a data set that can only be iterated: sample k is the k-th of an epoch.

    Its samples are not shuffled. Every rank iterates over all of them and takes its own, and a
    resumed run iterates up to its cursor. `set_epoch(epoch)` of the data set is called first, if it
    has one. A data set for `MapSplit` is read faster, and its samples are shuffled.

    Without a length, the run is one long epoch, which ends after `max_steps`: where the data set
    ends, it is iterated once more, after `set_epoch` with the number of times before.
    """

    in_order = True  # samples are trained on in the order of their numbers
    may_skip = False

    def __init__(
        self,
        dataset: Iterable[Any],
        length: int | None = None,
        collate: Collate | None = None,
        seed: int = 0,
    ) -> None:
        """Raise UsageError for no samples, or for an iterator, which could be used only once.

        `length`: the number of samples of an epoch; further ones are not used. None: not known; the
        run needs `max_steps`, and the samples cannot be evaluated. `collate`, `seed`: as for
        `MapSplit`.
        """
        if length is not None and length < 1:
            raise UsageError(f"hvdtrain.IterableSplit: {length=}: must be at least 1")
        if isinstance(dataset, Iterator):
            raise UsageError(
                f"hvdtrain.IterableSplit: a {type(dataset).__name__} can be iterated only once; "
                "give an object whose __iter__ begins anew for each epoch"
            )
        self._dataset = dataset
        self.is_endless = length is None
        self._length = ENDLESS if length is None else length
        self._collate = collate or default_collate
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> Iterable[str] | None:
        return fingerprint_of(self._dataset)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        """Return these samples as one batch, iterating from the beginning of the epoch."""
        wanted, inverse = np.unique(indices, return_inverse=True)
        with kept():
            if not len(wanted):
                return self._made([next(self._samples(epoch))], np.zeros(1, np.int64), epoch)
            samples = list(_chosen(self._samples(epoch), wanted, 0))
            return self._made([samples[position] for position in inverse], indices, epoch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        """Yield the batches of these samples, whose numbers must ascend over all batches."""
        samples, start = self._samples(epoch), 0
        example: list[Any] = []
        for indices in batches:
            with kept():
                if len(indices):
                    batch_samples = list(_chosen(samples, indices, start))
                    example, start = batch_samples[:1], int(indices[-1]) + 1
                    loaded = Loaded(self._made(batch_samples, indices, epoch), len(batch_samples))
                else:
                    if not example:  # nothing was read yet
                        example = [next(samples)]
                        samples = itertools.chain(example, samples)
                    loaded = Loaded(self._made(example, np.zeros(1, np.int64), epoch), 0)
            yield loaded

    def _made(self, samples: list[Any], indices: Indices, epoch: int) -> Any:
        seed_for(self._seed, epoch, int(indices[0]), OF_BATCH)
        return self._collate(samples)

    def _samples(self, epoch: int) -> Iterator[Any]:
        """Yield the samples of an epoch, each to be taken within `kept`.

        Raises TrainingError if the data set ends too early.
        """
        samples, pass_, first = self._iterate(epoch), epoch, 0
        for number in range(self._length):
            seed_for(self._seed, epoch, number)
            sample = next(samples, NO_MORE)
            if sample is NO_MORE and self.is_endless and number > first:
                pass_, first = pass_ + 1, number
                samples = self._iterate(pass_)
                seed_for(self._seed, epoch, number)
                sample = next(samples, NO_MORE)
            if sample is NO_MORE:
                stated = "" if self.is_endless else f"; its stated length is {self._length}"
                raise TrainingError(
                    f"{type(self._dataset).__name__} ended after {number - first} samples{stated}"
                )
            yield sample

    def _iterate(self, pass_: int) -> Iterator[Any]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(pass_)
        seed_for(self._seed, pass_, 0, OF_EPOCH)
        return iter(self._dataset)


def _chosen(samples: Iterator[Any], indices: Indices, start: int) -> Iterator[Any]:
    """Yield the samples of ascending `indices` out of those that are numbered from `start`."""
    for index in indices.tolist():
        if index < start:
            raise ValueError(f"sample {index} after {start - 1}: iteration goes on only")
        yield from itertools.islice(samples, index - start, index - start + 1)
        start = index + 1
