"""Every operation and type of the ring, its pieces, and what it does with memory."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hvdtrain.ring import Transport, all_gather, all_reduce, broadcast, gather, reduce_scatter
from hvdtrain.ring import algorithm as ring_algorithm
from hvdtrain.ring.bound import (
    average_error_bound,
    error_over_bound,
    finite_magnitudes,
    gamma,
    may_overflow,
)
from hvdtrain.ring.operations import DTYPES, OPERATIONS, split_evenly
from tests.ring_trace import simulate_all_reduce
from tests.rings import rank_data, run_in_process

FLOATS = [dtype for dtype in DTYPES if dtype.kind == "f"]
INTEGERS = [dtype for dtype in DTYPES if dtype.kind == "i"]
SIZES = (1, 2, 3, 5)


@st.composite
def terms(draw: st.DrawFn, dtypes: list[np.dtype], finite: bool = False) -> np.ndarray:
    """One row a rank: any numbers of the type, many of them special, or (with floats) cancelling.

    `finite`: so small that no sum passes the largest number.
    """
    dtype = draw(st.sampled_from(dtypes))
    shape = (draw(st.integers(1, 9)), draw(st.integers(0, 20)))
    if dtype.kind == "i":
        return draw(npst.arrays(dtype, shape))
    largest = float(np.finfo(dtype).max) / 16 if finite else None
    elements = st.floats(
        min_value=-largest if finite else None,
        max_value=largest,
        width=8 * dtype.itemsize,
        allow_nan=not finite,
        allow_infinity=not finite,
    )
    rows = draw(npst.arrays(dtype, shape, elements=elements))
    if shape[0] > 2 and draw(st.booleans()):
        rows[1] = -rows[0]  # what is left after cancellation is small beside the bound
    return rows


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(rows=terms(INTEGERS))
@settings(max_examples=40, deadline=None)
def test_integers_are_exact_for_every_operation(rows: np.ndarray) -> None:
    """Fails if sum (modulo overflow), truncated average, min or max is off by one anywhere."""
    total = rows.sum(axis=0, dtype=rows.dtype)
    cut_off = [int(Fraction(value, len(rows))) for value in total.tolist()]
    expected = {
        "sum": total,
        "average": np.array(cut_off, rows.dtype),
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
    }
    for op in OPERATIONS:
        for result in simulate_all_reduce(rows, op):
            assert same_bits(result, expected[op]), op


@given(rows=terms(FLOATS, finite=True))
@settings(max_examples=50, deadline=None)
def test_float_sums_and_averages_are_within_the_bound(rows: np.ndarray) -> None:
    """Fails if an exact sum is further away than N - 1 roundings, or an average than the audit's
    bound; or if ranks end with different bits.
    """
    size = len(rows)
    sums, averages = simulate_all_reduce(rows), simulate_all_reduce(rows, "average")
    assert all(same_bits(result, sums[0]) for result in sums)
    assert all(same_bits(result, averages[0]) for result in averages)
    for column in range(rows.shape[1]):
        column_terms = [Fraction(float(value)) for value in rows[:, column]]
        error = abs(Fraction(float(sums[0][column])) - sum(column_terms))
        smallest = Fraction(float(np.finfo(rows.dtype).smallest_subnormal))
        allowed = Fraction(gamma(max(size - 1, 1), rows.dtype)) * sum(map(abs, column_terms))
        assert error <= allowed + size * smallest
    assert (_ratios(rows, averages[0].astype(np.float64)) <= 1).all()


@given(
    rows=terms(FLOATS, finite=True).filter(lambda rows: rows.size and len(rows) > 1),
    place=st.integers(0, 19),
    sign=st.sampled_from([-1, 1]),
)
@settings(max_examples=50, deadline=None)
def test_an_error_of_eight_bounds_in_a_ring_average_is_found(
    rows: np.ndarray, place: int, sign: int
) -> None:
    """Fails if the bound is so loose, for any type, that eight times its size passes."""
    column = place % rows.shape[1]
    average = simulate_all_reduce(rows, "average")[0].astype(np.float64)
    magnitudes = np.abs(rows.astype(np.float64)).sum(axis=0)
    average[column] += sign * 8 * average_error_bound(magnitudes, len(rows), rows.dtype)[column]
    assert _ratios(rows, average)[column] > 1


def _ratios(rows: np.ndarray, average: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    magnitudes = finite_magnitudes(wide).sum(axis=0)
    bound = average_error_bound(magnitudes, len(rows), rows.dtype)
    overflow = may_overflow(magnitudes, len(rows), rows.dtype)
    return error_over_bound(average, wide.sum(axis=0) / len(rows), bound, overflow)


@given(rows=terms(FLOATS))
@settings(max_examples=40, deadline=None)
def test_min_and_max_are_exact_and_hand_on_nan(rows: np.ndarray) -> None:
    """Fails if a rounded value results, or if a NaN of any one rank gets lost."""
    for op, expected in (("min", rows.min(axis=0)), ("max", rows.max(axis=0))):
        results = simulate_all_reduce(rows, op)
        np.testing.assert_array_equal(results[0], expected)  # NaN equals NaN here
        assert all(same_bits(result, results[0]) for result in results)


@given(rows=terms(FLOATS))
@settings(max_examples=40, deadline=None)
def test_infinities_and_nan_come_out_of_sums(rows: np.ndarray) -> None:
    """Fails if a sum of values that are not finite ends finite, or warns."""
    with np.errstate(all="ignore"):
        expected = rows.astype(np.float64).sum(axis=0)
        certain = ~np.isfinite(rows).all(axis=0)  # overflow depends on the order
    result = simulate_all_reduce(rows)[0].astype(np.float64)
    np.testing.assert_array_equal(result[certain], expected[certain])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_pieces_compose_and_work_in_place(size: int, dtype: np.dtype) -> None:
    """Fails if reduce-scatter and all-gather together, or working in place, differ in any bit."""
    for length in (0, 1, size - 1, 4 * size + 1):

        def work(transport: Transport, op: str, length: int = length) -> bool:
            values = rank_data(transport.rank, length, dtype)
            whole = all_reduce(values, transport, op)
            assert same_bits(values, rank_data(transport.rank, length, dtype))
            pieces = values.copy()
            segments = split_evenly(length, size)
            reduce_scatter(pieces, segments, transport, op)
            all_gather(pieces, segments, transport)
            assert all_reduce(values, transport, op, out=values) is values
            return same_bits(whole, pieces) and same_bits(whole, values)

        for op in OPERATIONS:
            assert all(run_in_process(size, lambda transport, op=op: work(transport, op)))


def test_each_segment_is_summed_rightwards() -> None:
    """Fails if messages, or the segments finished, are wrong."""
    size, length = 4, 22
    data = [rank_data(rank, length, np.float64) for rank in range(size)]
    segments = split_evenly(length, size)

    def work(transport: Transport) -> tuple[slice, np.ndarray]:
        buffer = data[transport.rank].copy()
        own = reduce_scatter(buffer, segments, transport)
        all_gather(buffer, segments, transport)
        return own, buffer

    for rank, (own, result) in enumerate(run_in_process(size, work)):
        assert own == segments[(rank + 1) % size]
        for first, part in enumerate(segments):
            expected = data[first][part].copy()
            for step in range(1, size):
                expected += data[(first + step) % size][part]
            assert same_bits(result[part], expected)


@pytest.mark.parametrize("chunk_bytes", [8, 24, 64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_change_nothing(
    size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a chunk is sent before it is added, added twice, or cut wrongly."""
    for length in (size + 1, 9 * size + 2, 40):
        data = [rank_data(rank, length, np.float64) for rank in range(size)]
        whole = simulate_all_reduce(data)
        with monkeypatch.context() as patch:
            patch.setattr(ring_algorithm, "CHUNK_BYTES", chunk_bytes)
            for results in (
                simulate_all_reduce(data),
                run_in_process(
                    size, lambda transport, d=data: all_reduce(d[transport.rank], transport)
                ),
                run_in_process(
                    size,
                    lambda transport, d=data: all_reduce(
                        own := d[transport.rank].copy(), transport, out=own
                    ),
                ),
            ):
                assert all(same_bits(a, b) for a, b in zip(results, whole, strict=True))


