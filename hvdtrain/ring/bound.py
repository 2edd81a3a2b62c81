"""The proven rounding bound of a sum or an average over ranks.

Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2: summing N floating-
point numbers in any order changes each term by at most N - 1 roundings. Hence

    |computed - exact|  <=  gamma(k) * sum |g_r| / N        gamma(k) = k u / (1 - k u)

for an average, and N times that for a sum. Here u is the unit roundoff, and k is the largest number
of roundings of one term: N - 1 additions; for an average, one for the constant 1/N and one for the
product with it; and one for each further scaling.
"""

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

Floats = NDArray[np.float64]

REFERENCE_DTYPE = np.dtype(np.float64)
AVERAGE_ROUNDINGS = 2  # the constant 1/N, and the product with it


def unit_roundoff(dtype: DTypeLike) -> float:
    """Return half the distance from 1 to the next number: 2^-24 for float32, 2^-53 for float64."""
    return float(np.finfo(dtype).eps) / 2


def gamma(roundings: int, dtype: DTypeLike) -> float:
    """Return Higham's gamma_k for `roundings` = k. Raises ValueError if k u >= 1 (undefined)."""
    product = roundings * unit_roundoff(dtype)
    if product >= 1:
        raise ValueError(f"{roundings} roundings in {np.dtype(dtype)} have no error bound")
    return product / (1 - product)


def average_error_bound(
    sum_of_magnitudes: Floats, ranks: int, dtype: DTypeLike, further_scalings: int = 0
) -> Floats:
    """Return how far rounding can move an average in `dtype` from the float64 ring reference.

    `sum_of_magnitudes`: sum over ranks of |g_r|, element by element, in float64.
    `further_scalings`: multiplications on the path beyond the one with 1/N.
    The bound includes the float64 error of the reference itself (negligible for float32, equal for
    float64). It also includes an absolute term for underflow: each operation may flush a subnormal
    result to zero. (float16 is computed in float32, and loses only what is below its subnormals.)
    """
    roundings, scalings = AVERAGE_ROUNDINGS + further_scalings, 1 + further_scalings
    return _error_bound(sum_of_magnitudes, ranks, dtype, roundings, scalings, divisor=ranks)


def sum_error_bound(
    sum_of_magnitudes: Floats, ranks: int, dtype: DTypeLike, further_scalings: int = 0
) -> Floats:
    """Return the same as `average_error_bound` for a sum: N - 1 additions, no scaling by 1/N."""
    return _error_bound(
        sum_of_magnitudes, ranks, dtype, further_scalings, further_scalings, divisor=1
    )


ERROR_BOUNDS = {"sum": sum_error_bound, "average": average_error_bound}


def _error_bound(
    magnitudes: Floats, ranks: int, dtype: DTypeLike, roundings: int, scalings: int, divisor: int
) -> Floats:
    """Return the bound for terms rounded `roundings` times, and a sum divided by `divisor`."""
    # The reference adds N terms and divides once; the magnitudes are rounded sums themselves.
    relative = gamma(ranks - 1 + roundings, dtype) + gamma(2 * ranks, REFERENCE_DTYPE)
    numbers = np.finfo(dtype)
    flushed = float(numbers.smallest_subnormal if numbers.bits == 16 else numbers.tiny)
    return magnitudes * (relative / divisor) + (ranks - 1 + scalings) * flushed


def finite_magnitudes(values: Floats, out: Floats | None = None) -> Floats:
    """Return |values|, in `out` if given, with zero in place of infinities and NaNs.

    Their sum over ranks limits the partial sums of the finite terms, even where another term is
    infinite: the infinite term appears in the sum of the values themselves.
    """
    magnitudes: Floats = np.abs(values, out=out)
    with np.errstate(over="ignore"):  # one pass; the sum of finite values may overflow too
        all_finite = math.isfinite(magnitudes.sum())
    if not all_finite:
        magnitudes[~np.isfinite(magnitudes)] = 0
    return magnitudes


def may_overflow(
    sum_of_magnitudes: Floats, ranks: int, dtype: DTypeLike, further_scalings: int = 0
) -> NDArray[np.bool_]:
    """Return where finite terms, in some order of summation, could exceed the largest number.

    `sum_of_magnitudes`: sum over ranks of `finite_magnitudes`. `dtype`: that of the reduction.
    Each partial sum is at most the sum of the magnitudes plus its rounding error.
    """
    rounding = sum_error_bound(sum_of_magnitudes, ranks, dtype, further_scalings)
    return sum_of_magnitudes + rounding >= float(np.finfo(dtype).max)


def error_over_bound(
    reduced: Floats, reference: Floats, bound: Floats, overflow_allowed: NDArray[np.bool_]
) -> Floats:
    """Return |reduced - reference| / bound by element; infinite where no bound can hold.

    Values that are not finite must be of the same kind in the same place. An exception is an
    element whose finite terms may have overflowed on the way (`overflow_allowed`): any value that
    is not finite may replace a finite reference there, and a NaN may replace an infinite one, as
    the terms may have overflowed to the other sign. An infinite bound means that the float64
    reference itself may have overflowed.
    """
    ratios = np.zeros_like(reference)
    finite = np.isfinite(reduced) & np.isfinite(reference)
    error = np.abs(reduced[finite] - reference[finite])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios[finite] = np.where(error == 0, 0.0, error / bound[finite])
    same_kind = (np.isnan(reduced) & np.isnan(reference)) | (reduced == reference)
    overflowed = np.where(np.isinf(reference), np.isnan(reduced), np.isfinite(reference))
    excused = overflow_allowed & (overflowed | np.isinf(bound))
    ratios[~finite & ~same_kind & ~excused] = math.inf
    return ratios
