"""From the order of samples to the batches of one rank, step by step.

A rank knows beforehand which samples each of its steps will take, to the end of the epoch. Splits
that read from disks are told, and read ahead in worker processes (`StreamingSplit`).
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
    """A batch, and how many samples are in it. Those that could not be read are left out."""

    batch: Any
    samples: int
    bad: int = 0


@runtime_checkable
class StreamingSplit(Protocol):
    """A split that reads ahead."""

    may_skip: bool  # whether samples that cannot be read are left out

    def stream(self, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
        """The batches of these samples, in this order."""


@dataclass(frozen=True)
class StepData:
    """What one rank computes on in one step."""

    samples: int  # of the global batch, over all ranks
    batches: Iterator[Loaded]  # this rank's part of each micro-batch


def stream(split: Split, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
    """The batches of these samples, in this order; read ahead where the split can."""
    if isinstance(split, StreamingSplit):
        yield from split.stream(batches, epoch)
        return
    for indices in batches:
        yield Loaded(split.batch(indices, epoch), len(indices))


def may_skip(split: Split) -> bool:
    """Whether a batch of this split may hold fewer samples than were asked for."""
    return isinstance(split, StreamingSplit) and split.may_skip


@dataclass(frozen=True)
class Feed:
    """How the samples of a split come to one rank."""

    split: Split
    sampler: GlobalBatchSampler
    shares: SharesLike
    micro_batches: int
    everyone: bool  # every rank takes part in each micro-batch, also with no sample

    def epoch(self, cursor: int, steps: int, rank: int) -> Iterator[StepData]:
        """From `cursor` samples into the run to the end of that epoch, at most `steps` steps."""
        batches = list(itertools.islice(self.sampler.global_batches(cursor), steps))
        parts = [self._parts(batch, rank) for batch in batches]
        epoch = cursor // self.sampler.samples
        loaded = stream(self.split, list(itertools.chain.from_iterable(parts)), epoch)
        for batch, own in zip(batches, parts, strict=True):
            yield StepData(len(batch), itertools.islice(loaded, len(own)))

    def step(self, indices: Indices, rank: int, epoch: int = 0) -> StepData:
        """One step on a global batch of one's own choice."""
        parts = self._parts(indices, rank)
        return StepData(len(indices), stream(self.split, parts, epoch))

    def _parts(self, batch: Indices, rank: int) -> list[Indices]:
        """Micro-batches are cut from the global batch first, so they are the same for every N."""
        cuts = [batch[part] for part in split_evenly(len(batch), self.micro_batches)]
        own = [(cut, self.shares.of(cut, rank)) for cut in cuts]
        return [part for cut, part in own if len(part) or (self.everyone and len(cut))]


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


class PartSplit:
    """Samples start .. start + len(part) - 1 of `samples`; others cannot be had here."""

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