@pytest.mark.parametrize("chunk_bytes", [24, 1 << 20])
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(
    size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if any rank ends with other bits than the root's, for any root, length or chunk."""
    monkeypatch.setattr(ring_algorithm, "CHUNK_BYTES", chunk_bytes)
    for root in range(size):
        for length in (0, 1, 17):

            def work(transport: Transport, root: int = root, length: int = length) -> np.ndarray:
                buffer = rank_data(transport.rank, length, np.float64).reshape(length, 1)
                broadcast(buffer, transport, root)
                return buffer

            expected = rank_data(root, length, np.float64).reshape(length, 1)
            assert all(same_bits(buffer, expected) for buffer in run_in_process(size, work))


def test_float16_sums_are_rounded_at_every_addition() -> None:
    """Fails if sums are kept in a wider type: 2048 + 1 + 1 is 2048 when rounded twice."""
    rows = np.array([[1], [1], [2048]], np.float16)[[2, 0, 1]]  # segment 0 begins at rank 0
    assert simulate_all_reduce(rows)[0][0] == 2048
    assert simulate_all_reduce(rows[[1, 2, 0]])[0][0] == 2050


def test_an_average_is_divided_not_multiplied() -> None:
    """Fails if 1/N is rounded first: 5 * float32(1/5) and the like would not be exact."""
    for size in range(1, 60):
        rows = np.full((size, 1), 7, np.float32)
        assert simulate_all_reduce(rows, "average")[0][0] == 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "product"}, "op='product'"),
        ({"out": np.empty(4)}, "out: "),
        ({"out": np.empty(5, np.float32)}, "out: "),
        ({"out": np.empty((5, 2))[:, 0]}, "is not contiguous"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, text: str) -> None:
    """Fails if an unknown operation or an output that does not fit is taken silently."""
    with pytest.raises(ValueError, match=text):
        run_in_process(2, lambda transport: all_reduce(np.ones(5), transport, **options))


