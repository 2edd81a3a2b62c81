"""The reductions of the ring, and the types that it supports.

    name      of two values a and b         result over all ranks
    sum       a + b                         the sum
    average   a + b                         the sum divided by the number of ranks
    min, max  the smaller, the larger       the smallest, the largest

Rounding. float32 and float64 are added in their own type. float16 values are added in float32, and
each sum is rounded to float16 at once (as in Gloo and in Horovod's MPI operation). The average of
floats is one correctly rounded division, not a product with a rounded 1/N. The average of integers
is the exact quotient of the sum, truncated towards zero, as Horovod intends. Horovod multiplies by
a rounded 1/N in float64, so that its result can be one nearer to zero (49 * (1/49) is 0 there).
Integer sums wrap around on overflow.

Not a number. min and max propagate a NaN of any rank (NumPy's `minimum`). Gloo and Open MPI compare
instead: there a NaN propagates or vanishes, depending on the rank that holds it. Equality with them
cannot be expected. Of zeros that differ in sign, either can be the result.
"""

from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


class Reduce(Protocol):
    """A function that combines this rank's values with the received ones."""

    def __call__(self, local: Array, arrived: Array, /, *, out: Array) -> object: ...


OPERATIONS: dict[str, Reduce] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))


def reduction(op: str, dtype: DTypeLike) -> Reduce:
    """Return the function for two values. Raises ValueError for an unknown op or dtype."""
    if op not in OPERATIONS:
        raise ValueError(f"op={op!r}: the ring supports {', '.join(OPERATIONS)}")
    if np.dtype(dtype) not in DTYPES:
        supported = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype {np.dtype(dtype)}: the ring supports {supported}")
    return OPERATIONS[op]


def finish(op: str, total: Array, size: int) -> None:
    """Turn the reduction over `size` ranks into the result, in place."""
    if op != "average":
        return
    if np.issubdtype(total.dtype, np.integer):
        # Floor division rounds down: negative sums with a remainder need one more.
        up = (total < 0) & (total % size != 0)
        np.floor_divide(total, size, out=total)
        total += up
    else:
        with np.errstate(all="ignore"):
            np.divide(total, size, out=total)


def split_evenly(length: int, parts: int) -> tuple[slice, ...]:
    """Cut `length` elements into `parts` adjacent slices whose lengths differ by at most one.

    Longer slices precede shorter ones; with fewer elements than parts the last slices are empty.
    Raises ValueError for a negative length or fewer than one part.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"cannot cut {length} elements into {parts} parts")
    shortest, longer = divmod(length, parts)
    ends = [part * shortest + min(part, longer) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))
