"""The canonical sum: V gradient shares summed to the same bits, however ranks hold the shares.

Float addition is not associative, so N ranks add in another order than one. Integer addition is.
Hence every share is rounded to integer multiples of one power of two, and integers are summed:

    dtype     integers   bits   limit
    float32   int32       30     126     2^-limit is the smallest normal number of the dtype
    float64   int64       62    1022

    c     = ceil(log2 V)                                      V virtual workers, one share each
    m     = the largest |x| of a block, over all shares       blocks: 256 consecutive elements
    e     = the exponent with 2^(e-1) <= m < 2^e, at least bits - c - limit (so too for m = 0)
    s     = bits - c - e                                      agreed by an all-reduce (max) of e
    q     = x 2^s, rounded to an integer (ties to even)       of each element of each share
    S     = the sum of q over the shares                      by an all-reduce (sum) of integers
    result = S 2^-s, S rounded to the dtype                   on every rank alike

A block begins at element 0 of a parameter's flattened gradient; the last one may be short. In m and
q, an infinity or a NaN counts as 0. It goes into a marker instead: the sum over the shares of their
non-finite elements alone. The marker is infinite of one sign, or NaN, in any order of addition, and
is added to the result. Bits of a NaN depend on the order and the processor: each becomes `np.nan`.

**Nothing wraps around.** |x 2^s| < 2^(bits-c), hence |q| <= 2^(bits-c) and |S| <= V 2^(bits-c) <=
2^bits, partial sums too. So S is exact, and all else depends only on m, S and the marker. None of
them depends on the order of the shares or on the rank that holds each: the bits cannot either.

**The error.** Let T be the exact sum of the finite elements in one place, u the unit roundoff:

    |result - T|  <=  V 2^-s / 2  +  u |result|               if the result is finite

Proof. (1) x 2^s is exact, or has underflowed. In the second case both it and its exact value are
far below 1/2, and q = 0 for both. So |q - x 2^s| <= 1/2. The sum over V shares gives the first
term, with S 2^-s for the result. Subnormal x need no further term: they are elements below 2^-s.
(2) Rounding S moves it by at most u times the rounded value: half a unit in the last place of S is
at most u 2^k, where 2^k <= |S| <= 2^(k+1), and rounding keeps 2^k. (This is 0 up to |S| = 1 / u.)
(3) The rounded S is 0 or at least 1 in magnitude, and 2^-s >= 2^-limit. So the product with 2^-s is
0 or normal, never underflows, and is exact unless it overflows. The result is then S 2^-s correctly
rounded, and a zero is +0. (2^s and 2^-s themselves are representable: V <= 2^(bits-1) is required.)

Overflow. Let L be the largest number of the dtype plus half a unit in its last place. The result is
infinite exactly where |S| 2^-s >= L: never if |T| < L - V 2^-s / 2, always if |T| >= L + V 2^-s /
2, with the sign of T. No order of the shares overflows on the way. An overflow beside a marker of
the other sign is NaN.

In terms of m: if e is not raised to its lower limit, 2^(e-1) <= m gives 2^-s <= 2 m 2^(c-bits), and

    |result - T|  <=  m V 2^(c-bits)  +  u |result|

Otherwise 2^-s = 2^-limit, and the first term is V 2^-(limit+1). For V = 8 in float32 it is 2^(e-25)
if e is not raised: above 2^-25 m and at most 2^-24 m = u m, as m lies between 2^(e-1) and 2^e. In
float64 it is 2^(e-57), at most 2^-56 m = u m / 8. For V = 512 in float32 it is at most 2^-12 m. An
element of at least 2^(e+c-7) in float32, or 2^(e+c-10) in float64, is a multiple of 2^-s: q adds no
error for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.ring.algorithm import all_reduce
from hvdtrain.ring.bound import Floats, unit_roundoff
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports import Transport, in_process_ring

BLOCK = 256  # elements that share an exponent

Exponents = NDArray[np.int32]  # e of each block


class Multiples(NamedTuple):
    """The integers that stand for one float type: sums up to 2^bits of multiples of 2^-limit up."""

    integers: np.dtype[Any]
    bits: int
    limit: int


MULTIPLES = {
    np.dtype(np.float32): Multiples(np.dtype(np.int32), bits=30, limit=126),
    np.dtype(np.float64): Multiples(np.dtype(np.int64), bits=62, limit=1022),
}


def exponents(share: Array, virtual_workers: int) -> Exponents:
    """Return e of each block of one share (see the module). Their maximum over shares is agreed.

    `share`: one-dimensional, of float32 or float64. Raises ValueError if it is not, or if there are
    fewer than one or too many virtual workers.
    """
    lowest = _lowest_exponent(_check(share), virtual_workers)
    largest = np.maximum.reduceat(np.abs(_finite(share)), np.arange(0, share.size, BLOCK))
    raised = np.maximum(np.frexp(largest)[1], lowest)
    return np.where(largest > 0, raised, lowest).astype(np.int32)


def to_integers(share: Array, exponents: Exponents, virtual_workers: int) -> Array:
    """Return q of each element of one share, as int32 or int64. Its non-finite elements are 0.

    `exponents`: as agreed over all shares. Raises ValueError as `exponents` does, or if their
    number is not that of the blocks.
    """
    shifts = _shifts(exponents, _check(share), virtual_workers)
    scales = _per_element(np.ldexp(np.ones(shifts.size, share.dtype), shifts), share.size)
    with np.errstate(under="ignore"):
        multiples: Array = np.rint(_finite(share) * scales)
    return multiples.astype(MULTIPLES[share.dtype].integers)


def from_integers(
    total: Array, exponents: Exponents, dtype: DTypeLike, virtual_workers: int
) -> Array:
    """Return the result of the finite elements in `dtype`, from the integers of all shares.

    `exponents`: those that `to_integers` received. Raises ValueError for another dtype, or if their
    number is not that of the blocks.
    """
    shifts = _shifts(exponents, np.dtype(dtype), virtual_workers)
    scales = _per_element(np.ldexp(np.ones(shifts.size, dtype), -shifts), total.size)
    with np.errstate(over="ignore"):
        result: Array = total.astype(dtype) * scales
    return result


def canonical_sum(shares: Sequence[Array], virtual_workers: int) -> Array:
    """Return the canonical sum of all shares, one for each virtual worker.

    `shares`: one-dimensional, of one length and of one dtype, float32 or float64; not changed.
    Raises ValueError for other shares, or another number of them.
    """
    if not shares or len(shares) != virtual_workers:
        raise ValueError(f"{len(shares)} shares for {virtual_workers} virtual workers")
    (alone,) = in_process_ring(1)
    length, dtype = shares[0].size, shares[0].dtype
    return canonical_all_reduce(shares, virtual_workers, alone, length=length, dtype=dtype)


def canonical_all_reduce(
    shares: Sequence[Array],
    virtual_workers: int,
    transport: Transport,
    *,
    length: int,
    dtype: DTypeLike,
) -> Array:
    """Collective: return the canonical sum of the shares of all ranks, the same bits on every rank.

    `shares`: those of this rank, which may be none; not changed. The shares of all ranks together
    are those of all virtual workers. `length`, `dtype`: of a share, the same on every rank. Markers
    are exchanged only if some rank has a non-finite element: a flag beside the exponents agrees on
    this. Raises ValueError for other shares, or for more of them than virtual workers.
    """
    if len(shares) > virtual_workers:
        raise ValueError(f"{len(shares)} shares for {virtual_workers} virtual workers")
    for share in shares:
        if share.shape != (length,) or share.dtype != dtype:
            raise ValueError(f"a share is {share.dtype}{share.shape}, must be {dtype}({length},)")
    nothing = np.zeros(length, dtype)
    local_exponents = exponents(nothing, virtual_workers)
    total = np.zeros(length, MULTIPLES[nothing.dtype].integers)
    for share in shares:
        np.maximum(local_exponents, exponents(share, virtual_workers), out=local_exponents)
    flag = np.int32(not all(np.isfinite(share).all() for share in shares))
    agreed = all_reduce(np.append(local_exponents, flag), transport, op="max")
    for share in shares:
        total += to_integers(share, agreed[:-1], virtual_workers)
    all_reduce(total, transport, out=total)
    result = from_integers(total, agreed[:-1], dtype, virtual_workers)
    if agreed[-1]:
        result = _with_markers(result, shares, transport)
    return result


def canonical_error_bound(
    exponents: Exponents, result: Array, virtual_workers: int, dtype: DTypeLike
) -> Floats:
    """Return how far a finite `result` can be from the exact sum, element by element, in float64.

    `exponents`: as agreed over all shares. `dtype`: that of the shares, whatever the type in which
    `result` is given. The bound is infinite where the result is not finite. Its own rounding cannot
    take it below an error that occurs: with 2^k as in the proof, V 2^-s / 2 + u 2^k 2^-s is exact
    in float64 for V < 2^52. Raises ValueError as `from_integers` does.
    """
    shifts = _shifts(exponents, np.dtype(dtype), virtual_workers)
    quantum = _per_element(np.ldexp(np.ones(shifts.size), -shifts), result.size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        magnitudes = np.abs(result.astype(np.float64))
        bound = quantum * (virtual_workers / 2) + magnitudes * unit_roundoff(dtype)
    return np.where(np.isfinite(magnitudes), bound, np.inf)


def _with_markers(result: Array, shares: Sequence[Array], transport: Transport) -> Array:
    """Collective: return the result plus the non-finite elements of all shares, with the same bits
    for every NaN. (Results that get 0 keep their bits.)
    """
    markers = np.zeros_like(result)
    with np.errstate(invalid="ignore"):
        for share in shares:
            markers += np.where(np.isfinite(share), share.dtype.type(0), share)
        marked = result + all_reduce(markers, transport)
    return np.where(np.isnan(marked), result.dtype.type(np.nan), marked)


def _check(share: Array) -> np.dtype[Any]:
    """Return the dtype of a share. Raises ValueError if it is not one-dimensional."""
    if share.ndim != 1:
        raise ValueError(f"a share has {share.ndim} dimensions, must have one")
    return share.dtype


def _lowest_exponent(dtype: np.dtype[Any], virtual_workers: int) -> int:
    """Return bits - c - limit. Raises ValueError for another dtype or number of workers."""
    if dtype not in MULTIPLES:
        raise ValueError(f"dtype {dtype}: canonical sums support {', '.join(map(str, MULTIPLES))}")
    bits, most = MULTIPLES[dtype].bits, 1 << (MULTIPLES[dtype].bits - 1)
    if not 1 <= virtual_workers <= most:
        raise ValueError(f"virtual_workers={virtual_workers}: must be from 1 to {most}")
    return bits - (virtual_workers - 1).bit_length() - MULTIPLES[dtype].limit


def _shifts(exponents: Exponents, dtype: np.dtype[Any], virtual_workers: int) -> Exponents:
    """Return s of each block."""
    lowest = _lowest_exponent(dtype, virtual_workers)
    return (MULTIPLES[dtype].limit + lowest - exponents).astype(np.int32)


def _per_element(scales: Array, length: int) -> Array:
    """Return the scale of each element. Raises ValueError for another number of blocks."""
    if scales.size != -(-length // BLOCK):
        raise ValueError(f"{scales.size} exponents for {length} elements in blocks of {BLOCK}")
    return np.repeat(scales, BLOCK)[:length]


def _finite(share: Array) -> Array:
    """Return a copy of the share with zeros in place of infinities and NaNs."""
    return np.where(np.isfinite(share), share, share.dtype.type(0))
