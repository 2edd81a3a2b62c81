"""The ring's exchanges, as generators, and the collectives that run them over a transport.

A generator of exchanges says what a rank sends and receives next, and computes in between; it
knows nothing of how messages travel. So one algorithm serves real transports (`run_exchanges`) and
the simulation of many ranks in one thread (`hvdtrain.ring.simulation`). See the package's head for
the picture and the table.

Long segments travel in chunks: while one is on its way, the one before it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.ring.operations import Array, Reduce, finish, reduction
from hvdtrain.ring.segments import longest_of, split_evenly
from hvdtrain.ring.transports import Transport

# Large enough that the cost of a message is small beside its transfer, small enough to stay in a
# core's cache between arrival and addition (`hvdtrain bench ring` shows what it does).
CHUNK_BYTES = 1 << 20


class Exchange(NamedTuple):
    """One message to the next rank and one from the one before; an empty array is no message."""

    outgoing: Array
    incoming: Array
    meanwhile: Callable[[], object] | None = None  # to be called once, while they travel


Exchanges = Iterator[Exchange]


def reduce_scatter_exchanges(
    source: Array, result: Array, segments: Sequence[slice], position: int, reduce: Reduce
) -> Exchanges:
    """N - 1 steps after which `result` holds, at `position` in the ring, segment position + 1.

    `source`, `result`: one-dimensional, of one length and dtype; they may be the same array.
    Only `result` is written, and only in the N - 1 segments that arrive. Beyond them, memory for
    one segment or, where segments are longer than a chunk, for two chunks is used.
    """
    size, longest = len(segments), longest_of(segments)
    chunk = max(CHUNK_BYTES // result.itemsize, 1)
    if longest > chunk:
        yield from _in_chunks(source, result, segments, position, reduce, chunk)
        return
    if longest == 0:
        return
    arriving = np.empty(longest, result.dtype)
    outgoing = source[segments[position]]
    for step in range(size - 1):
        part = segments[(position - step - 1) % size]
        target = result[part]
        incoming = arriving[: target.size]
        yield Exchange(outgoing, incoming)
        reduce(source[part], incoming, out=target)
        outgoing = target


def _in_chunks(
    source: Array,
    result: Array,
    segments: Sequence[slice],
    position: int,
    reduce: Reduce,
    chunk: int,
) -> Exchanges:
    """The same in chunks. Every rank makes as many exchanges, some of them empty."""
    size, longest = len(segments), longest_of(segments)
    arriving = (np.empty(chunk, result.dtype), np.empty(chunk, result.dtype))
    pending: Callable[[], object] | None = None
    turn = 0
    for step in range(size - 1):
        sent, received = segments[(position - step) % size], segments[(position - step - 1) % size]
        sending = source if step == 0 else result
        for offset in range(0, longest, chunk):
            part = _chunk_of(received, offset, chunk)
            incoming = arriving[turn][: part.stop - part.start]
            # The chunk that leaves was finished a step ago; at most its last one is pending.
            yield Exchange(sending[_chunk_of(sent, offset, chunk)], incoming, pending)
            pending = _later(reduce, source[part], incoming, result[part])
            turn = 1 - turn
    if pending:
        pending()


def _chunk_of(segment: slice, offset: int, chunk: int) -> slice:
    start = min(segment.start + offset, segment.stop)
    return slice(start, min(start + chunk, segment.stop))


def _later(reduce: Reduce, own: Array, arrived: Array, target: Array) -> Callable[[], object]:
    return lambda: reduce(own, arrived, out=target)


def all_gather_exchanges(result: Array, segments: Sequence[slice], position: int) -> Exchanges:
    """N - 1 steps that spread the finished segments: each rank begins with position + 1."""
    size = len(segments)
    outgoing = result[segments[(position + 1) % size]]
    for step in range(size - 1):
        incoming = result[segments[(position - step) % size]]
        yield Exchange(outgoing, incoming)
        outgoing = incoming


def all_reduce_exchanges(
    source: Array,
    result: Array,
    segments: Sequence[slice],
    position: int,
    reduce: Reduce,
    finish: Callable[[Array], object] = lambda total: None,
) -> Exchanges:
    """Reduce-scatter, `finish` for the segment that is then this rank's, all-gather."""
    if len(segments) == 1 and result is not source:
        result[:] = source
    yield from reduce_scatter_exchanges(source, result, segments, position, reduce)
    finish(result[segments[(position + 1) % len(segments)]])
    yield from all_gather_exchanges(result, segments, position)


