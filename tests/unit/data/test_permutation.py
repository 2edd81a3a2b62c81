"""The computed order of samples: a permutation, an even one, and the same in every stretch.

Each statistic is standardised; with these seeds it is always the same, and LIMIT leaves out one
honest shuffle in thirty thousand.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data.permutation import BLOCK, MOST, Indices, MergedOrder, Permutation

SIZES = (1, 2, 3, 10, 97, 1000)
LIMIT = 4.0
SEEDS = 2000


def whole(length: int, seed: int, epoch: int = 0) -> Indices:
    return Permutation(length, seed, (epoch, 0)).between(0, length)


def deviation(counts: Sequence[int] | Indices, expected: float, freedom: int) -> float:
    """Return chi-square over all cells, in standard deviations from its mean."""
    chi_square = float(((np.asarray(counts) - expected) ** 2).sum() / expected)
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [*SIZES, 16, 101, BLOCK + 1])
def test_every_number_comes_once(length: int) -> None:
    """Fails if a number is missing or repeated, with any of these seeds, in any of these epochs."""
    seeds = (*range(40), 2**32, 2**63 - 1) if length <= 1000 else (0, 1)
    orders = [whole(length, seed, epoch) for seed in seeds for epoch in range(3)]
    for order in orders:
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(length))
    if length >= 97:
        assert len({order.tobytes() for order in orders}) == len(orders)


@pytest.mark.parametrize("length", [0, 1, 5, 1000, 3 * BLOCK, 10**9, 10**12, MOST])
def test_a_stretch_is_that_of_the_whole(length: int) -> None:
    """Fails if numbers depend on where a call starts or stops, are out of range, or repeat."""
    order = Permutation(length, 3, (1, 2))
    ends = [0, *(length * part // 7 for part in range(8)), length]
    for start in ends:
        stop = min(start + BLOCK + 70, length)
        found = order.between(start, stop)
        assert len(set(found.tolist())) == len(found) == stop - start
        assert len(found) == 0 or 0 <= found.min() <= found.max() < length
        cuts = sorted({start, *(min(start + it, stop) for it in (1, 8, 300, BLOCK)), stop})
        parts = [order.between(*pair) for pair in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate([found[:0], *parts]), found)


def test_more_numbers_than_fit_are_refused() -> None:
    """Fails if products overflow without notice."""
    with pytest.raises(ValueError, match=r"at most 2\^62"):
        Permutation(MOST + 1, 0, ())


@pytest.mark.parametrize("length", [2, 3, 10, 97])
def test_every_number_comes_at_every_place_as_often(length: int) -> None:
    """Fails if over many seeds a number, such as 0, prefers a place."""
    orders = np.stack([whole(length, seed) for seed in range(SEEDS)])
    counts = np.stack([(orders == number).sum(0) for number in range(length)])
    expected = SEEDS / length
    assert abs(deviation(counts, expected, (length - 1) ** 2)) < LIMIT
    assert abs(deviation(counts[0], expected, length - 1)) < LIMIT


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_order_comes_as_often(length: int) -> None:
    """Fails if some orders of a few numbers never come, or come too often."""
    orders = Counter(tuple(whole(length, 7, epoch).tolist()) for epoch in range(SEEDS))
    count = math.factorial(length)
    assert len(orders) == count
    assert abs(deviation(list(orders.values()), SEEDS / count, count - 1)) < LIMIT


@pytest.mark.parametrize("length", [97, 1000, 1024])
def test_neighbours_are_unrelated(length: int) -> None:
    """Fails if the distance to the next number, or to that of the next epoch at the same place, is
    more often some than another; or if numbers correlate with places or with the next number.
    """
    seeds = range(200)
    orders = np.stack([whole(length, seed) for seed in seeds])
    later = np.stack([whole(length, seed, 1) for seed in seeds])
    along = np.broadcast_to(np.arange(length), orders.shape)
    pairs = {
        "next": (orders[:, :-1], orders[:, 1:]),
        "second": (orders[:, :-2], orders[:, 2:]),
        "next epoch": (orders, later),
        "next seed": (orders[:-1], orders[1:]),
        "place": (along, orders),
    }
    for name, (one, other) in pairs.items():
        distances = np.bincount(((other - one) % length).ravel(), minlength=length)
        # Two numbers of one order are never the same.
        cells = distances[1:] if name in ("next", "second") else distances
        assert abs(deviation(cells, one.size / len(cells), len(cells) - 1)) < LIMIT, name
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1] * math.sqrt(one.size)
        assert abs(correlation) < LIMIT, name


def merged_at_once(orders: Sequence[Permutation]) -> Indices:
    """Return the merged order by its definition: all samples of all parts, sorted by time."""
    wholes = [order.between(0, order.length) for order in orders]
    times = np.concatenate([(np.arange(len(it)) + 0.5) / max(len(it), 1) for it in wholes])
    starts = itertools.accumulate((len(it) for it in wholes[:-1]), initial=0)
    numbers = np.concatenate([it + start for it, start in zip(wholes, starts, strict=True)])
    return numbers[np.argsort(times, kind="stable")]


PARTS = st.lists(st.sampled_from([0, 1, 2, 60]) | st.integers(0, 200), min_size=1, max_size=9)


@settings(deadline=None, max_examples=150)
@given(PARTS.filter(any), st.data())
def test_parts_are_merged_by_time(lengths: list[int], data) -> None:
    """Fails if any stretch of the merged order is not that of all samples sorted at once."""
    orders = [Permutation(length, 5, (0, part)) for part, length in enumerate(lengths)]
    expected = merged_at_once(orders)
    merged = MergedOrder(orders)
    np.testing.assert_array_equal(merged.between(0, merged.length), expected)
    start, stop = sorted(data.draw(st.integers(0, merged.length)) for _ in range(2))
    np.testing.assert_array_equal(merged.between(start, stop), expected[start:stop])


def test_parts_of_any_length_are_merged() -> None:
    """Fails if a stretch of large parts depends on where a call starts, or lacks proportion."""
    lengths = (10**9, 7, 3 * 10**9, 1)
    merged = MergedOrder([Permutation(it, 5, (0, part)) for part, it in enumerate(lengths)])
    for start in (0, 10**9 + 1, merged.length // 2 - 500, merged.length - 4000):
        found = merged.between(start, start + 4000)
        cuts = range(start, start + 4001, 50)
        parts = [merged.between(*pair) for pair in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), found)
        assert abs((found < 10**9).sum() - 1000) <= len(lengths)
