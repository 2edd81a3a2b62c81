"""Splits that change the batches of another split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.data.feeding import Loaded, may_skip, stream
from hvdtrain.data.fingerprint import texts_of
from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Batch, Split


class ChangedSplit:
    """The base: reads ahead where the other split does. Derive from it and define `change`."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self.may_skip = may_skip(split)

    def __len__(self) -> int:
        return len(self._split)

    def fingerprint(self) -> list[str] | None:
        """Return the other split's."""
        return texts_of(self._split)

    def change(self, batch: Batch, indices: Indices, epoch: int) -> Batch:
        raise NotImplementedError

    def batch(self, indices: Indices, epoch: int = 0) -> Batch:
        return self.change(self._split.batch(indices, epoch), indices, epoch)

    def stream(self, batches: Sequence[Indices], epoch: int) -> Iterator[Loaded]:
        loaded = stream(self._split, batches, epoch)
        for indices, one in zip(batches, loaded, strict=True):
            yield Loaded(self.change(one.batch, indices, epoch), one.samples, one.bad)
