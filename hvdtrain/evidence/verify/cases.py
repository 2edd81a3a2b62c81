"""The cases of a verification: operations, dtypes, lengths, ways of submission, and values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.ring.operations import Array

SMALL_BYTES = 1 << 17  # the largest tensor that is submitted together with others


@dataclass(frozen=True)
class Collective:
    """A collective and its reduction."""

    name: str  # one of hvdtrain.evidence.verify.OPERATIONS
    kind: str  # allreduce, allgather, broadcast, reducescatter
    reduction: str  # sum, average, min, max; none: values are only transferred


@dataclass(frozen=True)
class Case:
    """A submission: a tensor alone, several at once (`together`), or one explicit group."""

    operation: Collective
    dtype: str
    lengths: tuple[int, ...]  # elements (see `length` for allgather)
    submission: str  # alone, together, grouped
    values: str  # ordinary, special

    @property
    def bytes(self) -> int:
        """The size of all tensors, for the table and messages."""
        return sum(self.lengths) * np.dtype(self.dtype).itemsize

    def length(self, tensor: int, rank: int) -> int:
        """Return the elements of a tensor on `rank`: in allgather rank r has r more."""
        uneven = self.operation.kind == "allgather" and self.values == "ordinary"
        return self.lengths[tensor] + (rank if uneven else 0)

    def __str__(self) -> str:
        tensors = "" if len(self.lengths) == 1 else f" in {len(self.lengths)} tensors"
        return (
            f"{self.operation.name} {self.dtype}, {self.bytes:,} B{tensors}, "
            f"{self.submission}, {self.values} values"
        )


def plan_cases(
    operations: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int
) -> list[Case]:
    """Return all cases, in the order of the table. `sizes`: bytes, rounded up to whole elements.

    They always include lengths of one less and one more than the number of ranks, special values,
    and the sizes up to SMALL_BYTES, each twice, together and as a group.
    """
    parts = ((name, *name.partition("-")) for name in operations)
    return [
        case
        for name, kind, _, reduction in parts
        for dtype in dtypes
        for case in _cases_of(Collective(name, kind, reduction or "none"), dtype, sizes, ranks)
    ]


def _cases_of(
    operation: Collective, dtype: str, sizes: Sequence[int], ranks: int
) -> Iterator[Case]:
    itemsize = np.dtype(dtype).itemsize
    lengths = sorted({-(-size // itemsize) for size in sizes} | {ranks - 1, ranks + 1})
    for length in lengths:
        yield Case(operation, dtype, (length,), "alone", "ordinary")
    if special := len(special_values(operation.reduction, dtype, 0, ranks)):
        yield Case(operation, dtype, (special,), "alone", "special")
    small = [length for length in lengths if length * itemsize <= SMALL_BYTES]
    # Descending, then ascending: neighbours mostly differ in length, and every length occurs twice.
    several = (*reversed(small), *small)
    yield Case(operation, dtype, several, "together", "ordinary")
    if operation.kind != "broadcast":  # Horovod has no grouped broadcast
        yield Case(operation, dtype, several, "grouped", "ordinary")


def make_values(case: Case, rank: int, ranks: int, seed: int) -> list[Array]:
    """Return one rank's inputs of a case: a one-dimensional array for each tensor.

    They differ by rank, position, tensor and `seed`, so that a mix-up is detected; floats have
    many magnitudes and both signs, so that sums are rounded and their order matters.
    """
    if case.values == "special":
        return [special_values(case.operation.reduction, case.dtype, rank, ranks)]
    return [
        _ordinary_values(case.dtype, case.length(number, rank), ranks, [seed, number, rank])
        for number in range(len(case.lengths))
    ]


def _ordinary_values(dtype: str, length: int, ranks: int, seed: list[int]) -> Array:
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "i":
        limit = np.iinfo(kind).max // ranks  # no sum overflows
        return generator.integers(-limit, limit, length, kind, endpoint=True)
    exponents = generator.integers(-6, 7, length, np.int8)
    drawn = generator.standard_normal(length, np.float64 if dtype == "float64" else np.float32)
    values: Array = np.ldexp(drawn, exponents).astype(kind)
    return values


def special_values(reduction: str, dtype: str, rank: int, ranks: int) -> Array:
    """Return one rank's edge values of the arithmetic: limits, subnormals, infinities, NaN.

    Min and max get no NaN and no two zeros of unlike sign: their result depends on the order of
    comparison, which is unspecified. Values that are only transferred are arbitrary bits. Integer
    sums have no special values, as the ordinary ones cover the range.
    """
    kind = np.dtype(dtype)
    if kind.kind == "i":
        if reduction in ("sum", "average"):
            return np.empty(0, kind)
        limits = np.iinfo(kind)
        return np.roll(np.array([limits.min, limits.max, -1, 0, 1] * 5, kind), rank)
    if reduction == "none":
        drawn = np.random.default_rng([77, rank]).bytes(301 * kind.itemsize)
        return np.frombuffer(drawn, kind).copy()
    columns = [column for column in _float_columns(kind) if reduction in column[0]]
    first, last = rank == 0, rank == ranks - 1
    values = [
        at_0 if first else at_last if last else between for _, at_0, between, at_last in columns
    ]
    # Repeated to an odd length, so that every element occurs in every segment.
    return np.resize(np.array(values, kind), 13 * len(values) + 1)


def _float_columns(kind: np.dtype[Any]) -> list[tuple[set[str], float, float, float]]:
    """Return elements as (reductions, value of rank 0, of the ranks between, of the last rank)."""
    numbers = np.finfo(kind)
    tiny, smallest = float(numbers.tiny), float(numbers.smallest_subnormal)
    largest, eps = float(numbers.max), float(numbers.eps)
    nan, inf = float("nan"), float("inf")
    sums, orders = {"sum", "average"}, {"min", "max"}
    return [
        (sums | orders, smallest, 2 * smallest, 3 * smallest),  # subnormal
        (sums | orders, -smallest, 5 * smallest, tiny - smallest),
        (sums | orders, tiny, -tiny / 2, 1.5 * tiny),
        (sums | orders, 1.0, 2.0, 3.0),
        (sums, 1 + eps, 0.25, -1.0),  # cancellation
        (sums, 1024.0, eps, -1024.0),
        (sums, largest / 4, 1.0, -largest / 4),
        (sums, largest, largest / 2, largest),  # overflow, in any order
        (sums, 0.0, 0.0, 0.0),
        (sums, -0.0, -0.0, -0.0),
        (orders, largest, -largest, 1 + eps),
        (sums | orders, inf, 1.0, 2.0),
        (sums | orders, 1.0, -1.0, -inf),
        (sums, nan, 1.0, 2.0),
        (sums, 1.0, 2.0, nan),
        (sums, inf, 1.0, -inf),
        (orders, inf, 0.0, -inf),
    ]
