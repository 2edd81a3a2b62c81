"""The ring against NumPy's own sum: exactly for integers, within the bound for floats."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import TransportError
from hvdtrain.ring import Transport, all_gather, all_reduce, gamma, reduce_scatter, split_evenly
from tests.rings import (
    LONG,
    LONGEST,
    Counting,
    lengths_for,
    rank_data,
    run_in_process,
    run_tcp_ring,
)

RANKS = (1, 2, 3, 4, 5, 8, 9)
TRANSPORTS = {"in_process": run_in_process, "tcp": run_tcp_ring}


@pytest.mark.parametrize("ring", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("size", RANKS)
def test_integer_sums_are_exact(size: int, ring: Callable) -> None:
    """Fails if a segment is added twice, dropped, or taken from the wrong rank."""
    for length in lengths_for(size):
        data = [rank_data(rank, length, np.int64) for rank in range(size)]
        expected = np.sum(data, axis=0)
        for result in ring(
            size, lambda transport, d=data: all_reduce(d[transport.rank], transport)
        ):
            assert result.dtype == np.int64
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("ring", TRANSPORTS.values(), ids=TRANSPORTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", RANKS)
def test_float_sums_are_within_the_bound(size: int, dtype: type, ring: Callable) -> None:
    """Fails if the sum is off by more than N - 1 roundings of Higham's bound."""
    for length in lengths_for(size):
        data = [rank_data(rank, length, dtype) for rank in range(size)]
        exact = np.sum(np.array(data, dtype=np.longdouble), axis=0)
        magnitudes = np.sum(np.abs(np.array(data, dtype=np.longdouble)), axis=0)
        allowed = gamma(max(size - 1, 1), dtype) * magnitudes
        results = ring(size, lambda transport, d=data: all_reduce(d[transport.rank], transport))
        for result in results:
            assert (np.abs(result - exact) <= allowed).all()
            np.testing.assert_array_equal(result, results[0])  # all ranks hold the same bits


@pytest.mark.parametrize("size", [2, 3, 5])
def test_input_is_not_changed(size: int) -> None:
    """Fails if all_reduce works in its caller's array."""

    def work(transport: Transport) -> bool:
        values = rank_data(transport.rank, 17, np.float64).reshape(17, 1)
        before = values.copy()
        result = all_reduce(values, transport)
        return result.shape == (17, 1) and bool((values == before).all())

    assert all(run_in_process(size, work))


@pytest.mark.parametrize("size", RANKS)
def test_reduce_scatter_leaves_each_rank_its_segment(size: int) -> None:
    """Fails if the segments that ranks finish do not cover the buffer once, with full sums."""
    length = 7 * size + 3
    expected = np.sum([rank_data(rank, length, np.int64) for rank in range(size)], axis=0)

    def work(transport: Transport) -> tuple[slice, np.ndarray]:
        buffer = rank_data(transport.rank, length, np.int64)
        own = reduce_scatter(buffer, split_evenly(length, size), transport)
        return own, buffer[own]

    covered = np.zeros(length, dtype=int)
    for own, values in run_in_process(size, work):
        covered[own] += 1
        np.testing.assert_array_equal(values, expected[own])
    assert (covered == 1).all()


@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_any_uneven_segments_work(cuts: list[int], seed: int) -> None:
    """Fails if the algorithm relies on segments of equal length."""
    size = len(cuts)
    stops = np.cumsum(cuts)
    segments = tuple(
        slice(int(stop - cut), int(stop)) for cut, stop in zip(cuts, stops, strict=True)
    )
    data = np.random.default_rng(seed).integers(-(2**40), 2**40, (size, int(stops[-1])))

    def work(transport: Transport) -> np.ndarray:
        buffer = data[transport.rank].copy()
        reduce_scatter(buffer, segments, transport)
        all_gather(buffer, segments, transport)
        return buffer

    for result in run_in_process(size, work):
        np.testing.assert_array_equal(result, data.sum(axis=0))


@settings(deadline=None)
@given(length=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_segments_are_neighbours_of_equal_length(length: int, parts: int) -> None:
    """Fails if segments overlap, leave gaps, or differ in length by more than one."""
    segments = split_evenly(length, parts)
    sizes = [part.stop - part.start for part in segments]
    assert len(segments) == parts
    assert segments[0].start == 0
    assert segments[-1].stop == length
    assert all(a.stop == b.start for a, b in itertools.pairwise(segments))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("length", "parts"), [(-1, 2), (5, 0)])
def test_impossible_segments_are_refused(length: int, parts: int) -> None:
    """Fails if nonsense is cut silently."""
    with pytest.raises(ValueError, match="cannot cut"):
        split_evenly(length, parts)


def test_bytes_on_the_wire_are_the_rings() -> None:
    """Fails if a rank sends other than 2 (N - 1) messages of 1 / N of the buffer each."""
    size, length = 4, 4 * 250

    def sent_by(transport: Transport) -> list[int]:
        counting = Counting(transport)
        all_reduce(rank_data(transport.rank, length, np.float32), counting)
        return counting.sent

    sent = run_in_process(size, sent_by)
    assert sent == [[4 * 250] * (2 * (size - 1))] * size


def test_a_message_of_the_wrong_length_is_refused() -> None:
    """Fails if ranks with different buffer lengths are summed as if nothing were wrong."""
    with pytest.raises(TransportError, match="bytes where"):
        run_in_process(2, lambda t: all_reduce(np.ones(10 + 4 * t.rank), t))


def test_the_long_length_divides_by_no_rank_count() -> None:
    """Fails if the long test length stops being an uneven one for some N."""
    assert all(LONG % size and LONGEST % size for size in RANKS if size > 1)
