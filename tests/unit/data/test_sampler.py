"""Which samples make a step, and which of them a rank gets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data import GlobalBatchSampler, Shares

SAMPLES = st.integers(1, 300)
BATCHES = st.integers(1, 400)
SEEDS = st.integers(0, 2**63 - 1)
LENGTHS = st.integers(0, 200) | st.integers(0, 10**6)
WEIGHTS = st.lists(
    st.just(0.0) | st.floats(1e-6, 1e6) | st.integers(1, 9).map(float), min_size=1, max_size=40
).filter(any)


@settings(deadline=None)
@given(samples=SAMPLES, batch=BATCHES, seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_covers_every_sample_once(samples: int, batch: int, seed: int, epoch: int) -> None:
    """Fails when a sample is dropped, padded or repeated, or a batch before the last is short."""
    sampler = GlobalBatchSampler(samples, batch, seed)
    batches = list(sampler.global_batches(epoch * samples))
    assert sorted(np.concatenate(batches)) == list(range(samples))
    assert len(batches) == sampler.steps_per_epoch
    assert [len(part) for part in batches[:-1]] == [batch] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= batch


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    """Fails when the batch size or an earlier epoch changes the order, or a seed does not."""
    sampler, other = GlobalBatchSampler(500, 7, 3), GlobalBatchSampler(500, 500, 3)
    list(other.global_batches(0))
    orders = [tuple(sampler.order(epoch)) for epoch in (0, 1, 2)]
    again = [tuple(np.concatenate(list(other.global_batches(e * 500)))) for e in (0, 1, 2)]
    assert again == orders
    orders += [tuple(GlobalBatchSampler(500, 7, seed).order(0)) for seed in (0, 1, 4, 2**63 - 1)]
    assert len(set(orders)) == 7
    assert tuple(range(500)) not in orders


@settings(deadline=None)
@given(samples=st.integers(1, 60), batch=st.integers(1, 80), seed=SEEDS, epoch=st.integers(0, 50))
def test_the_cursor_is_the_whole_state(samples: int, batch: int, seed: int, epoch: int) -> None:
    """Fails when starting at any border of two batches gives other batches than going on."""

    def batches(cursor: int, wanted: int) -> list[tuple[int, ...]]:
        sampler = GlobalBatchSampler(samples, batch, seed)
        found: list[tuple[int, ...]] = []
        while len(found) < wanted:  # as the training loop does, over the epochs' borders
            for indices in sampler.global_batches(cursor):
                found.append(tuple(indices))
                cursor += len(indices)
        return found[:wanted]

    steps = 3 * GlobalBatchSampler(samples, batch, seed).steps_per_epoch
    undisturbed = batches(epoch * samples, steps)
    cursors = itertools.accumulate((len(part) for part in undisturbed), initial=epoch * samples)
    for done, cursor in zip(range(steps), cursors, strict=False):
        assert batches(cursor, steps - done) == undisturbed[done:]


def test_samples_come_in_order_without_shuffling() -> None:
    """Fails if samples that are read in order are shuffled in any epoch, or parts are taken."""
    sampler = GlobalBatchSampler(10, 4, 3, shuffle=False)
    assert [batch.tolist() for batch in sampler.global_batches(4 * 10 + 4)] == [
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert sampler.order(7).tolist() == list(range(10))
    with pytest.raises(ValueError, match="parts of hosts are shuffled"):
        GlobalBatchSampler(10, 4, 3, [5, 5], shuffle=False)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 9), (3, 8), (8, 9), (9, 9)])
def test_samples_at_positions_are_those_of_the_order(start: int, stop: int) -> None:
    """Fails if a stretch is another one, or positions beyond the epoch are taken."""
    sampler = GlobalBatchSampler(9, 4, 3)
    expected = sampler.order(2)[start:stop]
    np.testing.assert_array_equal(sampler.samples_at(2, start, stop), expected)
    for ends in ((start - 10, stop), (start, stop + 10), (stop + 1, start)):
        with pytest.raises(ValueError, match="of 9 samples"):
            sampler.samples_at(2, *ends)


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_sampler_refuses_nothing_to_sample(samples: int, batch: int) -> None:
    """Fails when an empty set or batch makes an endless or empty epoch."""
    with pytest.raises(ValueError):
        GlobalBatchSampler(samples, batch, 0)


@settings(deadline=None)
@given(length=st.integers(0, 10**6), size=st.integers(1, 40))
def test_equal_shares_differ_by_at_most_one(length: int, size: int) -> None:
    """Fails when without weights, or with equal ones, one rank has two more than another."""
    lengths = Shares(size).sizes(length)
    assert sum(lengths) == length and len(lengths) == size
    assert max(lengths) - min(lengths) <= 1
    assert lengths.count(0) == max(0, size - length)
    assert Shares(size, [0.1] * size).sizes(length) == lengths


@settings(deadline=None)
@given(length=st.integers(0, 200), weights=WEIGHTS)
def test_shares_make_up_the_global_batch(length: int, weights: list[float]) -> None:
    """Fails when ranks miss or repeat a sample, or the sizes are not those of the parts."""
    indices = np.arange(length, dtype=np.int64) * 1000 + 7
    shares = Shares(len(weights), weights)
    parts = [shares.of(indices, rank) for rank in range(len(weights))]
    np.testing.assert_array_equal(np.concatenate(parts), indices)
    assert [len(part) for part in parts] == shares.sizes(length)


@settings(deadline=None)
@given(length=LENGTHS, weights=WEIGHTS)
def test_shares_are_in_proportion(length: int, weights: list[float]) -> None:
    """Fails when a part is a sample or more from its proportion, or a weight of zero gets one."""
    sizes = Shares(len(weights), weights).sizes(length)
    assert sum(sizes) == length and min(sizes) >= 0
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - length * weight / math.fsum(weights)) < 1 + 1e-6
        assert weight > 0 or size == 0


def test_whole_proportions_are_met_exactly() -> None:
    """Fails when rounding takes a sample from a proportion that is a whole number."""
    for size in range(1, 60):
        for each in (1, 2, 7):
            assert Shares(size).sizes(size * each) == [each] * size
    assert Shares(3, [1, 1, 2]).sizes(100) == [25, 25, 50]
    assert Shares(4, [0.1, 0.2, 0.3, 0.4]).sizes(10) == [1, 2, 3, 4]
    assert Shares(3, [0, 1, 0]).sizes(5) == [0, 5, 0]


@pytest.mark.parametrize(
    ("size", "weights"),
    [
        *((2, [1]), (2, [1, 1, 1]), (2, [0, 0]), (2, [1, -1]), (2, [2, -1]), (0, [])),
        *((2, [1, math.nan]), (2, [1, math.inf]), (2, [math.inf, -math.inf]), (0, None)),
        (2, [1e308, 1e308]),
    ],
)
def test_bad_weights_are_refused(size: int, weights: list[float] | None) -> None:
    """Fails when weights that share nothing out are taken, or end in another error."""
    with pytest.raises(ValueError):
        Shares(size, weights)
