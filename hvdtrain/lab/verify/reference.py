"""The reference: the ring's results, and the largest error that rounding explains.

Floats are summed in float64 around the ring, and the bound is that of `hvdtrain.ring.bound`.
Integers, minima and maxima, and values that are only transferred must be equal. An average of
integers may differ by one: Horovod multiplies the sum by 1/N in float64 and truncates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.lab.verify.cases import Case
from hvdtrain.ring import Transport, all_reduce, broadcast, gamma, split_evenly
from hvdtrain.ring.bound import (
    ERROR_BOUNDS,
    REFERENCE_DTYPE,
    error_over_bound,
    finite_magnitudes,
    may_overflow,
)
from hvdtrain.ring.operations import Array

CHUNK = 1 << 18  # elements compared at a time, which limits the memory
BITS = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Deviation:
    """The element of one rank's results with the largest ratio of error to bound."""

    ratio: float
    tensor: int = 0
    index: int = 0
    value: str = ""
    reference: str = ""
    error: str = ""
    bound: str = ""

    def __str__(self) -> str:
        return (
            f"tensor {self.tensor}, index {self.index}: value {self.value}, reference "
            f"{self.reference}, error {self.error}, bound {self.bound}"
        )


@dataclass(frozen=True)
class Expected:
    """A segment of the expected result of a rank."""

    start: int  # index in the result
    values: Array
    bound: NDArray[np.float64] | None = None  # None: equal bits, except for the sign of zeros
    overflow_allowed: NDArray[np.bool_] | None = None  # None: nowhere


def worst_of(
    case: Case, inputs: list[Array], runs: list[list[Array]], transport: Transport
) -> Deviation:
    """Collective: compare every run with the ring; return the element with the largest error.

    `inputs`: this rank's tensors; `runs`: for each run this rank's results. A result of the wrong
    length has an infinite error.
    """
    worst = Deviation(0.0)
    with np.errstate(all="ignore"):
        for tensor, own in enumerate(inputs):
            results = [run[tensor] for run in runs]
            length = 0
            for expected in _expected(case, tensor, own, transport):
                length = expected.start + len(expected.values)
                for result in results:
                    worst = max(worst, _compare(expected, result, tensor), key=lambda f: f.ratio)
            for result in results:
                if len(result) != length:
                    worst = Deviation(math.inf, tensor, length, f"of {len(result)} elements")
    return worst


def _expected(case: Case, tensor: int, own: Array, transport: Transport) -> Iterator[Expected]:
    """Collective: yield this rank's expected result of one tensor, in segments."""
    kind, rank, size = case.operation.kind, transport.rank, transport.size
    if case.operation.reduction == "none":
        roots = range(size) if kind == "allgather" else [size - 1]
        start = 0
        for root in roots:
            values = np.zeros(case.length(tensor, root), own.dtype)
            if rank == root:
                values = own.copy()
            broadcast(_bits(values), transport, root)
            yield Expected(start, _bits(values))
            start += len(values)
        return
    share = split_evenly(len(own), size)[rank]
    for start in range(0, len(own), CHUNK):
        expected = _reduced(case, start, own[start : start + CHUNK], transport)
        yield expected if kind == "allreduce" else _within(expected, share)


def _reduced(case: Case, start: int, own: Array, transport: Transport) -> Expected:
    """Collective: return a segment of the reduction over all ranks."""
    op, size = case.operation.reduction, transport.size
    if op in ("min", "max") or (op == "sum" and own.dtype.kind == "i"):
        return Expected(start, all_reduce(own, transport, op=op))
    if own.dtype.kind == "i":
        quotient = all_reduce(own, transport, op="average")
        # Truncated on both sides; the constant 1/N and its product are rounded.
        bound = 1 + gamma(3, REFERENCE_DTYPE) * np.abs(quotient.astype(REFERENCE_DTYPE))
        return Expected(start, quotient, bound)
    own64 = own.astype(REFERENCE_DTYPE)
    both = all_reduce(np.concatenate([own64, finite_magnitudes(own64)]), transport)
    total, magnitudes = both[: len(own)], both[len(own) :]
    overflow = may_overflow(magnitudes, size, own.dtype)
    bound = ERROR_BOUNDS[op](magnitudes, size, own.dtype)
    return Expected(start, total / size if op == "average" else total, bound, overflow)


def _within(expected: Expected, share: slice) -> Expected:
    """Return the part within `share`, with indices relative to its start."""
    end = expected.start + len(expected.values)
    first, last = max(expected.start, share.start), min(end, share.stop)
    part = slice(max(first - expected.start, 0), max(last - expected.start, 0))
    bound, overflow = expected.bound, expected.overflow_allowed
    start = min(max(first - share.start, 0), share.stop - share.start)
    return Expected(
        start,
        expected.values[part],
        None if bound is None else bound[part],
        None if overflow is None else overflow[part],
    )


def _compare(expected: Expected, result: Array, tensor: int) -> Deviation:
    """Return the element of a segment with the largest error."""
    reference = expected.values
    value = result[expected.start : expected.start + len(reference)]
    if len(value) < len(reference) or not len(reference):
        return Deviation(0.0)  # `worst_of` reports wrong lengths
    carried = value.dtype != reference.dtype and reference.dtype.kind == "i"
    compared = _bits(value) if carried else value
    if expected.bound is None:
        ratios = np.where(compared == reference, 0.0, math.inf)
    else:
        allowed = expected.overflow_allowed
        if allowed is None:
            allowed = np.zeros(len(reference), np.bool_)
        ratios = error_over_bound(
            value.astype(REFERENCE_DTYPE),
            reference.astype(REFERENCE_DTYPE),
            expected.bound,
            allowed,
        )
    index = int(np.argmax(ratios))
    if ratios[index] == 0:
        return Deviation(0.0)
    shown = reference.view(value.dtype) if carried else reference
    return Deviation(
        float(ratios[index]),
        tensor,
        expected.start + index,
        _show(value[index]),
        _show(shown[index]),
        _show_error(value[index], shown[index]),
        f"{0.0 if expected.bound is None else expected.bound[index]:.3g}",
    )


def _bits(values: Array) -> Array:
    return values.view(BITS[values.itemsize])


def _show(value: Any) -> str:
    return str(value) if value.dtype.kind == "i" else f"{float(value):.9g}"


def _show_error(value: Any, reference: Any) -> str:
    if value.dtype.kind == "i":
        return str(abs(int(value) - int(reference)))
    return f"{abs(float(value) - float(reference)):.3g}"
