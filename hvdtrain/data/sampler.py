"""Which samples make up each step: pure index arithmetic, the same for every number of workers.

The order of an epoch depends on the seed and the epoch alone. It is cut into global batches, and
only each of these is shared out over the ranks: nothing is dropped and nothing is padded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

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

    def global_batches(self, cursor: int) -> Iterator[Indices]:
        """The global batches from `cursor` samples into the run to the end of that epoch.

        The cursor, which counts samples over all epochs, is the loader's whole state.
        """
        epoch, start = divmod(cursor, self.samples)
        order = self.order(epoch)
        for position in range(start, self.samples, self.global_batch_size):
            yield order[position : position + self.global_batch_size]


class Shares:
    """How a global batch is shared out over ranks, in neighbouring parts.

    Equal weights give parts that differ in length by at most one; other weights give parts in
    proportion, rounded so that they always add up to the whole. Parts may be empty.
    """

    def __init__(self, size: int, weights: Sequence[float] | None = None) -> None:
        """`weights`: one for each of `size` ranks, not negative and not all zero.

        Raises ValueError when they are not that.
        """
        self.weights = tuple(weights) if weights is not None else (1.0,) * size
        if len(self.weights) != size:
            raise ValueError(f"{len(self.weights)} weights for {size} ranks")
        total = sum(self.weights)
        if not math.isfinite(total) or min(self.weights) < 0 or total == 0:
            raise ValueError("weights must be finite, not negative, and not all zero")
        self._cumulative = [sum(self.weights[:rank]) / total for rank in range(size + 1)]
        self._cumulative[-1] = 1.0

    def of(self, indices: Indices, rank: int) -> Indices:
        """One rank's part of a batch."""
        start, stop = (self._edge(len(indices), edge) for edge in (rank, rank + 1))
        return indices[start:stop]

    def sizes(self, length: int) -> list[int]:
        """The lengths of all ranks' parts of a batch of `length`."""
        edges = [self._edge(length, edge) for edge in range(len(self._cumulative))]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    def _edge(self, length: int, edge: int) -> int:
        # Rounded down after adding far less than 1, so that 1/3 of 3 is 1 in spite of rounding.
        return int(length * self._cumulative[edge] + 1e-9)
