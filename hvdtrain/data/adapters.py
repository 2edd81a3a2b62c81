"""Splits made of a torch DataLoader, of any data set that is read by number, or of an iterable.

What has `__len__` and `__getitem__` serves: data sets of torch, `datasets.Dataset` of Hugging Face,
`litdata.StreamingDataset` (shards on disk). Reading a sample draws its random numbers from seed,
epoch and number, in torch, NumPy and `random`: so they depend on no rank, process or earlier
sample.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.data.feeding import Loaded
from hvdtrain.data.reading import BadSample, BeginReader, StreamedSplit
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Split, texts_of
from hvdtrain.errors import TrainingError, UsageError

Collate = Callable[[list[Any]], Any]
SHARDS = "index.json"  # of litdata, in the folder of its shards
OF_SAMPLE, OF_BATCH, OF_EPOCH = range(3)  # purposes of random numbers


class MapSplit(StreamedSplit):
    """A split of a data set that is read by number: one with `__len__` and `__getitem__`."""

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        readers: int = 0,
        seed: int = 0,
        begin_reader: BeginReader | None = None,
    ) -> None:
        """Raise UsageError for a data set without length or random access, or, with `readers`, one
        that cannot be sent to other processes.

        `collate`: makes a batch of a list of samples; by default torch's. `readers`: the number of
        processes that read ahead; 0: read in the training process. `seed`: of random augmentation,
        usually the run's. `begin_reader`: called in each reader process, with its number.
        """
        _check_random_access(dataset)
        samples = MapSamples(dataset, collate or default_collate, seed)
        if readers:
            _check_sendable(samples, begin_reader)
        super().__init__(samples, readers, may_skip=False, stay=True, begin_reader=begin_reader)


@overload
def split_of(source: DataLoader[Any], seed: int = 0) -> MapSplit: ...


@overload
def split_of(source: Any, seed: int = 0) -> Split: ...


def split_of(source: Any, seed: int = 0) -> Split:
    """Return the split of a torch DataLoader, or of a data set that is read by number.

    A DataLoader contributes its data set, `collate_fn`, `num_workers` and `worker_init_fn`. Its
    batch size and sampler have no effect: steps are global batches in the order of the run. `seed`:
    as for `MapSplit`. A split is returned as it is. Raises UsageError for anything else.
    """
    if isinstance(source, DataLoader):
        if source.batch_size is None and getattr(source, "batch_sampler", None) is None:
            raise UsageError(
                "hvdtrain.split_of: this DataLoader has batch_size=None, so its data set returns "
                "batches. Give it a data set of single samples"
            )
        begin = source.worker_init_fn if source.num_workers else None
        return MapSplit(source.dataset, source.collate_fn, source.num_workers, seed, begin)
    # `datasets.Dataset` has a method `batch`, too, which is something else.
    if hasattr(source, "batch") and hasattr(source, "__len__") and not _has_items(source):
        return cast(Split, source)
    return MapSplit(source, seed=seed)


def _has_items(dataset: Any) -> bool:
    # torch's base class has a `__getitem__` that only raises, also for iterable data sets.
    return getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)


def _check_random_access(dataset: Any) -> None:
    kind = type(dataset).__name__
    if not _has_items(dataset):
        raise UsageError(
            f"hvdtrain.MapSplit: {kind} cannot be read by number (it has no __getitem__). For a "
            "data set that is only iterated, state its length: hvdtrain.IterableSplit(dataset, "
            "length)"
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"hvdtrain.MapSplit: {kind} has no __len__")


def _check_sendable(*parts: Any) -> None:
    """Raise UsageError for what reader processes, which are not forked, could not receive."""
    for part in parts:
        try:
            pickle.Pickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(part)
        except Exception as error:  # classes define how they are pickled
            raise UsageError(
                f"hvdtrain.MapSplit: reader processes cannot receive the data set or its functions "
                f"({type(error).__name__}: {error}). Define them at the top of a module, or read "
                "without processes (readers=0, num_workers=0)"
            ) from error


class _Nowhere:
    """A file that drops what is written."""

    def write(self, data: Any) -> int:
        return len(data)


class Numbered(NamedTuple):
    """A sample, with its number and the epoch."""

    number: int
    epoch: int
    sample: Any


@dataclass(frozen=True, eq=False)
class MapSamples:
    """Samples of a data set, read one by one."""

    dataset: Any
    make_batch: Collate
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> Iterable[str] | None:
        return fingerprint_of(self.dataset)

    def read(self, index: int, epoch: int) -> Any:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        try:
            with drawing(self.seed, epoch, index):
                return Numbered(index, epoch, self.dataset[index])
        except Exception as error:  # the user's code raises errors of many types
            kind = type(self.dataset).__name__
            text = f"sample {index} of {kind}: {type(error).__name__}: {error}"
            raise BadSample(text) from error

    def collate(self, samples: list[Numbered]) -> Any:
        if not samples:
            return without_samples(self.make_batch, self.read(0, 0).sample, self.seed)
        # What a batch draws itself depends on its first sample, and so on the number of ranks.
        with drawing(self.seed, samples[0].epoch, samples[0].number, OF_BATCH):
            return self.make_batch([it.sample for it in samples])

    def finish(self, batch: Any) -> Any:
        return batch


def fingerprint_of(dataset: Any) -> Iterable[str] | None:
    """Return the texts of a data set's `fingerprint()`, the digest that Hugging Face keeps of its
    contents, the files of its shards (litdata), or None.
    """
    if callable(getattr(dataset, "fingerprint", None)):
        return texts_of(dataset)
    digest = getattr(dataset, "_fingerprint", None)
    if isinstance(digest, str):
        return [digest]
    folder = getattr(getattr(dataset, "input_dir", None), "path", None)
    index = Path(folder, SHARDS) if folder else None
    if index is None or not index.is_file():
        return None
    sizes = ("filename", "chunk_size", "chunk_bytes")
    return [str([it.get(key) for key in sizes]) for it in json.loads(index.read_text())["chunks"]]


@contextmanager
def drawing(seed: int, epoch: int, index: int, purpose: int = OF_SAMPLE) -> Iterator[None]:
    """Seed all random generators for a sample; afterwards they continue as before."""
    states = random.getstate(), np.random.get_state()
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, index, purpose))
    words = sequence.generate_state(4, np.uint32).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(words[0] << 31 | words[1] >> 1)
        np.random.seed(words[2])
        random.seed(words[3])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def without_samples(collate: Collate, sample: Any, seed: int) -> Any:
    """Return a batch of no samples, of the structure that `collate` makes of this one.

    The dimension of samples is the one that differs between a batch of one and a batch of two.
    """
    with drawing(seed, 0, 0, OF_BATCH):
        return _cut(collate([sample]), collate([sample, sample]))


def _cut(one: Any, two: Any) -> Any:
    if isinstance(one, torch.Tensor):
        for dimension in range(one.dim() if one.dim() == two.dim() else 0):
            if (one.shape[dimension], two.shape[dimension]) == (1, 2):
                return one.narrow(dimension, 0, 0)
        return one
    if isinstance(one, np.ndarray):
        return _cut(torch.from_numpy(one), torch.from_numpy(two)).numpy()
    if isinstance(one, Mapping):
        return {key: _cut(item, two[key]) for key, item in one.items()}
    if isinstance(one, list | tuple):
        if len(one) != len(two):  # of samples, such as texts
            return type(one)()
        items = [_cut(*pair) for pair in zip(one, two, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
    return one


class IterableSplit:
    """A split of a data set that can only be iterated: sample k is the k-th of an epoch.

    Its samples are not shuffled. Every rank iterates over all of them and takes its own, and a
    resumed run iterates up to its cursor. `set_epoch(epoch)` of the data set is called first, if it
    has one. A data set for `MapSplit` is read faster, and its samples are shuffled.
    """

    in_order = True  # samples are trained on in the order of their numbers
    may_skip = False

    def __init__(
        self, dataset: Iterable[Any], length: int, collate: Collate | None = None, seed: int = 0
    ) -> None:
        """Raise UsageError for no samples, or for an iterator, which could be used only once.

        `length`: the number of samples of an epoch; further ones are not used. `collate`, `seed`:
        as for `MapSplit`.
        """
        if length < 1:
            raise UsageError(f"hvdtrain.IterableSplit: {length=}: must be at least 1")
        if isinstance(dataset, Iterator):
            raise UsageError(
                f"hvdtrain.IterableSplit: a {type(dataset).__name__} can be iterated only once; "
                "give an object whose __iter__ begins anew for each epoch"
            )
        self._dataset = dataset
        self._length = length
        self._collate = collate or default_collate
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> Iterable[str] | None:
        return fingerprint_of(self._dataset)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        """Return these samples as one batch, iterating from the beginning of the epoch."""
        wanted, places = np.unique(indices, return_inverse=True)
        if not len(wanted):
            return without_samples(self._collate, next(self._samples(epoch)), self._seed)
        found = list(_chosen(self._samples(epoch), wanted, 0))
        return self._made([found[place] for place in places], indices, epoch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        """Yield the batches of these samples, whose numbers must ascend over all batches."""
        samples, start = self._samples(epoch), 0
        example: list[Any] = []
        for indices in batches:
            if len(indices):
                found = list(_chosen(samples, indices, start))
                example, start = found[:1], int(indices[-1]) + 1
                yield Loaded(self._made(found, indices, epoch), len(found))
            else:
                if not example:  # nothing was read yet
                    example = [next(samples)]
                    samples = itertools.chain(example, samples)
                yield Loaded(without_samples(self._collate, example[0], self._seed), 0)

    def _made(self, samples: list[Any], indices: Indices, epoch: int) -> Any:
        with drawing(self._seed, epoch, int(indices[0]), OF_BATCH):
            return self._collate(samples)

    def _samples(self, epoch: int) -> Iterator[Any]:
        """Yield the samples of an epoch. Raises TrainingError if the data set ends too early."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        with drawing(self._seed, epoch, 0, OF_EPOCH):
            samples = iter(self._dataset)
        for number in range(self._length):
            with drawing(self._seed, epoch, number):
                try:
                    sample = next(samples)
                except StopIteration:
                    raise TrainingError(
                        f"{type(self._dataset).__name__} ended after {number} samples; its stated "
                        f"length is {self._length}"
                    ) from None
            yield sample


def _chosen(samples: Iterator[Any], indices: Indices, start: int) -> Iterator[Any]:
    """Yield the samples of ascending `indices` out of those that are numbered from `start`."""
    for index in indices.tolist():
        if index < start:
            raise ValueError(f"sample {index} after {start - 1}: iteration goes on only")
        yield from itertools.islice(samples, index - start, index - start + 1)
        start = index + 1