def test_overlapping_output_unknown_types_and_ranks_are_refused() -> None:
    """Fails if values are overwritten while they are still needed, or a type is guessed."""
    values = np.ones(6)
    for action in (
        lambda t: all_reduce(values[:5], t, out=values[1:]),
        lambda t: all_reduce(np.ones(3, np.int16), t),
        lambda t: all_reduce(np.ones(3, ">f4"), t),
        lambda t: broadcast(values, t, root=2),
        lambda t: reduce_scatter(values, split_evenly(6, 3), t),
    ):
        with pytest.raises(ValueError, match=r"overlap|dtype|root|segments"):
            run_in_process(2, action)


class Mirror:
    """A neighbour of one process's own: what is sent comes back. It holds no memory."""

    rank, size = 0, 4

    def sendrecv(
        self,
        outgoing: np.ndarray,
        incoming: np.ndarray,
        *,
        backwards: bool = False,
        meanwhile: object = None,
    ) -> None:
        if callable(meanwhile):
            meanwhile()

    def close(self) -> None: ...


@pytest.mark.parametrize(("megabytes", "in_place"), [(1, True), (16, True), (16, False)])
def test_memory_beyond_the_input_is_a_segment_and_a_chunk(megabytes: int, in_place: bool) -> None:
    """Fails if the ring copies its input, or keeps more than one segment plus one chunk."""
    values = np.ones(megabytes * (1 << 20) // 4, np.float32)
    out = values if in_place else np.empty_like(values)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    all_reduce(values, Mirror(), out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    segment = values.nbytes // Mirror.size
    assert segment // 2 < peak - before <= segment + ring_algorithm.CHUNK_BYTES + 20_000


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_gather_hands_over_every_bit(size: int, length: int) -> None:
    """Fails if ranks are in another order, or a NaN's payload or a zero's sign is lost."""
    bits = np.array([0x7FF8_0000_0000_0001, 1 << 63, 3, 0x7FF0_0000_0000_0000], np.uint64)

    def work(transport: Transport) -> np.ndarray:
        return gather((bits[:length] + np.uint64(transport.rank)).view(np.float64), transport)

    expected = [(bits[:length] + np.uint64(rank)).tolist() for rank in range(size)]
    for table in run_in_process(size, work):
        assert table.view(np.uint64).tolist() == expected
