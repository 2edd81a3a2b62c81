"""Known orders of summation, against sums written out by hand from the description of each.

That Horovod really adds so is shown by tests/parallel/exact_checks.py.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from hvdtrain.ring.orders import (
    GLOO_RING,
    MPI_RING,
    OPEN_MPI_RING,
    KnownOrder,
    UnknownOrder,
    differing_bits,
    gloo_half_sum,
    gloo_segments,
    known_order,
    order_named,
    recursive_doubling,
    reproduce,
    scale_as_horovod,
)
from hvdtrain.ring.transports import Transport
from tests.rings import Counting, rank_data, run_in_process

MIB = 1 << 20
NO_FUSION = {"HOROVOD_FUSION_THRESHOLD": "0"}
PINNED = NO_FUSION | {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}


def reproduced(rows: list[np.ndarray], order: KnownOrder, op: str) -> list[np.ndarray]:
    return run_in_process(len(rows), lambda t: reproduce(rows[t.rank], t, order, op))


def gloo_block_of(index: int, length: int, itemsize: int, size: int) -> int:
    """Written after allreduce.cc: which rank's block an element belongs to."""
    total = length * itemsize
    pieces = max(math.ceil(total / MIB), 2 * size)
    pieces = math.ceil(pieces / size) * size
    piece = math.ceil(math.ceil(total / pieces) / itemsize) * itemsize
    return index * itemsize // piece // (pieces // size)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_gloos_order_element_by_element(size: int, dtype: type) -> None:
    """Fails if a block, its direction or where its sum begins is another than Gloo's."""
    itemsize = np.dtype(dtype).itemsize
    for length in (0, 1, size, 2 * size + 1, 1009, 2 * size * MIB // itemsize + 1):
        rows = [rank_data(rank, length, dtype) for rank in range(size)]
        (result, *others) = reproduced(rows, GLOO_RING, "sum")
        assert all(not differing_bits(other, result).any() for other in others)
        for index in {*range(0, length, max(length // 97, 1)), length - 1} - {-1}:
            block = gloo_block_of(index, length, itemsize, size)
            value = rows[(block - 1) % size][index]
            for step in range(2, size + 1):
                value = value + rows[(block - step) % size][index]
            assert result[index] == value, (length, index)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 3), (3, 2)])
def test_gloos_order_by_host_element_by_element(hosts: int, ranks: int, dtype: type) -> None:
    """Fails if a piece, a part or its order within a host or over hosts is another than that of
    gloo_by_host.h; or if fewer elements than ranks are not summed by the ring over all.
    """
    size, itemsize = hosts * ranks, np.dtype(dtype).itemsize
    piece_length = 4 * MIB // itemsize
    order = GLOO_RING.by_host(ranks)
    for length in (0, 1, size - 1, size, 1009, piece_length + 5):
        rows = [rank_data(rank, length, dtype) for rank in range(size)]
        (result, *others) = reproduced(rows, order, "sum")
        assert all(not differing_bits(other, result).any() for other in others)
        if length < size:
            assert not differing_bits(result, reproduced(rows, GLOO_RING, "sum")[0]).any()
            continue
        for index in {*range(0, length, max(length // 97, 1)), *range(length - 6, length)}:
            piece, within = divmod(index, piece_length)
            whole = min(piece_length, length - piece * piece_length)
            parts = [len(it) for it in np.array_split(np.arange(whole), ranks)]
            part = int(np.searchsorted(np.cumsum(parts), within, side="right"))
            place = within - sum(parts[:part])
            sums = []
            for host in range(hosts):
                terms = [rows[host * ranks + rank][index] for rank in range(ranks)]
                sums.append(functools.reduce(lambda a, b: a + b, terms))
            block = gloo_block_of(place, parts[part], itemsize, hosts)
            value = sums[(block - 1) % hosts]
            for step in range(2, hosts + 1):
                value = value + sums[(block - step) % hosts]
            assert result[index] == value, (length, index)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 4), (4, 2)])
def test_an_order_by_host_sends_little(hosts: int, ranks: int) -> None:
    """Fails if what a rank sends to reproduce a sum by host grows with the number of ranks."""
    size, length = hosts * ranks, 840_000

    def sent_by(transport: Transport) -> int:
        counting = Counting(transport)
        values = rank_data(transport.rank, length, np.float32)
        reproduce(values, counting, GLOO_RING.by_host(ranks))
        return sum(counting.sent)

    sent = run_in_process(size, sent_by)
    within_host = 4 * length  # but for its last rank
    assert max(sent) <= within_host + 2 * 4 * length
    assert sum(sent) == hosts * (ranks - 1) * within_host + 2 * (size - 1) * 4 * length


def test_orders_are_found_by_name() -> None:
    """Fails if a recorded order is not recognised, or one is made up from another text."""
    for order in (GLOO_RING, MPI_RING, GLOO_RING.by_host(2), GLOO_RING.by_host(16)):
        assert order_named(order.name) == order
    assert GLOO_RING.by_host(1) is GLOO_RING
    for name in ("", "Gloo's", "over hosts of 2", f"{GLOO_RING.name} over hosts of 1"):
        assert order_named(name) is None, name


def test_gloos_blocks_are_rounded_to_the_size_of_an_element() -> None:
    """Fails if pieces are rounded up to 4 bytes for every type: 2 and 8 differ."""
    lengths = {
        itemsize: [part.stop - part.start for part in gloo_segments(13, itemsize, 3)]
        for itemsize in (2, 4, 8)
    }
    # 13 elements in 6 pieces: 3 elements each for every size; not 4 for float16's 26 bytes.
    assert all(sorted(parts) == [1, 6, 6] for parts in lengths.values())


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7])
def test_open_mpis_order_element_by_element(size: int) -> None:
    """Fails if block k is not summed from rank k rightwards, or the average is not a product."""
    for length in (size, 4 * size + 3):
        rows = [rank_data(rank, length, np.float32) for rank in range(size)]
        result = reproduced(rows, OPEN_MPI_RING, "average")[0]
        long_blocks, short = length % size, length // size
        for index in range(length):
            inside = index < long_blocks * (short + 1)
            block = index // (short + 1) if inside else (index - long_blocks) // short
            value = rows[block][index]
            for step in range(1, size):
                value = value + rows[(block + step) % size][index]
            assert result[index] == value * np.float32(1 / size)


