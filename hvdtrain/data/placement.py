"""A host's part of the samples, under the numbers that they have among those of all hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.data.feeding import Loaded, may_skip, stream
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Split


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
