"""The rounding bound: honest averages lie within it, and it is not so wide as to be useless."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hvdtrain.ring.bound import (
    ERROR_BOUNDS,
    average_error_bound,
    error_over_bound,
    finite_magnitudes,
    gamma,
    may_overflow,
    sum_error_bound,
    unit_roundoff,
)

DTYPES = [np.float32, np.float64]
OPS = st.sampled_from(sorted(ERROR_BOUNDS))


def as_horovod(op: str, terms: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Sum in the terms' own type, in the given order; an average is that times the rounded 1/N."""
    total = terms[order[0]].copy()
    for rank in order[1:]:
        total = total + terms[rank]
    return total * terms.dtype.type(1 / len(terms)) if op == "average" else total


def ratios(op: str, terms: np.ndarray, reduced: np.ndarray, compressed: bool = False) -> np.ndarray:
    wide, dtype = terms.astype(np.float64), np.dtype(np.float16) if compressed else terms.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        magnitudes = finite_magnitudes(wide).sum(axis=0)
        reference = wide.sum(axis=0) / (len(terms) if op == "average" else 1)
        bound = ERROR_BOUNDS[op](magnitudes, len(terms), dtype, int(compressed))
        overflow = may_overflow(magnitudes, len(terms), dtype, int(compressed))
        return error_over_bound(reduced.astype(np.float64), reference, bound, overflow)


@st.composite
def rank_terms(draw: st.DrawFn) -> np.ndarray:
    """Gradients of 2 to 16 ranks: subnormal, huge, cancelling, or ordinary values."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = (draw(st.integers(2, 16)), draw(st.integers(1, 20)))
    # The sum of 16 must not pass the largest number: overflow is not a rounding error.
    largest = float(np.finfo(dtype).max) / 32
    width = 8 * dtype.itemsize
    elements = st.floats(-largest, largest, width=width, allow_subnormal=True)
    return draw(npst.arrays(dtype, shape, elements=elements))


@given(op=OPS, terms=rank_terms(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_honest_values_lie_within_the_bound(op: str, terms: np.ndarray, seed: int) -> None:
    """Fails if the bound forgets a rounding, whatever the order of summation."""
    order = np.random.default_rng(seed).permutation(len(terms))
    assert (ratios(op, terms, as_horovod(op, terms, order)) <= 1).all()


@given(op=OPS, terms=rank_terms(), where=st.integers(0, 19), sign=st.sampled_from([-1, 1]))
@settings(max_examples=100, deadline=None)
def test_an_error_of_eight_bounds_is_found(
    op: str, terms: np.ndarray, where: int, sign: int
) -> None:
    """Fails if the bound is so loose that an error of eight times its size passes."""
    column = where % terms.shape[1]
    magnitudes = np.abs(terms.astype(np.float64)).sum(axis=0)
    bound = ERROR_BOUNDS[op](magnitudes, len(terms), terms.dtype)
    wrong = as_horovod(op, terms, np.arange(len(terms))).astype(np.float64)
    wrong[column] += sign * 8 * bound[column]
    assert ratios(op, terms, wrong)[column] > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("op", ERROR_BOUNDS)
def test_the_bound_is_tight_enough_to_be_useful(size: int, dtype: type, op: str) -> None:
    """Fails if ordinary values come nowhere near the bound: it would then find little."""
    terms = np.random.default_rng(size).uniform(0.5, 1, (size, 20_000)).astype(dtype)
    worst = ratios(op, terms, as_horovod(op, terms, np.arange(size)[::-1])).max()
    assert 0.02 < worst <= 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("op", ERROR_BOUNDS)
def test_half_precision_sums_are_found(size: int, op: str) -> None:
    """Fails if a reduction done in float16 passes for one in float32."""
    terms = np.random.default_rng(1).standard_normal((size, 1000)).astype(np.float32)
    halved = as_horovod(op, terms.astype(np.float16), np.arange(size))
    assert (ratios(op, terms, halved) > 1).mean() > 0.9


def test_gamma_is_highams() -> None:
    """Fails if k u / (1 - k u) is computed otherwise, or taken where it means nothing."""
    assert unit_roundoff(np.float32) == 2.0**-24
    assert unit_roundoff(np.float64) == 2.0**-53
    assert gamma(3, np.float32) == 3 * 2.0**-24 / (1 - 3 * 2.0**-24)
    with pytest.raises(ValueError, match="no error bound"):
        gamma(2**24, np.float32)


def test_the_bound_of_four_ranks_in_float32() -> None:
    """Fails if a rounding is left out or counted twice: 3 additions, the constant, its product."""
    u, wide = 2.0**-24, 2.0**-53
    path, reference = 5 * u / (1 - 5 * u), 8 * wide / (1 - 8 * wide)
    underflow = 4 * 2.0**-126  # each of 3 additions and 1 product may flush to zero
    bound = average_error_bound(np.array([2.0]), 4, np.float32)
    assert bound[0] == 2 * ((path + reference) / 4) + underflow


def test_the_bound_of_a_sum_has_no_scaling() -> None:
    """Fails if a sum of three, or one of them that travels in float16, is given another bound."""
    bound, wide = sum_error_bound(np.array([2.0]), 3, np.float32), 2.0**-53
    reference = 6 * wide / (1 - 6 * wide)
    assert bound[0] == 2 * (gamma(2, np.float32) + reference) + 2 * 2.0**-126
    half = sum_error_bound(np.array([2.0]), 3, np.float16, further_scalings=1)
    assert half[0] == 2 * (gamma(3, np.float16) + reference) + 3 * 2.0**-24


NAN, INF = float("nan"), float("inf")


def in_pairs(op: str, terms: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Sum in the terms' own type, two partial sums at a time: any order, and any tree of it."""
    partial = list(terms)
    with np.errstate(over="ignore", invalid="ignore"):
        while len(partial) > 1:
            one, other = (partial.pop(generator.integers(len(partial))) for _ in range(2))
            partial.append(one + other)
        (total,) = partial
        return total * terms.dtype.type(1 / len(terms)) if op == "average" else total


