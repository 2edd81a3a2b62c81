"""Samples of a data set that is read by number, in batches.

A batch is read as a DataLoader of torch reads it: by the data set's `__getitems__`, if it has one.
Where something draws random numbers it is read sample by sample, each with its own numbers.
"""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.drawing import OF_BATCH, kept, marks, seed_for, torch_state_of
from hvdtrain.data.feeding import Loaded
from hvdtrain.data.reading import BadSample, Key
from hvdtrain.data.splits import texts_of

Collate = Callable[[Any], Any]
SHARDS = "index.json"  # of litdata, in the folder of its shards


@dataclass(eq=False)
class MapSamples:
    """Samples of a data set, read as batches.

    `samples_draw`, `batches_draw`: whether reading a sample, and making a batch of samples, draws
    random numbers, as far as this process has seen; None before the first batch.
    """

    dataset: Any
    make_batch: Collate
    seed: int
    samples_draw: bool | None = None
    batches_draw: bool | None = None
    is_batched: bool = False  # `__getitems__` returns something else than a list of samples

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a reader process receives: it has seen nothing of what draws."""
        unseen = dict.fromkeys(("samples_draw", "batches_draw"))
        return self.__dict__ | unseen | {"epoch": _epoch_of(self.dataset)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        epoch = state.pop("epoch")
        self.__dict__.update(state)
        if epoch is not None:
            _note_epoch(self.dataset, epoch)

    def fingerprint(self) -> Iterable[str] | None:
        return fingerprint_of(self.dataset)

    def load(self, keys: Sequence[Key]) -> Loaded:
        """Return these samples, each a number and the epoch, as a batch; without any, a sample that
        stands in for them. Raises BadSample.
        """
        numbers, epoch = [number for number, _ in keys], keys[0][1] if keys else 0
        begin_epoch(self.dataset, epoch)
        with kept():
            return Loaded(self._batch(numbers or [0], epoch), len(numbers))

    def _batch(self, numbers: list[int], epoch: int) -> Any:
        if self.samples_draw is False and self.batches_draw is False:
            is_quiet, batch = self._quietly(lambda: self.make_batch(self._together(numbers)), epoch)
            if is_quiet:
                return batch
            # Which of the two has drawn, or failed, is found below.
            self.samples_draw = self.batches_draw = None
        samples = self._samples(numbers, epoch)
        if self.batches_draw is False:
            is_quiet, batch = self._quietly(lambda: self.make_batch(samples), epoch)
            if is_quiet:
                return batch
            samples = self._samples(numbers, epoch)  # `make_batch` may have changed them
        # What a batch draws itself depends on its first sample, and so on the number of ranks.
        seed_for(self.seed, epoch, numbers[0], OF_BATCH)
        before = marks()
        try:
            batch = self.make_batch(samples)
        except Exception as error:  # the user's code raises errors of many types
            listed = samples if is_list(samples, len(numbers)) else []
            missing = [
                number for number, sample in zip(numbers, listed, strict=False) if sample is None
            ]
            if not missing:
                raise
            raise BadSample(
                f"sample {missing[0]} of {type(self.dataset).__name__} is None, of which no batch "
                "can be made"
            ) from error
        self.batches_draw = bool(self.batches_draw) or marks() != before
        return batch

    def _samples(self, numbers: list[int], epoch: int) -> Any:
        """Read these samples; return what `make_batch` takes."""
        if self.samples_draw is False:
            is_quiet, samples = self._quietly(lambda: self._together(numbers), epoch)
            if is_quiet:
                return samples
        return self._one_by_one(numbers, epoch)

    def _quietly(self, call: Callable[[], Any], epoch: int) -> tuple[bool, Any]:
        """Return whether a call of the user's code ended without random numbers, and its result."""
        torch.set_rng_state(torch_state_of(self.seed, epoch))
        before = marks()
        try:
            result = call()
        except Exception:  # errors of many types; one by one it is found which sample it is
            return False, None
        return marks() == before, result

    def _together(self, numbers: list[int]) -> list[Any]:
        samples: list[Any] = self._fetch(numbers)
        if not is_list(samples, len(numbers)):
            raise TypeError(f"__getitems__ returned {type(samples).__name__}")
        return samples

    def _one_by_one(self, numbers: list[int], epoch: int) -> Any:
        """Read each sample with its own random numbers."""
        samples: list[Any] = []
        draws = bool(self.samples_draw)
        for number in [] if self.is_batched else numbers:
            seed_for(self.seed, epoch, number)
            before = None if draws else marks()
            one = self._fetch([number])
            if not is_list(one, 1):
                self.is_batched = True
                break
            draws = draws or marks() != before
            samples += one
        if self.is_batched:  # as of a batch: it has no samples to give their own random numbers
            seed_for(self.seed, epoch, numbers[0], OF_BATCH)
            return self._fetch(numbers)
        self.samples_draw = draws
        return samples

    def _fetch(self, numbers: list[int]) -> Any:
        """Return samples as a DataLoader of torch reads them, before it collates them."""
        together = getattr(self.dataset, "__getitems__", None)
        try:
            return together(numbers) if together else [self.dataset[number] for number in numbers]
        except Exception as error:  # the user's code raises errors of many types
            raise BadSample(
                f"sample {numbers[0]} of {type(self.dataset).__name__}: {type(error).__name__}: "
                f"{error}"
            ) from error


_epochs: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity, as not all can be hashed


def begin_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of a data set that has one, unless it was called so last in this process.

    Two splits may have the same data set, and take turns.
    """
    if hasattr(dataset, "set_epoch") and _epoch_of(dataset) != epoch:
        dataset.set_epoch(epoch)
        _note_epoch(dataset, epoch)


def _epoch_of(dataset: Any) -> int | None:
    reference, epoch = _epochs.get(id(dataset), (None, None))
    return epoch if reference is not None and reference() is dataset else None


def _note_epoch(dataset: Any, epoch: int) -> None:
    number = id(dataset)
    with suppress(TypeError):  # of a type without weak references: called for each batch
        _epochs[number] = weakref.ref(dataset, lambda _: _epochs.pop(number, None)), epoch


def is_list(fetched: Any, length: int) -> bool:
    """Return whether samples were read, not a batch of them."""
    return isinstance(fetched, list) and len(fetched) == length


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
    return [
        str([chunk.get(key) for key in sizes]) for chunk in json.loads(index.read_text())["chunks"]
    ]
