"""The reference: the ring's results, and the largest error that rounding explains.

Floats are summed in float64 around the ring, and the bound is that of `hvdtrain.ring.bound`.
Integers, minima and maxima, and values that are only transferred must be equal. An average of
integers may differ by one: Horovod multiplies the sum by 1/N in float64 and truncates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.evidence.verify.cases import Case
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


class Expected(NamedTuple):
    """A segment of an expected result, of which each rank holds all or, scattered, a share."""

    start: int  # index in the whole result
    values: Array
    # How far rounding explains a deviation, and where an overflow, by element; None: values must be
    # equal, except for the sign of zeros.
    bounds: tuple[NDArray[np.float64], NDArray[np.bool_]] | None = None


def worst_of(
    case: Case, inputs: list[Array], runs: list[list[Array]], transport: Transport
) -> Deviation:
    """Collective: compare every run with the ring; return the element with the largest error.

    `inputs`: this rank's tensors; `runs`: for each run this rank's results. A result of the wrong
    length has an infinite error.
    """
    worst = Deviation(0.0)
    with np.errstate(all="ignore"):
        for tensor, local_values in enumerate(inputs):
            results = [run[tensor] for run in runs]
            share = _share(case, tensor, transport)
            for expected in _expected(case, tensor, local_values, transport):
                compared = [_compare(case, tensor, expected, share, result) for result in results]
                worst = max([worst, *compared], key=lambda deviation: deviation.ratio)
            length = share.stop - share.start
            for result in results:
                if len(result) != length:
                    worst = Deviation(math.inf, tensor, length, f"of {len(result)} elements")
    return worst


def _share(case: Case, tensor: int, transport: Transport) -> slice:
    """Return the part of the whole result that this rank holds."""
    rank, size = transport.rank, transport.size
    if case.operation.kind == "reducescatter":
        return split_evenly(case.length(tensor, rank), size)[rank]
    if case.operation.kind == "allgather":
        return slice(0, sum(case.length(tensor, root) for root in range(size)))
    return slice(0, case.length(tensor, rank))


def _expected(
    case: Case, tensor: int, local_values: Array, transport: Transport
) -> Iterator[Expected]:
    """Collective: yield the expected result of one tensor, in segments."""
    if case.operation.reduction != "none":
        for start in range(0, len(local_values), CHUNK):
            yield _reduced(case, start, local_values[start : start + CHUNK], transport)
        return
    start, gathers = 0, case.operation.kind == "allgather"
    for root in range(transport.size) if gathers else [transport.size - 1]:
        there = np.zeros(case.length(tensor, root), local_values.dtype)
        values = local_values.copy() if transport.rank == root else there
        broadcast(values, transport, root)
        yield Expected(start, values)
        start += len(values)


def _reduced(case: Case, start: int, local_values: Array, transport: Transport) -> Expected:
    """Collective: return a segment of the reduction over all ranks."""
    op, size = case.operation.reduction, transport.size
    if op in ("min", "max") or (op == "sum" and local_values.dtype.kind == "i"):
        return Expected(start, all_reduce(local_values, transport, op=op))
    if local_values.dtype.kind == "i":
        quotient = all_reduce(local_values, transport, op="average")
        # Truncated on both sides; the constant 1/N and its product are rounded.
        error = 1 + gamma(3, REFERENCE_DTYPE) * np.abs(quotient.astype(REFERENCE_DTYPE))
        return Expected(start, quotient, (error, np.zeros(len(local_values), np.bool_)))
    local64 = local_values.astype(REFERENCE_DTYPE)
    both = all_reduce(np.concatenate([local64, finite_magnitudes(local64)]), transport)
    total, magnitudes = both[: len(local_values)], both[len(local_values) :]
    error = ERROR_BOUNDS[op](magnitudes, size, local_values.dtype)
    bounds = error, may_overflow(magnitudes, size, local_values.dtype)
    return Expected(start, total / size if op == "average" else total, bounds)


def _compare(case: Case, tensor: int, expected: Expected, share: slice, result: Array) -> Deviation:
    """Return the element with the largest error of a segment, as far as it is in the share."""
    first = max(expected.start, share.start)
    length = min(expected.start + len(expected.values), share.stop) - first
    value = result[first - share.start :][:length]
    if length <= 0 or len(value) < length:
        return Deviation(0.0)  # `worst_of` reports wrong lengths
    part = slice(first - expected.start, first - expected.start + length)
    reference = expected.values[part]
    if expected.bounds is not None:
        wide, wide_reference = value.astype(REFERENCE_DTYPE), reference.astype(REFERENCE_DTYPE)
        error, overflow_allowed = expected.bounds[0][part], expected.bounds[1][part]
        ratios = error_over_bound(wide, wide_reference, error, overflow_allowed)
    elif case.operation.reduction == "none":
        ratios = np.where(bits_of(value) == bits_of(reference), 0.0, math.inf)
    else:
        ratios = np.where(value == reference, 0.0, math.inf)
    index = int(np.argmax(ratios))
    if ratios[index] == 0:
        return Deviation(0.0)
    actual, wanted = value[index].item(), reference[index].item()
    return Deviation(
        ratio=float(ratios[index]),
        tensor=tensor,
        index=first - share.start + index,
        value=_show(actual, 9),
        reference=_show(wanted, 9),
        error=_show(abs(actual - wanted), 3),
        bound=f"{0.0 if expected.bounds is None else error[index]:.3g}",
    )


def bits_of(values: Array) -> Array:
    """Return a view as integers."""
    return values.view(f"i{values.itemsize}")


def _show(number: float, digits: int) -> str:
    return str(number) if isinstance(number, int) else f"{number:.{digits}g}"
