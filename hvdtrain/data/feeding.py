"""The batches of one rank, step by step, read ahead, or from a host's own samples.

The samples of every step of a rank are determined up to the end of the epoch, and computed as far
ahead as the split reads (see `hvdtrain.data.reading`).
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.data.sampler import GlobalBatchSampler, Indices, SharesLike
from hvdtrain.data.splits import Split
from hvdtrain.ring import split_evenly
from hvdtrain.tensors import CPU, changed

Parts = dict[tuple[int, int], Indices]  # of a global batch, by share and micro-batch

EVALUATION_BATCH = 512  # at most: limits memory, and is fast enough


@dataclass(frozen=True)
class Loaded:
    """A batch of `samples` samples; `bad` further ones could not be read."""

    batch: Any
    samples: int
    bad: int = 0
    # Completes the batch where it is used: compact batches are read, and sent to a device.
    finish: Callable[[Any], Any] | None = None

    def on(self, device: torch.device = CPU) -> Any:
        """Return the complete batch, on `device`."""
        moved = to_device(self.batch, device)
        return moved if self.finish is None else self.finish(moved)


@dataclass(frozen=True)
class StepData:
    """The data of one step on one rank."""

    indices: Indices  # of the samples of the global batch, over all ranks
    passes: Sequence[tuple[int, int]]  # for each of this rank's batches: its share, and its number
    batches: Iterator[Loaded]  # each share's part of each micro-batch

    @property
    def samples(self) -> int:
        """Return the number of samples in the global batch."""
        return len(self.indices)


def stream(split: Split, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
    """Yield the batches of these samples, in this order.

    A split that reads ahead has a method `stream`, which does so, and an attribute `may_skip`:
    whether unreadable samples are skipped. `batches` may be as long as an epoch: the method takes
    no more of them than are read ahead.
    """
    if hasattr(split, "stream") and hasattr(split, "may_skip"):
        yield from split.stream(batches, epoch)
        return
    for indices in batches:
        yield Loaded(split.batch(indices, epoch), len(indices))


def may_skip(split: Split) -> bool:
    """Return whether a batch of this split may have fewer samples than requested."""
    return hasattr(split, "stream") and bool(getattr(split, "may_skip", False))


def evaluation_batch(split: Split, chosen: int | None = None, most: int | None = None) -> int:
    """Return the number of samples to evaluate at a time on one rank.

    `chosen`: by an option, else it is that of the split. `most`: for a split without any.
    """
    default = min(most or EVALUATION_BATCH, EVALUATION_BATCH)
    return chosen or getattr(split, "batch_size", None) or default


def in_order(split: Split) -> bool:
    """Return whether the samples of this split are trained on in the order of their numbers."""
    return bool(getattr(split, "in_order", False))


@dataclass(frozen=True)
class Feed:
    """The distribution of a split's samples over steps, ranks and micro-batches."""

    split: Split
    sampler: GlobalBatchSampler
    shares: SharesLike
    micro_batches: int
    everyone: bool  # every rank takes part in each micro-batch: without samples, by one of others

    def epoch(self, cursor: int, steps: int, rank: int) -> Iterator[StepData]:
        """Yield up to `steps` steps from `cursor` samples into the run, within that epoch.

        If the rank has other shares after a step, what was read ahead for later ones is dropped.
        """
        epoch = cursor // self.sampler.samples
        while steps > 0 and cursor // self.sampler.samples == epoch:
            shares = self.shares.of_rank(rank)
            for data in self._read_ahead(cursor, steps, rank):
                yield data
                cursor, steps = cursor + data.samples, steps - 1
                if self.shares.of_rank(rank) != shares:
                    break

    def _read_ahead(self, cursor: int, steps: int, rank: int) -> Iterator[StepData]:
        """Yield the steps of the rank's present shares."""
        steps_ahead: deque[tuple[Indices, Parts]] = deque()  # planned, and not yielded yet
        wanted: deque[Indices] = deque()  # planned, and not read yet
        planned = (
            (batch, self._parts(batch, rank))
            for batch in itertools.islice(self.sampler.global_batches(cursor), steps)
        )

        def plan() -> bool:
            step = next(planned, None)
            if step is not None:
                steps_ahead.append(step)
                wanted.extend(self._wanted(step[1]))
            return step is not None

        def to_read() -> Iterator[Indices]:
            while wanted or plan():
                if wanted:
                    yield wanted.popleft()

        loaded = stream(self.split, to_read(), cursor // self.sampler.samples)
        while steps_ahead or plan():
            batch, parts = steps_ahead.popleft()
            yield StepData(batch, list(parts), self._as_passed(loaded, parts))

    def step(self, indices: Indices, rank: int, epoch: int = 0) -> StepData:
        """Return the step of `rank` on the global batch `indices`."""
        parts = self._parts(indices, rank)
        loaded = stream(self.split, self._wanted(parts), epoch)
        return StepData(indices, list(parts), self._as_passed(loaded, parts))

    def extent(self, samples: int, share: int, micro_batch: int) -> tuple[range, int]:
        """Return the numbers of a share's samples within a micro-batch of a global batch of so many
        samples, and the number of all samples in it.
        """
        cut = split_evenly(samples, self.micro_batches)[micro_batch]
        numbers = np.arange(cut.stop - cut.start)
        part = self.shares.of(numbers, share)
        first = int(part[0]) if len(part) else 0
        return range(first, first + len(part)), len(numbers)

    def _as_read(self, parts: Parts) -> Parts:
        """Return the parts of a step in the order in which the split reads them."""
        if not in_order(self.split):
            return parts
        # The parts are disjoint stretches of the global batch, which ascends.
        return dict(sorted(parts.items(), key=lambda item: item[1][:1].tolist()))

    def _wanted(self, parts: Parts) -> list[Indices]:
        """Return the samples to read for a step: for a part without any, one that stands in.

        A split that is read in order has one at hand by itself.
        """
        read = list(self._as_read(parts).values())
        if in_order(self.split):
            return read
        first = getattr(self.split, "first", 0)
        return [part if len(part) else np.array([first]) for part in read]

    def _as_passed(self, loaded: Iterator[Loaded], parts: Parts) -> Iterator[Loaded]:
        """Yield the batches of a step in the order of its passes."""
        read = self._as_read(parts)
        taken = (
            batch if len(part) else replace(batch, samples=0, bad=0)
            for part, batch in zip(read.values(), loaded, strict=False)
        )
        return taken if list(read) == list(parts) else _reordered(taken, read, parts)

    def _parts(self, batch: Indices, rank: int) -> Parts:
        """Return the parts of the rank's shares, by share and micro-batch. Micro-batches
        are cut from the global batch first, so they are the same for every N.
        """
        cuts = [batch[part] for part in split_evenly(len(batch), self.micro_batches)]
        return {
            (share, number): part
            for share in self.shares.of_rank(rank)
            for number, cut in enumerate(cuts)
            if len(part := self.shares.of(cut, share)) or (self.everyone and len(cut))
        }


def _reordered(loaded: Iterator[Loaded], read: Parts, parts: Parts) -> Iterator[Loaded]:
    batches = dict(zip(read, loaded, strict=True))
    yield from (batches[key] for key in parts)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the same structure with its tensors, and objects that have a method `to`, on `device`.

    The host does not wait for a copy to a device, which is made from memory that cannot be paged.
    For a copy to the CPU it does: otherwise the values would be read before they have arrived.
    """

    def move(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            moved = item.to(device)
            return item if moved is None else moved  # it may move itself
        if device.type == "cpu" or item.device.type != "cpu":
            return item.to(device)
        if item.layout == torch.strided and device.type != "meta":
            item = item.pin_memory()
        return item.to(device, non_blocking=True)

    def has_to(item: Any) -> bool:
        return callable(getattr(item, "to", None)) and not isinstance(item, type)

    return changed(batch, move, has_to)


class PartSplit:
    """A split of which only samples start .. start + len(part) - 1 can be read, those of `part`."""

    def __init__(self, part: Split, start: int, samples: int) -> None:
        self._part = part
        self._start = self.first = start
        self._samples = samples
        self.may_skip = may_skip(part)
        self.batch_size = getattr(part, "batch_size", None)

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        return self._part.batch(self._offsets(indices), epoch)

    def stream(self, batches: Iterable[Indices], epoch: int) -> Iterator[Loaded]:
        return stream(self._part, map(self._offsets, batches), epoch)

    def _offsets(self, indices: Indices) -> Indices:
        offsets = indices - self._start
        # Not offsets.min(): the types of it in NumPy 2.5 lack the form without an argument.
        if len(offsets) and not 0 <= np.min(offsets) <= np.max(offsets) < len(self._part):
            raise IndexError(
                f"samples {np.min(offsets)} to {np.max(offsets)} of a part of {len(self._part)}"
            )
        return offsets
