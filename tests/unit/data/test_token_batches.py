"""Batches of sequences by a number of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import hvdtrain
from hvdtrain import TokenBatches
from hvdtrain.data import Shares
from hvdtrain.errors import UsageError

TOKENS = 4096
LENGTHS = np.random.default_rng(3).lognormal(5, 0.9, 2000).astype(int).clip(1, TOKENS)
UNEVEN = np.array([TOKENS // 2 + 1] * 50 + [TOKENS] * 3 + [1] * 40 + [TOKENS // 3] * 20)


def epochs_of(batches: TokenBatches, seed: int = 0) -> list[list[list[int]]]:
    torch.manual_seed(seed)
    return [list(batches) for _ in range(3)]


@pytest.mark.parametrize("lengths", [LENGTHS, UNEVEN], ids=["usual", "uneven"])
@pytest.mark.parametrize("buckets", [1, 7, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_every_epoch_has_all_samples_within_the_budget(
    packed: bool, buckets: int, lengths: np.ndarray
) -> None:
    """Fails if a batch exceeds the tokens that were asked for, a sample is lost or repeated, or the
    number of batches, which the length of a schedule depends on, changes from epoch to epoch.
    """
    batches = TokenBatches(lengths, TOKENS, packed, buckets)
    for epoch in epochs_of(batches):
        assert len(epoch) == len(batches)
        assert sorted(number for batch in epoch for number in batch) == list(range(len(lengths)))
        for batch in epoch:
            own = lengths[batch]
            assert 0 < (own.sum() if packed else len(own) * own.max()) <= TOKENS


@pytest.mark.parametrize("rest", [1, 7, 20, 39])
def test_the_last_batch_is_not_short(rest: int) -> None:
    """Fails if a step is made of a few samples, always of the shortest."""
    sizes = [len(batch) for batch in TokenBatches([10] * (80 + rest), 400)]
    assert sorted(sizes) == sorted([40, (41 + rest) // 2, (40 + rest) // 2])


def test_batches_are_well_filled() -> None:
    """Fails if many more tokens are padded, or many more batches made, than lengths demand: by
    ranges of 1/16, 3 % on average.
    """
    packed, padded = TokenBatches(LENGTHS, TOKENS, packed=True), TokenBatches(LENGTHS, TOKENS)
    least = LENGTHS.sum() / TOKENS
    assert len(packed) < 1.05 * least + 1
    assert len(padded) < 1.15 * least + 1
    totals = [LENGTHS[batch].sum() for batch in epochs_of(packed)[0]]
    assert min(totals) > 0.9 * max(totals)
    own = [LENGTHS[batch] for batch in epochs_of(padded)[0]]
    assert sum(len(it) * it.max() - it.sum() for it in own) < 0.06 * LENGTHS.sum()


@pytest.mark.parametrize("packed", [False, True])
def test_samples_meet_others_in_each_epoch(packed: bool) -> None:
    """Fails if only the order of batches is drawn, or the seed does not matter."""
    batches = TokenBatches(LENGTHS, TOKENS, packed)
    first, second, _ = epochs_of(batches)
    other = epochs_of(batches, seed=1)[0]
    assert epochs_of(batches)[0] == first
    sets = [{frozenset(batch) for batch in epoch if len(batch) > 2} for epoch in (first, second)]
    assert len(sets[0] & sets[1]) < 0.2 * len(batches)
    assert other != first
    sizes = [[len(batch) for batch in epoch] for epoch in (first, second)]
    assert sizes[0] != sizes[1] and sorted(sizes[0]) == sorted(sizes[1])


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_shares_have_about_as_many_tokens(workers: int) -> None:
    """Fails if a worker gets the long samples of packed batches, and the others wait for it."""
    lengths = LENGTHS.clip(1, 400)
    for batch in epochs_of(TokenBatches(lengths, 8 * TOKENS, packed=True))[0]:
        shares = [Shares(workers).of(lengths[batch], rank).sum() for rank in range(workers)]
        assert max(shares) < 1.15 * np.mean(shares)


@pytest.mark.parametrize("kind", [list, tuple, iter, torch.tensor, np.uint16])
def test_lengths_of_any_kind(kind: Any) -> None:
    """Fails if lengths that are no list are refused, or read otherwise."""
    torch.manual_seed(0)
    expected = list(TokenBatches(LENGTHS, TOKENS))
    torch.manual_seed(0)
    assert list(TokenBatches(kind(LENGTHS.tolist()), TOKENS)) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([5, 9, 7], 8), r"sample 1 has 9 tokens, more than tokens=8 of a global batch: truncate"),
        (([5, 0], 8), "sample 1 has 0 tokens: leave it out"),
        (([9, -1], 8), r"sample 0 has 9 tokens[\s\S]*sample 1 has -1 tokens"),
        (([], 8), "lengths must be integers, one for each sample of the data set: got a list"),
        (([1.5], 8), "got a list of type float64"),
        (([[1, 2]], 8), r"shape \[1, 2\]"),
        ((["a"], 8), "got a list of type <U1"),
        (([1], 0), "tokens=0: must be an integer of at least 1"),
        (([1], 8.0), "tokens=8.0: must"),
        (([1], True), "tokens=True: must"),
        (([1], 8, False, 0), "buckets=0: must"),
    ],
)
def test_what_makes_no_batches_is_refused(arguments: Any, text: str) -> None:
    """Fails if bad input is an error of NumPy, an endless loop, or a batch above the budget."""
    with pytest.raises(UsageError, match=text):
        TokenBatches(*arguments)


def test_lengths_of_another_data_set_are_refused() -> None:
    """Fails if samples without a length are left out of every epoch unnoticed."""
    loader = DataLoader(torch.arange(12), batch_sampler=TokenBatches([3] * 11, 8))
    with pytest.raises(UsageError, match="the lengths of 11 samples, and its data set has 12"):
        hvdtrain.split_of(loader)
