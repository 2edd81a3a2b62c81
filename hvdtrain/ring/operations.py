"""What a ring can do with the values that meet on it, and with which types.

    name      meeting values                the end result
    sum       a + b                         the sum
    average   a + b                         the sum divided by the number of ranks
    min, max  the smaller, the larger       the smallest, the largest

Rounding. float32 and float64 are added in their own type. float16 values are added in float32 and
each sum is rounded to float16 at once (so do Gloo and Horovod's MPI operation). The average of
floats is one correctly rounded division, not a product with a rounded 1/N. The average of integers
is the exact quotient of the sum, its fraction cut off (towards zero), as Horovod's is meant to be;
Horovod multiplies by a rounded 1/N in float64, which can come out one nearer to zero (49 * (1/49)
is 0 there). Integer sums wrap around on overflow.

Not a number. min and max hand on a NaN that any rank holds (NumPy's `minimum`). Gloo and Open MPI
compare instead, so there a NaN wins or vanishes depending on which rank holds it: do not expect
equality. Of zeros that differ in sign either may come out.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


class Reduce(Protocol):
    """What is made of two values that meet: this rank's own, and what has arrived."""

    def __call__(self, own: Array, arrived: Array, /, *, out: Array) -> object: ...


OPERATIONS: dict[str, Reduce] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64"))


def reduction(op: str, dtype: DTypeLike) -> Reduce:
    """The function for two values that meet. Raises ValueError for an unknown op or dtype."""
    if op not in OPERATIONS:
        raise ValueError(f"op={op!r}: the ring knows {', '.join(OPERATIONS)}")
    if np.dtype(dtype) not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype {np.dtype(dtype)}: the ring knows {known}")
    return OPERATIONS[op]


def finish(op: str, total: Array, size: int) -> None:
    """Turn the reduction over `size` ranks into the result, in place."""
    if op != "average":
        return
    if np.issubdtype(total.dtype, np.integer):
        # Floor division rounds down; towards zero is one up where a remainder is cut from below.
        up = (total < 0) & (total % size != 0)
        np.floor_divide(total, size, out=total)
        total += up
    else:
        with np.errstate(all="ignore"):
            np.divide(total, size, out=total)
