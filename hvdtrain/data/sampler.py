"""The samples of each step: pure index arithmetic, the same for every number of workers.

The order of an epoch depends only on the seed and the epoch. It is cut into global batches, each of
which is distributed over the ranks: no sample is dropped or padded. The order is computed where it
is needed (see `hvdtrain.data.permutation`), so neither memory nor a start depends on the number of
samples.

If each host holds a part of the samples, the parts are merged into one order, in proportion in
every batch, and a sample goes to a rank of its host.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.data.permutation import BLOCK, MergedOrder, Permutation
from hvdtrain.data.permutation import Indices as Indices
from hvdtrain.errors import UsageError
from hvdtrain.ring import split_evenly


class GlobalBatchSampler:
    """The order of samples in every epoch, and its global batches (not a sampler of torch)."""

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        seed: int,
        parts: Sequence[int] = (),
        shuffle: bool = True,
    ) -> None:
        """Raise ValueError for no samples, a batch size below one, or `parts` of another sum.

        `samples`: number in the data set. `global_batch_size`: number in a step, over all ranks.
        `seed`: of the order, with the epoch. `parts`: the number of samples on each host, in order;
        by default each host has all. `shuffle`: False: samples come in the order of their numbers.
        """
        if samples < 1 or global_batch_size < 1:
            raise ValueError(f"{samples=}, {global_batch_size=}: must be at least 1")
        if parts and not shuffle:
            raise ValueError("parts of hosts are shuffled")
        if parts and sum(parts) != samples:
            raise ValueError(f"parts {list(parts)} of {samples} samples")
        self._parts = tuple(parts) or (samples,)
        self._seed = seed
        self._shuffle = shuffle
        self.samples = samples
        self.global_batch_size = global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of global batches in an epoch; the last one may be short."""
        return -(-self.samples // self.global_batch_size)

    @property
    def batch_sizes(self) -> set[int]:
        """Return the numbers of samples that global batches of an epoch have."""
        whole = {self.global_batch_size} if self.samples >= self.global_batch_size else set()
        rest = self.samples % self.global_batch_size
        return whole | ({rest} if rest else set())

    @property
    def drawn(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds of the order of the newest epoch; None: it follows from
        the seed.
        """
        return None

    def check_drawn(self, saved: dict[str, Any] | None) -> None:
        """Raise UsageError unless a resumed run goes on in the order that was `saved`."""
        if saved is not None:
            raise UsageError(
                f"--resume: samples came in the order of a {saved['sampler']}, and now come in the "
                "run's own. Give the DataLoader the same sampler"
            )

    def cursor(self, steps: int) -> int:
        """Return how many samples are seen before the step after `steps` steps of the run."""
        epoch, within = divmod(steps, self.steps_per_epoch)
        return epoch * self.samples + within * self.global_batch_size

    def order(self, epoch: int) -> Indices:
        """Return all sample indices in this epoch's order (int64, shape (samples,))."""
        return self.samples_at(epoch, 0, self.samples)

    def samples_at(self, epoch: int, start: int, stop: int) -> Indices:
        """Return `order(epoch)[start:stop]`, in time and memory of that length.

        Raises ValueError unless 0 <= start <= stop <= samples.
        """
        if not 0 <= start <= stop <= self.samples:
            raise ValueError(f"positions {start} to {stop} of {self.samples} samples")
        return self._between(epoch)(start, stop)

    def global_batches(self, cursor: int) -> Iterator[Indices]:
        """Yield the global batches from `cursor` samples into the run to the end of that epoch.

        The cursor counts samples over all epochs: an epoch begins at `epoch * samples`.
        """
        epoch, start = divmod(cursor, self.samples)
        between, batch = self._between(epoch), self.global_batch_size
        at_once = max(BLOCK // batch, 1) * batch  # small batches one by one would take longer
        for first in range(start, self.samples, at_once):
            stretch = between(first, min(first + at_once, self.samples))
            for position in range(0, len(stretch), batch):
                yield stretch[position : position + batch]

    def _between(self, epoch: int) -> Callable[[int, int], Indices]:
        """Return the function of two positions that returns the samples between them."""
        if not self._shuffle:
            return lambda start, stop: np.arange(start, stop, dtype=np.int64)
        return MergedOrder(
            [Permutation(part, self._seed, (epoch, host)) for host, part in enumerate(self._parts)]
        ).between


class OneForEachRank:
    """The assignment of shares to ranks without virtual workers: share r belongs to rank r."""

    rows = 1  # of sums: all ranks add to one, in the order of the exchange
    table_rows = 1  # of those of a table, which may be large

    def of_rank(self, rank: int) -> Sequence[int]:
        """Return the shares that a rank computes, in order."""
        return (rank,)

    def row(self, share: int) -> int:
        """Return the row to which a share adds its sums."""
        return 0


class Shares(OneForEachRank):
    """The distribution of a global batch over ranks, in contiguous parts.

    Equal weights give parts that differ in length by at most one; other weights give proportional
    parts, rounded so that they always add up to the whole. Parts may be empty.
    """

    slack = 0  # by how many samples a rank's part may fall short of `sizes` in some batch

    def __init__(self, size: int, weights: Sequence[float] | None = None) -> None:
        """Raise ValueError unless `weights` has `size` finite values, not negative, not all 0."""
        self.weights = tuple(weights) if weights is not None else (1.0,) * size
        if len(self.weights) != size:
            raise ValueError(f"{len(self.weights)} weights for {size} ranks")
        total = sum(self.weights)
        if not math.isfinite(total) or min(self.weights) < 0 or total == 0:
            raise ValueError("weights must be finite, not negative, and not all zero")
        self._cumulative = [sum(self.weights[:rank]) / total for rank in range(size + 1)]
        self._cumulative[-1] = 1.0

    def of(self, indices: Indices, rank: int) -> Indices:
        """Return the part of a batch for `rank`. The parts of all ranks make up the batch."""
        part = self.of_all(len(indices), rank)
        return indices[part.start : part.stop]

    def of_all(self, samples: int, rank: int) -> range:
        """Return the part for `rank` of all samples of a split, in the order of their numbers."""
        return range(self._edge(samples, rank), self._edge(samples, rank + 1))

    def sizes(self, length: int) -> list[int]:
        """Return the lengths of all ranks' parts of a batch of `length`, up to `slack`."""
        edges = [self._edge(length, edge) for edge in range(len(self._cumulative))]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    def _edge(self, length: int, edge: int) -> int:
        # The small term makes 1/3 of 3 exactly 1 in spite of rounding.
        return int(length * self._cumulative[edge] + 1e-9)


class PlacedShares(OneForEachRank):
    """The distribution of samples held by single hosts, over the ranks of their host.

    `weights`, `of`, `of_all`, `sizes` and `slack`: as those of `Shares`.
    """

    def __init__(
        self, parts: Sequence[int], host_of_rank: Sequence[int], weights: Sequence[float]
    ) -> None:
        """Raise ValueError for a host that has samples but no weight.

        `parts`: the number of samples on each host. `host_of_rank`: the host of each rank, from 0.
        `weights`: of the ranks, relative to others on the same host.
        """
        self._edges = [0, *itertools.accumulate(parts)]
        # In a batch that spans a fraction dt of the epoch, part p has dt * length_p samples, give
        # or take one; with H parts, its proportion give or take 1 + (H - 2) * length_p / total.
        others = sum(part > 0 for part in parts) - 2
        self.slack = 1 - (-max(parts) * others // sum(parts))
        self._hosts = list(host_of_rank)
        self._local_ranks = [
            self._hosts[:rank].count(host) for rank, host in enumerate(self._hosts)
        ]
        host_weights = [
            [w for w, h in zip(weights, self._hosts, strict=True) if h == host]
            for host in range(len(parts))
        ]
        self._shares = [Shares(len(w), w) for w in host_weights]
        of_host = [part / sum(w) for part, w in zip(parts, host_weights, strict=True)]
        self.weights = tuple(
            weight * of_host[host] for weight, host in zip(weights, self._hosts, strict=True)
        )

    def of(self, indices: Indices, rank: int) -> Indices:
        host = self._hosts[rank]
        on_host = indices[(indices >= self._edges[host]) & (indices < self._edges[host + 1])]
        return self._shares[host].of(on_host, self._local_ranks[rank])

    def of_all(self, samples: int, rank: int) -> range:
        host = self._hosts[rank]
        first, stop = self._edges[host : host + 2]
        part = self._shares[host].of_all(stop - first, self._local_ranks[rank])
        return range(first + part.start, first + part.stop)

    def sizes(self, length: int) -> list[int]:
        edges = [edge * length // self._edges[-1] for edge in self._edges]
        of_host = [stop - start for start, stop in itertools.pairwise(edges)]
        return [
            self._shares[host].sizes(of_host[host])[local_rank]
            for host, local_rank in zip(self._hosts, self._local_ranks, strict=True)
        ]


class VirtualShares:
    """The distribution of a global batch over virtual workers, and of these over ranks.

    The sums of each virtual worker stay apart, so that they are added in the order of the shares
    for any number of ranks. `weights`, `of`, `of_all`, `sizes` and `slack`: those of the virtual
    workers.
    """

    def __init__(self, shares: Shares | PlacedShares, counts: Sequence[int]) -> None:
        """Raise ValueError for `counts`, virtual workers by rank, that do not add up to all."""
        self._shares = shares
        self.rows, self.weights, self.slack = len(shares.weights), shares.weights, shares.slack
        self.table_rows = self.rows
        self.assign(counts)

    def assign(self, counts: Sequence[int]) -> None:
        """Distribute the virtual workers over ranks by `counts` from now on.

        Raises ValueError for counts that do not add up to all.
        """
        if sum(counts) != self.rows:
            raise ValueError(f"{list(counts)} of {self.rows} virtual workers")
        self._starts = [0, *itertools.accumulate(counts)]

    @property
    def counts(self) -> list[int]:
        """Return the number of virtual workers of each rank."""
        return [stop - start for start, stop in itertools.pairwise(self._starts)]

    def of_rank(self, rank: int) -> Sequence[int]:
        return range(*self._starts[rank : rank + 2])

    def row(self, share: int) -> int:
        return share

    def of(self, indices: Indices, share: int) -> Indices:
        return self._shares.of(indices, share)

    def of_all(self, samples: int, share: int) -> range:
        return self._shares.of_all(samples, share)

    def sizes(self, length: int) -> list[int]:
        return self._shares.sizes(length)


class BatchShares:
    """The distribution of the batches of an evaluation over ranks: consecutive ones to each.

    The batches are those of a single process, and the sums of each stay apart. So they are added in
    the order of the batches, for any number of ranks. Tables, which may be large, are added by rank
    first: for counts the order makes no difference.
    """

    table_rows = 1

    def __init__(self, samples: int, batch: int, ranks: int) -> None:
        """Cut so many `samples` of a split into batches of `batch` each, and a smaller last one."""
        self._batch, self.rows = batch, max(1, -(-samples // batch))
        self._by_rank = split_evenly(self.rows, ranks)

    def of_rank(self, rank: int) -> Sequence[int]:
        return range(self._by_rank[rank].start, self._by_rank[rank].stop)

    def row(self, share: int) -> int:
        return share

    def of_all(self, samples: int, share: int) -> range:
        return range(share * self._batch, min(samples, (share + 1) * self._batch))


SharesLike = Shares | PlacedShares | VirtualShares
