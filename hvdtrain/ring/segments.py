"""The division of a buffer into one segment per rank."""

from __future__ import annotations

from collections.abc import Sequence


def split_evenly(length: int, parts: int) -> tuple[slice, ...]:
    """Cut `length` elements into `parts` adjacent slices whose lengths differ by at most one.

    Longer slices precede shorter ones; with fewer elements than parts the last slices are empty.
    Raises ValueError for a negative length or fewer than one part.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"cannot cut {length} elements into {parts} parts")
    shortest, longer = divmod(length, parts)
    slices = []
    start = 0
    for part in range(parts):
        stop = start + shortest + (part < longer)
        slices.append(slice(start, stop))
        start = stop
    return tuple(slices)


def longest_of(segments: Sequence[slice]) -> int:
    """Return the number of elements of the longest segment."""
    return max((part.stop - part.start for part in segments), default=0)