def test_few_elements_are_doubled_recursively() -> None:
    """Fails if the tree is another: 0+1, then 2 alone; or for 5, (0+1)+2 and 3+4."""
    rows = [rank_data(rank, 2, np.float32) for rank in range(5)]
    a, b, c, d, e = rows
    assert not differing_bits(recursive_doubling(rows[:3]), (a + b) + c).any()
    assert not differing_bits(recursive_doubling(rows[:4]), (a + b) + (c + d)).any()
    expected = ((a + b) + c) + (d + e)
    assert not differing_bits(recursive_doubling(rows), expected).any()
    for result in reproduced(rows, OPEN_MPI_RING, "sum"):
        assert not differing_bits(result, expected).any()


@pytest.mark.parametrize(("length", "are_few"), [(0, True), (5, True), (3072, True), (3073, False)])
def test_few_bytes_are_doubled_recursively(length: int, are_few: bool) -> None:
    """Fails if the limit of a build's own sums is not 4096 bytes a rank, here of 3 ranks."""
    rows = [rank_data(rank, length, np.float32) for rank in range(3)]
    result = reproduced(rows, MPI_RING, "sum")[0]
    few, ring = recursive_doubling(rows), reproduced(rows, OPEN_MPI_RING, "sum")[0]
    assert not differing_bits(result, few if are_few else ring).any()
    assert length < 100 or differing_bits(few, ring).any()


@pytest.mark.parametrize("size", [3, 4])
def test_the_orders_differ_where_three_terms_meet(size: int) -> None:
    """Fails if the two orders give the same bits everywhere, so that neither is shown."""
    rows = [rank_data(rank, 1009, np.float32) for rank in range(size)]
    one, other = (reproduced(rows, order, "sum")[0] for order in (GLOO_RING, OPEN_MPI_RING))
    assert differing_bits(one, other).sum() > 100


@pytest.mark.parametrize(
    ("own", "arrived", "total"),
    [(1, 15360, 1), (15360, 1, 15360), (2**-24, 1, 2**-24), (-0.0, 32768, -0.0), (1, 2, 3)],
)
def test_gloos_float16_loses_terms(own: float, arrived: float, total: float) -> None:
    """Fails if the reproduction adds better than Gloo does, or loses more."""
    result = np.empty(1, np.float16)
    gloo_half_sum(np.array([own], np.float16), np.array([arrived], np.float16), out=result)
    assert not differing_bits(result, np.array([total], np.float16)).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_averages_are_products_with_a_rounded_reciprocal(dtype: str) -> None:
    """Fails if the average is divided, or 1/N has another type than Horovod's."""
    for size in range(1, 60):
        totals = np.arange(-300, 300).astype(dtype)
        actual = totals.copy()
        scale_as_horovod(actual, size)
        for total, result in zip(totals.tolist(), actual.tolist(), strict=True):
            if dtype == "float64":
                expected = total * (1 / size)
            elif dtype.startswith("float"):
                product = np.float32(total) * np.float32(1 / size)
                expected = float(np.dtype(dtype).type(product))
            else:
                expected = int(total * (1 / size))
            assert result == expected, (size, total)
    lost = np.array([49])
    scale_as_horovod(lost, 49)
    assert lost[0] == 0  # as documented


