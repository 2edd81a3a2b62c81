"""Reduce-scatter and all-gather around a ring; together, all-reduce. See the package's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.ring.segments import split_evenly
from hvdtrain.ring.transports import Transport

Array = NDArray[Any]


def reduce_scatter(buffer: Array, segments: Sequence[slice], transport: Transport) -> slice:
    """Collective: sum every rank's `buffer`, leaving each rank one finished segment, in place.

    `buffer`: one-dimensional and contiguous, the same length and dtype on every rank.
    `segments`: one slice a rank, the same on every rank.
    Returns the slice that this rank now holds the sum of; the other segments hold partial sums.
    """
    rank, size = transport.rank, transport.size
    longest = max((part.stop - part.start for part in segments), default=0)
    arriving = np.empty(longest, buffer.dtype)
    for step in range(size - 1):
        outgoing = buffer[segments[(rank - step) % size]]
        target = buffer[segments[(rank - step - 1) % size]]
        incoming = arriving[: target.size]
        transport.sendrecv(outgoing, incoming)
        np.add(target, incoming, out=target)
    return segments[(rank + 1) % size]


def all_gather(buffer: Array, segments: Sequence[slice], transport: Transport) -> None:
    """Collective: hand every rank's finished segment to all ranks, in place.

    On entry rank r holds segment r + 1 (what `reduce_scatter` left); on return all hold all.
    """
    rank, size = transport.rank, transport.size
    for step in range(size - 1):
        outgoing = buffer[segments[(rank + 1 - step) % size]]
        incoming = buffer[segments[(rank - step) % size]]
        transport.sendrecv(outgoing, incoming)


def all_reduce(values: Array, transport: Transport) -> Array:
    """Collective: the sum of `values` over all ranks, as a new array of the same shape and dtype.

    The input is not changed. The order of addition is the ring's and the same in every run:
    segment k is summed from rank k on, rightwards. Integer sums are exact (modulo overflow).
    """
    result = np.array(values, order="C", copy=True)
    buffer = result.reshape(-1)
    segments = split_evenly(buffer.size, transport.size)
    reduce_scatter(buffer, segments, transport)
    all_gather(buffer, segments, transport)
    return result