@st.composite
def extreme_terms(draw: st.DrawFn) -> tuple[np.ndarray, bool]:
    """Terms of 2 to 8 ranks, many near the largest number or infinite; do they travel as float16?

    (Not float64: what overflows there overflows in the reference too.)
    """
    compressed = draw(st.booleans())
    largest = float(np.finfo(np.float16 if compressed else np.float32).max)
    near = [sign * largest * part for sign in (-1, 1) for part in (1, 0.9999, 0.5, 1 / 3, 1e-3)]
    if compressed:  # float32 values that float16 rounds to its largest, or to infinity
        near += [sign * value for sign in (-1, 1) for value in (65_519.0, 65_520.0, 1e5, 3e38)]
    elements = st.one_of(
        st.sampled_from([*near, 0.0, 1.0, INF, -INF]), st.floats(-largest, largest, width=32)
    )
    shape = (draw(st.integers(2, 8)), draw(st.integers(1, 8)))
    return draw(npst.arrays(np.float32, shape, elements=elements)), compressed


@given(op=OPS, drawn=extreme_terms(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_honest_overflows_pass(op: str, drawn: tuple[np.ndarray, bool], seed: int) -> None:
    """Fails if an order in which finite terms overflow, to one side or to both, or beside an
    infinite term, is taken for a fault: also if only rounding takes them past the largest number.
    """
    terms, compressed = drawn
    with np.errstate(over="ignore"):
        travelling = terms.astype(np.float16) if compressed else terms
    reduced = in_pairs(op, travelling, np.random.default_rng(seed))
    assert (ratios(op, terms, reduced, compressed) <= 1).all()


@pytest.mark.parametrize(
    ("terms", "compressed", "reduced", "ok"),
    [
        # One rank's infinity, and a finite value that becomes the other one in float16.
        ([INF, -1e5], True, NAN, True),
        ([INF, -1e5], True, INF, True),
        ([INF, -1e5], True, 0.0, False),  # an infinite term cannot get lost
        ([INF, -1e5], True, -INF, False),
        ([INF, -1e5], False, NAN, False),  # 1e5 is small in float32
        ([INF, -3.4e38, -3.4e38], False, NAN, True),
        ([INF, -3.4e38, -3.4e38], False, 3.4e38, False),
        ([3e38, 3e38, -3e38, -3e38], False, NAN, True),
        ([3e38, 3e38, -3e38, -3e38], False, -INF, True),
        # Three roundings up take a sum just below the largest number past it.
        ([32_783.0, 16_383.9, 8_191.9, 8_144.9], True, INF, True),
        ([INF, 1.0], True, NAN, False),
        ([1.0, 2.0], True, NAN, False),
        ([1.0, 2.0], False, INF, False),
        ([NAN, 3e38, 3e38], False, NAN, True),
        ([NAN, 3e38, 3e38], False, INF, False),
        ([NAN, 3e38, 3e38], False, 1.0, False),
    ],
)
def test_only_what_may_overflow_is_excused(
    terms: list[float], compressed: bool, reduced: float, ok: bool
) -> None:
    """Fails if an honest overflow raises an alarm, or a NaN where all finite terms are small, or a
    term that has got lost, passes for one.
    """
    column = np.array(terms, np.float32)[:, None]
    assert bool(ratios("sum", column, np.array([reduced]), compressed)[0] <= 1) == ok


@pytest.mark.parametrize(
    ("reduced", "reference", "bound", "overflow", "ok"),
    [
        (NAN, NAN, 0, False, True),
        (INF, INF, 0, False, True),
        (-INF, -INF, 0, False, True),
        (INF, -INF, 0, False, False),
        (NAN, INF, 0, False, False),
        (NAN, 1.0, 0, False, False),
        (1.0, NAN, 0, False, False),
        (INF, 1.0, 0, False, False),
        (INF, 1.0, 0, True, True),
        (1.0, INF, 0, True, False),
        (1.0, INF, INF, True, True),  # the float64 of the reference has overflowed by itself
        (0.0, 0.0, 0, False, True),
    ],
)
def test_values_that_are_not_finite_must_be_of_the_same_kind(
    reduced: float, reference: float, bound: float, overflow: bool, ok: bool
) -> None:
    """Fails if a NaN or an infinity hides a fault, or an honest one raises an alarm."""
    ratio = error_over_bound(
        *(np.array([value], np.float64) for value in (reduced, reference, bound)),
        np.array([overflow]),
    )
    assert bool(ratio[0] <= 1) == ok


def test_magnitudes_are_those_of_finite_terms() -> None:
    """Fails if a term that is not finite hides those that are, or gets lost without a trace."""
    values = np.array([-1.0, INF, NAN, -INF, 1e39])
    assert finite_magnitudes(values).tolist() == [1.0, 0, 0, 0, 1e39]
    out = np.empty(5)
    assert finite_magnitudes(values, out) is out and out[4] == 1e39
    assert may_overflow(np.array([1.0, 1e39, INF]), 2, np.float32).tolist() == [False, True, True]
