"""Global batches of sequences, by a number of tokens: for `DataLoader(batch_sampler=...)`.

Lengths are divided into ranges. How many samples of each range stand in each batch is computed
once; which of them is drawn for each epoch. So all epochs have as many batches, as a schedule of
the learning rate and a resumed run need, and none of them exceeds the budget.
"""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError, every_problem, refuse

GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, spread evenly wherever they are cut


class TokenBatches(Sampler[list[int]]):
    """A batch sampler of sequences whose lengths differ.

        batches = hvdtrain.TokenBatches(lengths, tokens=8192)
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=...)

    The batches are drawn from torch's global random generator, which `hvdtrain.Loop` seeds for each
    epoch. Within a batch, short and long samples alternate, so that workers whose shares have
    equal numbers of samples have about equal numbers of tokens.
    """

    def __init__(
        self, lengths: Iterable[int], tokens: int, packed: bool = False, buckets: int = 16
    ) -> None:
        """Raise UsageError for lengths that are no positive integers, or for one above `tokens`.

        `lengths`: the number of tokens of each sample of the data set. `tokens`: the most in a
        global batch, over all workers, and padding counts: each sample is as long as the longest.
        Samples of a batch have about the same length. `packed`: nothing is padded, so that only the
        samples' own tokens count; samples of all lengths stand in a batch, and batches have about
        equal numbers of tokens. `buckets`: number of ranges of lengths between a length and its
        double; with more of them less padding is needed, and fewer samples are interchangeable.
        """
        refuse(
            f"hvdtrain.TokenBatches: {name}={value!r}: must be an integer of at least 1"
            for name, value in (("tokens", tokens), ("buckets", buckets))
            if type(value) is not int or value < 1
        )
        self.lengths = _checked(lengths, tokens)
        self._rounded = np.minimum(_round_up(self.lengths, buckets), tokens)
        longest_first = np.sort(self._rounded)[::-1]
        self._batches = (_packed if packed else _padded)(longest_first, tokens)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.randperm(len(self.lengths)).numpy()
        longest_first = drawn[np.argsort(-self._rounded[drawn], kind="stable")]
        for number in torch.randperm(len(self._batches)).tolist():
            batch = longest_first[self._batches[number]]
            yield batch[np.argsort(np.arange(len(batch)) * GOLDEN % 1.0)].tolist()


def _checked(lengths: Iterable[int], tokens: int) -> Indices:
    """Return lengths as an array. Raises UsageError."""
    values: Any = np.asarray(lengths if hasattr(lengths, "__len__") else list(lengths))
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise UsageError(
            "hvdtrain.TokenBatches: lengths must be integers, one for each sample of the data set: "
            f"got a {type(lengths).__name__} of type {values.dtype} and shape {list(values.shape)}"
        )
    shortest, longest = int(np.argmin(values)), int(np.argmax(values))
    refuse(
        f"hvdtrain.TokenBatches: {problem}"
        for problem in every_problem(
            (
                values[longest] > tokens,
                f"sample {longest} has {values[longest]:,} tokens, more than {tokens=} of a "
                "global batch: truncate or split it, leave it out of the data set, or raise tokens",
            ),
            (
                values[shortest] < 1,
                f"sample {shortest} has {values[shortest]} tokens: leave it out of the data set",
            ),
        )
    )
    return np.array(values, np.int64)


def _round_up(lengths: Indices, buckets: int) -> Indices:
    """Return the longest length of the range of each length."""
    power = 1 << (np.frexp(lengths)[1].astype(np.int64) - 1)  # of two, up to the length
    number = -(-lengths * buckets // power)
    return np.asarray(number * power // buckets, np.int64)


def _padded(lengths: Indices, tokens: int) -> list[Indices]:
    """Return the positions of the samples of each batch, of lengths that descend."""
    edges = [0]
    while edges[-1] < len(lengths):
        edges.append(edges[-1] + tokens // int(lengths[edges[-1]]))
    edges[-1] = len(lengths)
    if len(edges) > 2:  # the last batch may be short: both of the last two have half
        edges[-2] = min(edges[-2], (edges[-3] + edges[-1] + 1) // 2)
    return np.split(np.arange(len(lengths)), edges[1:-1])


def _packed(lengths: Indices, tokens: int) -> list[Indices]:
    """Return the positions of the samples of each batch, of lengths that descend.

    Each sample is added to the batch that has the fewest tokens, of as few batches as that needs.
    """
    batch_of = np.empty(len(lengths), np.int64)
    batches = -(-int(lengths.sum()) // tokens)
    while True:
        totals = [(0, number) for number in range(batches)]  # a heap
        for position, length in enumerate(lengths.tolist()):
            total, number = totals[0]
            if total + length > tokens:
                break
            heapq.heapreplace(totals, (total + length, number))
            batch_of[position] = number
        else:
            edges = np.cumsum(np.bincount(batch_of, minlength=batches))[:-1]
            return np.split(np.argsort(batch_of, kind="stable"), edges)
        batches += max(batches // 64, 1)
