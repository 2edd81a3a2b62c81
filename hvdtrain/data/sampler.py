"""Which samples make up each step: pure index arithmetic, the same for every number of workers.

The order of an epoch depends on the seed and the epoch alone. It is cut into global batches, and
only each of these is shared out over the ranks: nothing is dropped and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvdtrain.ring.segments import split_evenly

Indices = NDArray[np.int64]


class GlobalBatchSampler:
    """The global batches of every epoch, and each rank's share of them."""

    def __init__(self, samples: int, global_batch_size: int, seed: int) -> None:
        """Raises ValueError for no samples, or a batch smaller than one."""
        if samples < 1 or global_batch_size < 1:
            raise ValueError(f"{samples} samples in batches of {global_batch_size}")
        self.samples = samples
        self.global_batch_size = global_batch_size
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; the last one may be short."""
        return -(-self.samples // self.global_batch_size)

    def order(self, epoch: int) -> Indices:
        """Every sample's index once, in the order of this epoch (int64, shape (samples,))."""
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        return generator.permutation(self.samples)

    def global_batches(self, epoch: int) -> Iterator[Indices]:
        """The epoch's global batches, in order."""
        order = self.order(epoch)
        for start in range(0, self.samples, self.global_batch_size):
            yield order[start : start + self.global_batch_size]


def share(indices: Indices, rank: int, size: int) -> Indices:
    """One rank's part of a global batch: parts differ in length by at most one, or are empty."""
    return indices[split_evenly(len(indices), size)[rank]]
