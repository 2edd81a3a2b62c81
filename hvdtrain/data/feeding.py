"""The batches of one rank, step by step, and a host's own part of the samples.

The samples of every step of a rank are determined up to the end of the epoch. Splits that read from
disks receive them in advance, and read ahead in worker processes (`StreamingSplit`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hvdtrain.data.sampler import GlobalBatchSampler, Indices, SharesLike
from hvdtrain.data.splits import Split
from hvdtrain.ring import split_evenly


@dataclass(frozen=True)
class Loaded:
    """A batch of `samples` samples; `bad` further ones could not be read."""

    batch: Any
    samples: int
    bad: int = 0


@runtime_checkable
class StreamingSplit(Protocol):
    """A split that reads ahead."""

    may_skip: bool  # whether unreadable samples are skipped

    def stream(self, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
        """Yield the batches of these samples, in this order."""


@dataclass(frozen=True)
class StepData:
    """The data of one step on one rank."""

    samples: int  # in the global batch, over all ranks
    batches: Iterator[Loaded]  # this rank's part of each micro-batch


def stream(split: Split, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
    """Yield the batches of these samples, in this order; read ahead if the split supports it."""
    if isinstance(split, StreamingSplit):
        yield from split.stream(batches, epoch)
        return
    for indices in batches:
        yield Loaded(split.batch(indices, epoch), len(indices))


def may_skip(split: Split) -> bool:
    """Return whether a batch of this split may have fewer samples than requested."""
    return isinstance(split, StreamingSplit) and split.may_skip


@dataclass(frozen=True)
class Feed:
    """The distribution of a split's samples over steps, ranks and micro-batches."""

    split: Split
    sampler: GlobalBatchSampler
    shares: SharesLike
    micro_batches: int
    everyone: bool  # every rank takes part in each micro-batch, even without samples

    def epoch(self, cursor: int, steps: int, rank: int) -> Iterator[StepData]:
        """Yield up to `steps` steps from `cursor` samples into the run, within that epoch."""
        batches = list(itertools.islice(self.sampler.global_batches(cursor), steps))
        parts = [self._parts(batch, rank) for batch in batches]
        epoch = cursor // self.sampler.samples
        loaded = stream(self.split, list(itertools.chain.from_iterable(parts)), epoch)
        for batch, own in zip(batches, parts, strict=True):
            yield StepData(len(batch), itertools.islice(loaded, len(own)))

    def step(self, indices: Indices, rank: int, epoch: int = 0) -> StepData:
        """Return the step of `rank` on the global batch `indices`."""
        parts = self._parts(indices, rank)
        return StepData(len(indices), stream(self.split, parts, epoch))

    def _parts(self, batch: Indices, rank: int) -> list[Indices]:
        """Return the rank's part of each micro-batch.

        Micro-batches are cut from the global batch first, so they are the same for every N.
        """
        cuts = [batch[part] for part in split_evenly(len(batch), self.micro_batches)]
        own = [(cut, self.shares.of(cut, rank)) for cut in cuts]
        return [part for cut, part in own if len(part) or (self.everyone and len(cut))]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the same structure with its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


class PartSplit:
    """A split of `samples` samples of which `part` holds start .. start + len(part) - 1.

    Only those can be read; others raise IndexError.
    """

    def __init__(self, part: Split, start: int, samples: int) -> None:
        self._part = part
        self._start = start
        self._samples = samples
        self.may_skip = may_skip(part)

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        return self._part.batch(self._own(indices), epoch)

    def stream(self, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
        return stream(self._part, [self._own(indices) for indices in batches], epoch)

    def _own(self, indices: Indices) -> Indices:
        own = indices - self._start
        if len(own) and not 0 <= own.min() <= own.max() < len(self._part):
            raise IndexError(f"samples {own.min()} to {own.max()} of a part of {len(self._part)}")
        return own
