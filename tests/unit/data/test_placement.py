"""Each host holds a part of the samples: who takes which of them, and in what proportion."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.data import GlobalBatchSampler, PlacedShares, TensorSplit
from hvdtrain.data.feeding import PartSplit, stream
from tests.unit.jobs import made_up_data

PARTS = st.lists(st.sampled_from([0, 1, 2]) | st.integers(0, 120), min_size=1, max_size=6)
RANKS = st.lists(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), min_size=6, max_size=6)


def sampler_of(parts: list[int], batch: int, seed: int = 0) -> GlobalBatchSampler:
    return GlobalBatchSampler(sum(parts), batch, seed, parts)


def hosts_of(parts: list[int], weights: list[list[float]]) -> list[int]:
    return [host for host in range(len(parts)) for _ in weights[host]]


@settings(deadline=None, max_examples=60)
@given(PARTS.filter(any), RANKS, st.integers(1, 90), st.integers(0, 99))
def test_every_sample_goes_once_to_its_own_host(parts, weights, batch: int, epoch: int) -> None:
    """Fails when a sample is lost, repeated or given to a rank that cannot read it, or when a rank
    gets fewer samples than `sizes` less `slack`, which batch norm relies on.
    """
    sampler, hosts = sampler_of(parts, batch), hosts_of(parts, weights)
    flat = list(itertools.chain.from_iterable(weights[: len(parts)]))
    shares = PlacedShares(parts, hosts, flat)
    edges = [0, *itertools.accumulate(parts)]
    seen = []
    for indices in sampler.global_batches(epoch * sampler.samples):
        sizes = shares.sizes(len(indices))
        assert sum(sizes) == len(indices) and min(sizes) >= 0
        for rank, host in enumerate(hosts):
            own = shares.of(indices, rank)
            assert all(edges[host] <= index < edges[host + 1] for index in own)
            assert len(own) >= sizes[rank] - shares.slack
            seen += own.tolist()
    assert sorted(seen) == list(range(sum(parts)))
    assert len(shares.weights) == len(hosts)
    of_hosts = [
        math.fsum(weight for weight, h in zip(shares.weights, hosts, strict=True) if h == host)
        for host in range(len(parts))
    ]
    assert of_hosts == pytest.approx(parts)


@settings(deadline=None, max_examples=60)
@given(PARTS.filter(any), st.integers(1, 90), st.integers(0, 9))
def test_batches_hold_each_part_in_proportion(parts, batch: int, seed: int) -> None:
    """Fails when hosts fall behind one another. Of one or two parts the bound is one sample."""
    sampler = sampler_of(parts, batch, seed)
    edges, there = np.cumsum([0, *parts]), sum(part > 0 for part in parts)
    for indices in sampler.global_batches(0):
        held = np.diff(np.searchsorted(np.sort(indices), edges))
        exact = np.array(parts) * len(indices) / sampler.samples
        bound = 1 + max(parts) / sampler.samples * (there - 2)
        assert np.abs(held - exact).max() <= bound + 1e-9


@settings(deadline=None, max_examples=40)
@given(PARTS.filter(any), st.integers(1, 90), st.data())
def test_ranks_of_a_host_make_no_difference(parts, batch: int, data) -> None:
    """Fails when a host's samples in a batch depend on how many ranks share them, or how."""
    per_host = [data.draw(st.integers(1, 4)) for _ in parts]
    weights = [[float(rank + 1) for rank in range(ranks)] for ranks in per_host]
    hosts = hosts_of(parts, weights)
    alone = PlacedShares(parts, range(len(parts)), [1.0] * len(parts))
    shared = PlacedShares(parts, hosts, list(itertools.chain.from_iterable(weights)))
    for indices in sampler_of(parts, batch).global_batches(0):
        for host in range(len(parts)):
            together = [shared.of(indices, r) for r, h in enumerate(hosts) if h == host]
            np.testing.assert_array_equal(np.concatenate(together), alone.of(indices, host))


@pytest.mark.parametrize(
    ("parts", "slack"), [([9], 0), ([9, 0], 0), ([9, 5], 1), ([8] * 8, 2), ([90, 1, 1, 1], 3)]
)
def test_slack_follows_from_the_parts(parts: list[int], slack: int) -> None:
    """Fails when it is less than what batches lack at worst, or more than parts can explain."""
    assert PlacedShares(parts, range(len(parts)), [1.0] * len(parts)).slack == slack


def test_the_order_differs_by_epoch_and_seed() -> None:
    """Fails when parts come in the same order in each epoch, or the seed does not matter."""
    parts = [40, 25, 1]
    orders = {tuple(sampler_of(parts, 8, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert {tuple(sampler_of(parts, size).order(1)) for size in (1, 8, 66)} < orders


@pytest.mark.parametrize("parts", [(3, 4), (8, 3), (11,)])
def test_parts_must_add_up(parts: tuple[int, ...]) -> None:
    """Fails when a sampler is made over other samples than the hosts hold."""
    with pytest.raises(ValueError, match="of 10 samples"):
        GlobalBatchSampler(10, 2, 0, parts)


def test_a_host_with_samples_needs_weight() -> None:
    """Fails when samples of a host whose ranks all have weight zero would never be seen."""
    with pytest.raises(ValueError):
        PlacedShares([5, 5], [0, 0, 1], [1.0, 2.0, 0.0])


def test_a_part_reads_its_own_samples_only() -> None:
    """Fails when a number is mapped to another sample of the part, or one of another host read."""
    whole = made_up_data(20).train
    assert isinstance(whole, TensorSplit)
    part = PartSplit(TensorSplit(whole.inputs[6:11], whole.labels[6:11]), 6, 20)
    assert len(part) == 20 and not part.may_skip
    indices = np.array([10, 6, 8])
    expected = whole.inputs[indices]
    assert part.batch(indices)[0].equal(expected)
    (loaded, empty) = stream(part, [indices, indices[:0]], 0)
    assert loaded.batch[0].equal(expected) and (loaded.samples, empty.samples) == (3, 0)
    for foreign in ([5, 7], [11], [-1], [6, 19]):
        with pytest.raises(IndexError, match="of a part of 5"):
            part.batch(np.array(foreign))