@pytest.mark.parametrize(
    ("controller", "size", "environment", "library", "built_in", "order"),
    [
        ("gloo", 4, NO_FUSION, "", "", GLOO_RING),
        ("gloo", 4, NO_FUSION | {"HOROVOD_CPU_OPERATIONS": "GLOO"}, "", MPI_RING.name, GLOO_RING),
        ("mpi", 2, NO_FUSION, "whatever", "", OPEN_MPI_RING),
        ("mpi", 3, PINNED, "Open MPI v4.1.8", "", OPEN_MPI_RING),
        ("mpi", 3, NO_FUSION, "", MPI_RING.name, MPI_RING),
        ("mpi", 4, PINNED, "MPICH", MPI_RING.name, MPI_RING),
    ],
)
def test_known_orders(
    controller: str, size: int, environment: dict, library: str, built_in: str, order: KnownOrder
) -> None:
    """Fails if an order that is known is refused, or taken for another."""
    assert known_order(controller, size, environment, library, built_in) is order


@pytest.mark.parametrize(
    ("controller", "environment", "library", "text"),
    [
        ("gloo", {}, "", "HOROVOD_FUSION_THRESHOLD=0"),
        ("gloo", NO_FUSION | {"HOROVOD_AUTOTUNE": "1"}, "", "HOROVOD_AUTOTUNE"),
        ("gloo", NO_FUSION | {"HOROVOD_CPU_OPERATIONS": "ccl"}, "", "ccl"),
        ("none", NO_FUSION, "", "none"),
        ("mpi", NO_FUSION, "Open MPI v4.1.8", "algorithm=4"),
        ("mpi", PINNED | {"OMPI_MCA_coll_tuned_allreduce_algorithm": "3"}, "Open MPI", "=4"),
        ("mpi", PINNED | {"OMPI_MCA_coll_tuned_use_dynamic_rules": "0"}, "Open MPI", "rules=1"),
        ("mpi", PINNED | {"OMPI_MCA_coll_han_priority": "90"}, "Open MPI", "han_priority"),
        ("mpi", PINNED, "MPICH Version: 4.2", "MPICH Version: 4.2 is not known"),
    ],
)
def test_unknown_orders_are_refused(
    controller: str, environment: dict, library: str, text: str
) -> None:
    """Fails if an order is claimed that is unknown, or the remedy is not named."""
    with pytest.raises(UnknownOrder, match=text):
        known_order(controller, 3, environment, library)


def test_ranks_that_are_added_by_host() -> None:
    """Fails if Gloo's order does not depend on the ranks of a host, or MPI's does; or if ranks of
    a host that are not adjacent are taken for such.
    """
    assert known_order("gloo", 4, NO_FUSION, per_host=2) == GLOO_RING.by_host(2)
    assert known_order("mpi", 4, NO_FUSION, "", MPI_RING.name, per_host=1) is MPI_RING
    with pytest.raises(UnknownOrder, match="HIERARCHICAL_ALLREDUCE=0"):
        known_order("gloo", 4, NO_FUSION, per_host=0)


def test_only_sums_have_an_order() -> None:
    """Fails if a maximum is reproduced: its NaNs depend on more than the order."""
    with pytest.raises(ValueError, match="sum and average"):
        run_in_process(2, lambda t: reproduce(np.ones(3), t, GLOO_RING, "max"))


def test_bits_are_compared_not_values() -> None:
    """Fails if zeros of different sign pass, or NaNs of different bits do not."""
    actual = np.array([0.0, np.nan, 1.0, 1.0], np.float32)
    expected = np.array([-0.0, -np.nan, 1.0, np.nextafter(np.float32(1), np.float32(2))])
    assert differing_bits(actual, expected.astype(np.float32)).tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert differing_bits(np.array(1), np.array(1)).shape == ()