def broadcast_exchanges(buffer: Array, position: int, size: int) -> Exchanges:
    """From position 0 along the ring in chunks: each rank hands on a chunk as the next arrives."""
    if size == 1 or buffer.size == 0:
        return
    chunk = max(CHUNK_BYTES // buffer.itemsize, 1)
    parts = [buffer[start : start + chunk] for start in range(0, buffer.size, chunk)]
    nothing = buffer[:0]
    for step in range(len(parts) + size - 2):
        given, taken = step - position, step - position + 1
        sends = position < size - 1 and 0 <= given < len(parts)
        receives = position > 0 and 0 <= taken < len(parts)
        yield Exchange(parts[given] if sends else nothing, parts[taken] if receives else nothing)


def run_exchanges(exchanges: Exchanges, transport: Transport, backwards: bool = False) -> None:
    """Collective: make this rank's exchanges over a transport, one after the other.

    Overflow and NaN are results like others here, and no reason to warn.
    """
    with np.errstate(all="ignore"):
        for outgoing, incoming, meanwhile in exchanges:
            transport.sendrecv(outgoing, incoming, backwards=backwards, meanwhile=meanwhile)


def position_of(rank: int, size: int, backwards: bool) -> int:
    """Where a rank stands if ring positions are counted in the direction of the messages."""
    return -rank % size if backwards else rank


def reduce_scatter(
    buffer: Array,
    segments: Sequence[slice],
    transport: Transport,
    op: str = "sum",
    backwards: bool = False,
) -> slice:
    """Collective: reduce every rank's `buffer`, leaving each rank one finished segment, in place.

    `buffer`: one-dimensional and contiguous, the same length and dtype on every rank.
    `segments`: one slice a rank, the same on every rank; the reduction of segments[p] begins at
    position p and goes once round the ring. `backwards`: messages go from rank r to r - 1, and
    rank r stands at position -r (mod N). Returns the slice that this rank holds the result of:
    position + 1; the others hold partial results. Raises ValueError for an unknown op or dtype.
    """
    _check_segments(segments, transport)
    position = position_of(transport.rank, transport.size, backwards)
    reduce = reduction(op, buffer.dtype)
    exchanges = reduce_scatter_exchanges(buffer, buffer, segments, position, reduce)
    run_exchanges(exchanges, transport, backwards)
    own = segments[(position + 1) % transport.size]
    finish(op, buffer[own], transport.size)
    return own


def all_gather(
    buffer: Array, segments: Sequence[slice], transport: Transport, backwards: bool = False
) -> None:
    """Collective: hand every rank's finished segment to all ranks, in place.

    On entry each rank holds what `reduce_scatter` left it; on return all hold all.
    """
    _check_segments(segments, transport)
    position = position_of(transport.rank, transport.size, backwards)
    run_exchanges(all_gather_exchanges(buffer, segments, position), transport, backwards)


def gather(values: Array, transport: Transport) -> Array:
    """Collective: every rank's `values` in rank order, shape (ranks, elements), on every rank.

    `values`: one-dimensional, of the same length and any one dtype on every rank; not changed, and
    no bit of it is.
    """
    size, length = transport.size, values.size
    table = np.empty((size, length), values.dtype)
    table[transport.rank] = values
    # An all-gather begins with position p holding segment p + 1.
    rows = [(position - 1) % size for position in range(size)]
    segments = [slice(row * length, (row + 1) * length) for row in rows]
    all_gather(table.reshape(-1), segments, transport)
    return table


def broadcast(buffer: Array, transport: Transport, root: int = 0) -> None:
    """Collective: every rank's `buffer` becomes that of rank `root`, in place.

    `buffer`: contiguous, of the same length and dtype on every rank. It goes round the ring in
    chunks, so that all links are busy at once. Raises ValueError when there is no rank `root`.
    """
    if not 0 <= root < transport.size:
        raise ValueError(f"root={root}: there are {transport.size} ranks")
    position = (transport.rank - root) % transport.size
    flat = flatten(buffer, "buffer")
    run_exchanges(broadcast_exchanges(flat, position, transport.size), transport)


def all_reduce(
    values: Array, transport: Transport, op: str = "sum", out: Array | None = None
) -> Array:
    """Collective: `values` reduced over all ranks by `op`; a new array, or `out`.

    `values`: any shape, the same shape and dtype on every rank; not changed unless `out is
    values`. `out`: contiguous, of that shape and dtype. Beyond both, memory for at most one segment
    plus one chunk is used. The order of addition is the ring's and the same in every run: segment
    k is summed from rank k on, rightwards. See `hvdtrain.ring.operations` for ops, dtypes,
    rounding and NaN. Raises ValueError for others, or when `out` does not fit.
    """
    reduce = reduction(op, values.dtype)
    result = np.empty(values.shape, values.dtype) if out is None else out
    if result.shape != values.shape or result.dtype != values.dtype:
        raise ValueError(f"out: {result.dtype}{result.shape} for {values.dtype}{values.shape}")
    if out is not None and out is not values and np.may_share_memory(values, out):
        raise ValueError("out: it overlaps with values; give values itself to work in place")
    target = flatten(result, "out")
    source = target if out is values else np.ascontiguousarray(values).reshape(-1)
    size = transport.size
    exchanges = all_reduce_exchanges(
        source,
        target,
        split_evenly(source.size, size),
        transport.rank,
        reduce,
        lambda total: finish(op, total, size),
    )
    run_exchanges(exchanges, transport)
    return result


def flatten(array: Array, name: str) -> Array:
    """A one-dimensional view of the same memory. Raises ValueError where there can be none."""
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: its elements do not lie one after the other in memory")
    return array.reshape(-1)


def _check_segments(segments: Sequence[slice], transport: Transport) -> None:
    if len(segments) != transport.size:
        raise ValueError(f"{len(segments)} segments for {transport.size} ranks")
