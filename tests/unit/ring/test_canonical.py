"""The canonical sum: the same bits for any distribution of shares, and an error within its bound.

Errors are computed exactly: all values are integer multiples of 2^-UNITS, and Python's integers do
not round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.ring import canonical_all_reduce, canonical_error_bound, canonical_sum
from hvdtrain.ring.canonical import BLOCK, MULTIPLES, exponents, from_integers, to_integers
from hvdtrain.ring.transports import InProcessTransport, Transport
from tests.rings import rank_data, run_in_process

DTYPES = [np.float32, np.float64]
LENGTHS = [0, 1, 255, 256, 257, 600]
WORKERS = [*range(1, 10), 512]
UNITS = 1126  # the last bit of a 53-bit mantissa at the smallest subnormal of float64
INF, NAN = math.inf, math.nan
SEEDS = st.integers(0, 2**32 - 1)

Shares = np.ndarray  # one row for each virtual worker


def numbers(dtype: type) -> np.finfo:
    return np.finfo(dtype)


def exact(values: np.ndarray) -> np.ndarray:
    """Finite values as Python integers, in units of 2^-UNITS."""
    mantissas, powers = np.frexp(values.astype(np.float64))
    integers = np.ldexp(mantissas, 53).astype(np.int64).astype(object)
    return integers << (powers.astype(object) + (UNITS - 53))


def finite(shares: Shares) -> Shares:
    return np.where(np.isfinite(shares), shares, shares.dtype.type(0))


def agreed_exponents(shares: Shares) -> np.ndarray:
    return np.max([exponents(share, len(shares)) for share in shares], axis=0)


def bound_of(shares: Shares, result: np.ndarray) -> np.ndarray:
    exps = agreed_exponents(shares)
    return canonical_error_bound(exps, result, len(shares), shares.dtype)


def worst_ratio(shares: Shares, result: np.ndarray) -> float:
    """The largest error over its bound, among the finite elements of the result."""
    kept = np.isfinite(result)
    bound = exact(bound_of(shares, result)[kept])
    error = np.abs(exact(finite(shares)[:, kept]).sum(axis=0) - exact(result[kept]))
    return max((error / bound).tolist(), default=0.0)


def spread(seed: int, workers: int, length: int, dtype: type, low: int, high: int) -> Shares:
    """Values of both signs below 2^low to 2^high, with zeros of both signs among them."""
    generator = np.random.default_rng([seed, workers, length])
    shape = (workers, length)
    values = np.ldexp(generator.uniform(-1, 1, shape), generator.integers(low, high + 1, shape))
    chance = generator.random(shape)
    values[chance < 0.1] = 0.0
    values[chance < 0.05] = -0.0
    return values.astype(dtype)


@st.composite
def tables(draw: st.DrawFn, special: tuple[float, ...] = ()) -> Shares:
    """Shares of 1 to 9 virtual workers: of any magnitudes that cannot overflow in a sum, down to
    subnormals, and a few drawn elements, some of them `special`, in drawn places.
    """
    dtype = draw(st.sampled_from(DTYPES))
    workers, length = draw(st.integers(1, 9)), draw(st.sampled_from(LENGTHS))
    info = numbers(dtype)
    lowest, highest = info.minexp - info.nmant, info.maxexp - 5  # 9 < 2^4 terms
    low = draw(st.integers(lowest, highest))
    high = draw(st.integers(low, highest))
    if draw(st.booleans()):  # around the limit
        low, high = lowest, draw(st.integers(lowest, info.minexp + 80))
    table = spread(draw(SEEDS), workers, length, dtype, low, high)
    largest = float(np.ldexp(dtype(1), draw(st.sampled_from([high, highest]))))
    few = [0.0, -0.0, float(info.smallest_subnormal), float(info.tiny), largest, -largest, *special]
    element = st.sampled_from(few) | st.floats(-largest, largest, width=8 * table.itemsize)
    if length:
        place = st.tuples(st.integers(0, workers - 1), st.integers(0, length - 1))
        for where, value in draw(st.dictionaries(place, element, max_size=6)).items():
            table[where] = value
    return table


def distributed(shares: Shares, owners: list[list[int]]) -> list[np.ndarray]:
    """The result on each rank; `owners`: the virtual workers of each rank, in its order."""

    def work(transport: Transport) -> np.ndarray:
        own = [shares[worker] for worker in owners[transport.rank]]
        workers, length = shares.shape
        return canonical_all_reduce(own, workers, transport, length=length, dtype=shares.dtype)

    return run_in_process(len(owners), work)


# The same bits.


@given(shares=tables(special=(INF, -INF, NAN, -NAN)), ranks=st.integers(1, 4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_order_on_any_ranks_gives_the_same_bits(
    shares: Shares, ranks: int, data: st.DataObject
) -> None:
    """Fails if the order of the shares, or the rank that holds one, changes a bit on some rank;
    also if a rank without shares does not take part, or an input is changed.
    """
    workers, before = len(shares), shares.tobytes()
    order = data.draw(st.permutations(range(workers)))
    where = data.draw(st.lists(st.integers(0, ranks - 1), min_size=workers, max_size=workers))
    owners = [[worker for worker in order if where[worker] == rank] for rank in range(ranks)]
    expected = canonical_sum(list(shares), workers)
    assert expected.dtype == shares.dtype
    assert {result.tobytes() for result in distributed(shares, owners)} == {expected.tobytes()}
    assert shares.tobytes() == before


def test_all_even_splits_give_the_same_bits() -> None:
    """Fails if some number of ranks, each with consecutive shares, gives other bits than one rank;
    or if a float sum, in rank order, gave the same bits too: the data would then show nothing.
    """
    workers, length = 6, 1000
    for dtype in DTYPES:
        shares = np.array([rank_data(worker, length, dtype) for worker in range(workers)])
        splits = [np.array_split(range(workers), ranks) for ranks in range(1, workers + 1)]
        sums = [distributed(shares, [list(own) for own in split]) for split in splits]
        assert len({result.tobytes() for results in sums for result in results}) == 1
        per_rank = [np.sum([shares[own].sum(axis=0) for own in split], axis=0) for split in splits]
        assert len({total.tobytes() for total in per_rank}) > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_has_the_same_bits(dtype: type) -> None:
    """Fails if the sign or the payload of a NaN depends on which share it comes from."""
    quiet = np.array([NAN], dtype)
    payload = quiet.copy()
    payload.view(f"i{quiet.itemsize}")[0] += 5
    columns = [(quiet, -payload), (-payload, quiet), (payload, -quiet), (quiet * 0, payload)]
    infinities = [(INF, -INF), (-INF, INF)]
    pairs = [*columns, *(tuple(np.array([v], dtype) for v in pair) for pair in infinities)]
    assert {canonical_sum(pair, 2).tobytes() for pair in pairs} == {quiet.tobytes()}


@given(shares=tables(special=(INF, -INF, NAN)))
@settings(max_examples=100, deadline=None)
def test_the_bits_are_those_of_the_definition(shares: Shares) -> None:
    """Fails if a bit differs from the definition, written out with fractions, element by element:
    another block, exponent, limit or rounding.
    """
    expected = [defined(shares, place) for place in range(shares.shape[1])]
    result = canonical_sum(list(shares), len(shares))
    assert result.tobytes() == np.array(expected, shares.dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_around_the_limit_are_those_of_the_definition(dtype: type) -> None:
    """Fails if the limit is another one, or a block of zeros, or only of subnormals, misses it."""
    lowest = numbers(dtype).minexp
    for above in (-9, 0, 9, 18, 27, 60):  # from subnormals alone to blocks that the limit spares
        shares = spread(5, 3, 300, dtype, lowest - 20, lowest + above)
        shares[:, BLOCK:] = -0.0
        expected = [defined(shares, place) for place in range(300)]
        result = canonical_sum(list(shares), 3)
        assert result.tobytes() == np.array(expected, dtype).tobytes()


def defined(shares: Shares, place: int) -> float:
    """The canonical sum of one element, as the definition has it."""
    bits, limit = {4: (30, 126), 8: (62, 1022)}[shares.itemsize]
    first = place - place % 256
    block = finite(shares[:, first : first + 256])
    _, exponent = math.frexp(np.abs(block).max())
    shift = min(bits - math.ceil(math.log2(len(shares))) - exponent, limit)
    shift = shift if block.any() else limit
    scale = Fraction(2) ** shift
    total = sum(round(Fraction(float(term)) * scale) for term in block[:, place - first])
    marker = sum(float(term) for term in shares[:, place] if not np.isfinite(term))
    # float32: the sum has at most 31 bits, exact in float64.
    return math.nan if math.isnan(marker) else float(total / scale) + marker


def test_markers_travel_only_if_some_rank_needs_them() -> None:
    """Fails if ranks disagree on the exchange of markers, or exchange them without need."""

    def messages(shares: Shares) -> list[int]:
        def work(transport: InProcessTransport) -> int:
            counted, calls = transport.sendrecv, []
            transport.sendrecv = lambda *a, **k: (calls.append(1), counted(*a, **k))
            own = [shares[transport.rank]]
            canonical_all_reduce(own, 3, transport, length=7, dtype=np.float32)
            return len(calls)

        return run_in_process(3, work)

    shares = np.array([rank_data(rank, 7, np.float32) for rank in range(3)])
    assert messages(shares) == [2 * 4] * 3  # exponents and integers: 2 (N - 1) each
    shares[1, 5] = -INF
    assert messages(shares) == [3 * 4] * 3


# The error.


@given(shares=tables())
@settings(max_examples=200, deadline=None)
def test_the_error_is_within_the_bound(shares: Shares) -> None:
    """Fails if the bound forgets a rounding or an underflow, or a result is not finite."""
    result = canonical_sum(list(shares), len(shares))
    assert np.isfinite(result).all()
    assert worst_ratio(shares, result) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_the_error_is_within_the_bound_for_all_lengths(workers: int, dtype: type) -> None:
    """Fails if some number of workers or length has larger errors: a wrong c, or a short block."""
    for length in LENGTHS[:-1] if workers < 10 else [0, 1, 257]:
        shares = spread(1, workers, length, dtype, -60, 3)
        assert worst_ratio(shares, canonical_sum(list(shares), workers)) <= 1


def half_way(workers: int, dtype: type, lowest: bool) -> Shares:
    """Elements half-way between two multiples, all rounded down; each share and place has its own.

    `lowest`: of the smallest multiple, which the limit sets; else one large element sets it.
    """
    bits, limit = MULTIPLES[np.dtype(dtype)][1:]
    share, place = np.indices((workers, 300))
    values = 2 * (share + 3 * place) + 0.5
    if lowest:
        return np.ldexp(values, -limit).astype(dtype)
    shift = bits - (workers - 1).bit_length() - 1  # of a block whose largest element is 1
    values = np.ldexp(values, -shift)
    values[workers // 2, [7, 299]] = -1  # in either block
    return values.astype(dtype)


@pytest.mark.parametrize("lowest", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_the_bound_is_attained(workers: int, dtype: type, lowest: bool) -> None:
    """Fails if the bound is wider than the worst error, or narrower, for some number of workers,
    also where the limit sets the multiple and elements are subnormal.
    """
    shares = half_way(workers, dtype, lowest)
    ratio = worst_ratio(shares, canonical_sum(list(shares), workers))
    assert 0.999 < ratio <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounding_of_the_sum_needs_its_term(dtype: type) -> None:
    """Fails if the second term of the bound could be left out, or is far wider than needed."""
    shares = spread(2, 3, 600, dtype, 0, 0)
    result = canonical_sum(list(shares), 3)
    first_term = bound_of(shares, np.zeros_like(result))
    error = np.abs(exact(shares).sum(axis=0) - exact(result))
    assert (error / exact(first_term)).max() > 2
    assert 0.8 < worst_ratio(shares, result) <= 1


@pytest.mark.parametrize(
    ("dtype", "workers", "power"),
    [
        (np.float32, 1, -30),
        (np.float32, 8, -24),
        (np.float32, 512, -12),
        (np.float64, 8, -56),
    ],
)
def test_the_bound_in_numbers(dtype: type, workers: int, power: int) -> None:
    """Fails if the numbers in the module's docstring are not those of its bound: the first term is
    2^power of m where m is a power of two, and half of that just below the next one.
    """
    shares = np.zeros((workers, 2 * BLOCK), dtype)
    shares[0, 3], shares[-1, -1] = 1.0, np.nextafter(dtype(2), dtype(0))
    bound = bound_of(shares, np.zeros(2 * BLOCK))
    assert set(bound.tolist()) == {2.0**power}
    assert math.isclose(bound[-1] / float(shares[-1, -1]), 2.0 ** (power - 1), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", WORKERS)
def test_integers_never_wrap_around(workers: int, dtype: type) -> None:
    """Fails if V of the largest integers exceed 2^bits: the sum could then change its sign."""
    signs = np.array([1, -1] * 150)
    shares = (np.nextafter(dtype(8), dtype(0)) * np.ones((workers, 1)) * signs).astype(dtype)
    exps = agreed_exponents(shares)
    integers = [to_integers(share, exps, workers).astype(object) for share in shares]
    assert np.abs(np.sum(integers, axis=0)).max() <= 2 ** MULTIPLES[np.dtype(dtype)].bits
    assert worst_ratio(shares, canonical_sum(list(shares), workers)) <= 1


# Infinities, NaN, overflow.


@given(shares=tables(special=(INF, -INF, NAN)))
@settings(max_examples=100, deadline=None)
def test_what_is_not_finite_stays_so_and_harms_nothing_else(shares: Shares) -> None:
    """Fails if an infinity or a NaN is lost, moves, changes its kind, or changes a bit of another
    element, in its block or outside.
    """
    with np.errstate(invalid="ignore"):
        plain = shares.sum(axis=0)
    result = canonical_sum(list(shares), len(shares))
    kept = np.isfinite(plain)
    assert np.array_equal(result[~kept], plain[~kept], equal_nan=True)
    without = canonical_sum(list(finite(shares)), len(shares))
    assert result[kept].tobytes() == without[kept].tobytes()
    assert worst_ratio(shares, result) <= 1
    assert np.isinf(bound_of(shares, result)[~kept]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_overflow(dtype: type) -> None:
    """Fails if a sum beyond the largest number is finite, if one below it is not (also where two
    terms alone exceed it), or if an overflow beside an infinity depends on an order.
    """
    info = numbers(dtype)
    largest, last = info.max, info.max - np.nextafter(info.max, dtype(0))
    cases = [
        ([largest, 0, 0], largest),
        ([largest, largest, 0], INF),
        ([0, -largest, -largest], -INF),
        ([largest, largest, -largest], largest),  # in order, a float sum is infinite
        ([largest, -last / 2, last / 2], largest),
        ([largest, last / 4, 0], largest),
        ([largest, last / 4, last / 4], INF),  # half-way to the next power of two: ties to even
        ([-last / 2, 0, -largest], -INF),
        ([largest, np.nextafter(last / 2, dtype(0)), 0], INF),  # rounded up to it
        ([largest, largest, INF], INF),
        ([largest, largest, -INF], NAN),
        ([largest, -largest, -INF], -INF),
    ]
    for terms, expected in cases:
        for turn in range(3):
            shares = np.roll(np.array(terms, dtype), turn)[:, None]
            result = canonical_sum(list(shares), 3)
            assert np.array_equal(result, np.array([expected], dtype), equal_nan=True), terms


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_floating_point_warnings(dtype: type) -> None:
    """Fails if an overflow, an underflow or a NaN, all of which are valid, raises a warning."""
    info = numbers(dtype)
    shares = np.zeros((3, 3 * BLOCK), dtype)
    shares[:, 0], shares[:, 1] = info.max, info.smallest_subnormal  # beside the largest: underflow
    shares[:2, 2], shares[1, 3] = (INF, -INF), NAN
    shares[:, BLOCK:] = info.smallest_subnormal
    with np.errstate(all="raise"):
        result = canonical_sum(list(shares), 3)
        bound_of(shares, result)
    assert np.array_equal(result[:5], np.array([INF, 0, NAN, NAN, 0]), equal_nan=True)


# The bound finds wrong sums.


def from_wrong_exponents(shares: Shares, raised: int) -> np.ndarray:
    workers, exps = len(shares), agreed_exponents(shares) + raised
    total = sum(to_integers(share, exps, workers) for share in shares)
    return from_integers(total, exps, shares.dtype, workers)


def without_one_share(shares: Shares) -> np.ndarray:
    dropped = shares.copy()
    dropped[2] = 0
    return canonical_sum(list(dropped), len(shares))


def with_exponents_of_each_rank(shares: Shares) -> np.ndarray:
    """Integers of two ranks that have not agreed on their exponents, added and converted."""
    workers, half = len(shares), len(shares) // 2
    total = 0
    for own in (shares[:half], shares[half:]):
        exps = np.max([exponents(share, workers) for share in own], axis=0)
        total = total + sum(to_integers(share, exps, workers) for share in own)
    return from_integers(total, agreed_exponents(shares), shares.dtype, workers)


def truncated(shares: Shares) -> np.ndarray:
    workers, exps = len(shares), agreed_exponents(shares)
    bits = MULTIPLES[shares.dtype].bits
    shifts = np.repeat(bits - (workers - 1).bit_length() - exps, BLOCK)[: shares.shape[1]]
    total = np.trunc(np.ldexp(shares, shifts)).astype(np.int64).sum(axis=0)
    return from_integers(total, exps, shares.dtype, workers)


WRONG: dict[str, Callable[[Shares], np.ndarray]] = {
    "one bit fewer": lambda shares: from_wrong_exponents(shares, 1),
    "two bits fewer": lambda shares: from_wrong_exponents(shares, 2),
    "a share dropped": without_one_share,
    "exponents of each rank": with_exponents_of_each_rank,
    "truncated": truncated,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_sums_exceed_the_bound(name: str, dtype: type) -> None:
    """Fails if a wrong sum passes for a right one, or the right one does not pass."""
    magnitudes = (-40, 0) if dtype is np.float32 else (-80, 0)
    shares = np.concatenate([spread(3, 6, 600, dtype, *magnitudes), half_way(6, dtype, False)], 1)
    shares[:3] *= dtype(0.01)  # two ranks of three shares would have exponents of their own
    assert worst_ratio(shares, canonical_sum(list(shares), 6)) <= 1
    assert worst_ratio(shares, WRONG[name](shares)) > 1


def test_float_sums_of_exact_parts_are_found() -> None:
    """Fails if ranks could convert their own integers, and add floats, without a change of bits."""
    shares = spread(4, 6, 600, np.float32, -10, 0)
    exps, totals = agreed_exponents(shares), []
    for cut in (1, 2, 3):
        parts = [sum(to_integers(s, exps, 6) for s in own) for own in (shares[:cut], shares[cut:])]
        one, other = (from_integers(part, exps, np.float32, 6) for part in parts)
        totals.append((one + other).tobytes())
    assert len(set(totals)) == 3


# Bad input.


def test_bad_input_is_refused() -> None:
    """Fails if shares, exponents or a number of workers that cannot be meant give a result."""
    (ring,) = (InProcessTransport(0, 1, {}),)
    share = np.ones(257, np.float32)
    exps = exponents(share, 2)

    def reduced(shares: list[np.ndarray], workers: int, dtype: type = np.float32) -> np.ndarray:
        return canonical_all_reduce(shares, workers, ring, length=257, dtype=dtype)

    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: canonical_sum([share], 2), "1 shares for 2"),
        (lambda: canonical_sum([], 0), "0 shares for 0"),
        (lambda: canonical_sum([share.reshape(1, -1)], 1), r"a share is float32\(1, 257\)"),
        (lambda: canonical_sum([share, share[1:]], 2), r"a share is float32\(256,\), must be"),
        (lambda: canonical_sum([share.astype(np.float16)], 1), "dtype float16"),
        (lambda: reduced([share] * 3, 2), "3 shares for 2"),
        (lambda: reduced([share], 2, np.float64), "a share is float32"),
        (lambda: reduced([], 2, np.int32), "dtype int32"),
        (lambda: exponents(share.reshape(1, -1), 2), "2 dimensions"),
        (lambda: exponents(share, 0), "virtual_workers=0"),
        (lambda: exponents(share, 2**29 + 1), "virtual_workers=536870913"),
        (lambda: to_integers(share, exps[:1], 2), "1 exponents for 257 elements"),
        (lambda: from_integers(np.ones(1, np.int32), exps[:0], np.float32, 2), "0 exponents for 1"),
        (lambda: canonical_error_bound(exps, share[:256], 2, np.float32), "2 exponents for 256"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
