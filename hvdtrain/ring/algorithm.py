"""The ring all-reduce: its transfers as generators, and the collectives that run them.

N ranks form a ring. Each rank sends only to its right neighbour (rank + 1) and receives only from
its left neighbour (rank - 1). The buffer is cut into N segments, whose lengths may differ.

                     +------+      +------+      +------+
                +--> | rank0| ---> | rank1| ---> | rank2| ---+
                |    +------+      +------+      +------+    |
                +--------------------------------------------+

Phase 1, reduce-scatter (N - 1 steps): a received segment is added to the local one.
Phase 2, all-gather     (N - 1 steps): a received segment replaces the local one.

At step s = 0 .. N - 2, indices modulo N:

    phase            rank r sends      rank r receives     after the last step rank r holds
    reduce-scatter   segment r - s     segment r - s - 1   the complete sum of segment r + 1
    all-gather       segment r + 1 - s segment r - s       the complete sum of every segment

For N = 3 (one row per step; "a>b:k" means "rank a sends segment k to rank b"):

    step 1  reduce-scatter   0>1:0   1>2:1   2>0:2
    step 2  reduce-scatter   0>1:2   1>2:0   2>0:1
    step 3  all-gather       0>1:1   1>2:2   2>0:0
    step 4  all-gather       0>1:0   1>2:1   2>0:2

Cost: each rank sends 2 (N - 1) / N of the buffer's bytes, in 2 (N - 1) messages, and receives as
many. The bytes per rank are nearly independent of N: this is why rings scale.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124.

A generator yields what a rank sends and receives at each step, and computes between the steps. It
does not depend on how messages travel: `run_transfers` runs it over any transport, and
tests/ring_trace.py runs those of many ranks in one thread. Long segments are sent in chunks: while
one chunk is in transit, the previous one is added.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, starmap
from typing import NamedTuple

import numpy as np

from hvdtrain.ring.operations import Array, Reduce, finish, reduction, split_evenly
from hvdtrain.ring.transports import Transport, Work

# Large enough that the overhead of a message is small beside its transfer, small enough to stay in
# a core's cache between arrival and addition (`hvdtrain bench ring` measures the effect).
CHUNK_BYTES = 1 << 20
Segments = Sequence[slice]  # of a buffer, one for each rank


class Transfer(NamedTuple):
    """One message to the next rank and one from the previous rank; an empty array is no message."""

    outgoing: Array
    incoming: Array
    meanwhile: Work = None  # called once, while the messages travel


Transfers = Iterator[Transfer]


def reduce_scatter_transfers(
    source: Array, result: Array, segments: Segments, position: int, reduce: Reduce
) -> Transfers:
    """Yield the N - 1 steps after which `result` holds the complete segment position + 1.

    `position`: the place of this rank, counted in the direction of the messages. `source`,
    `result`: one-dimensional, of equal length and dtype; they may be the same array. Only `result`
    is written, only in the N - 1 segments that arrive. Extra memory: one segment, or two chunks.
    """
    size, longest = len(segments), max(part.stop - part.start for part in segments)
    chunk = _chunk_length(result)
    if longest > chunk:
        yield from _in_chunks(source, result, segments, position, reduce, chunk)
        return
    arriving = np.empty(longest, result.dtype)
    outgoing = source[segments[position]]
    for step in range(size - 1):
        part = segments[(position - step - 1) % size]
        target = result[part]
        incoming = arriving[: target.size]
        yield Transfer(outgoing, incoming)
        reduce(source[part], incoming, out=target)
        outgoing = target


def _in_chunks(
    source: Array, result: Array, segments: Segments, position: int, reduce: Reduce, chunk: int
) -> Transfers:
    """Yield the same steps in chunks: equally many transfers on every rank, some of them empty."""
    size, longest = len(segments), max(part.stop - part.start for part in segments)
    arriving = cycle((np.empty(chunk, result.dtype), np.empty(chunk, result.dtype)))
    pending: Work = None
    for step in range(size - 1):
        sent, received = segments[(position - step) % size], segments[(position - step - 1) % size]
        sending = source if step == 0 else result
        for offset in range(0, longest, chunk):
            part = _chunk_of(received, offset, chunk)
            incoming = next(arriving)[: part.stop - part.start]
            # The outgoing chunk was completed one step ago: only the step's last one is pending.
            yield Transfer(sending[_chunk_of(sent, offset, chunk)], incoming, pending)
            pending = partial(reduce, source[part], incoming, out=result[part])
    if pending:
        pending()


def _chunk_of(segment: slice, offset: int, chunk: int) -> slice:
    start = min(segment.start + offset, segment.stop)
    return slice(start, min(start + chunk, segment.stop))


def all_gather_transfers(result: Array, segments: Segments, position: int) -> Transfers:
    """Yield the N - 1 steps that distribute the complete segments, position + 1 first."""
    size = len(segments)
    outgoing = result[segments[(position + 1) % size]]
    for step in range(size - 1):
        incoming = result[segments[(position - step) % size]]
        yield Transfer(outgoing, incoming)
        outgoing = incoming


def all_reduce_transfers(
    source: Array,
    result: Array,
    segments: Segments,
    position: int,
    reduce: Reduce,
    finish: Callable[[Array], object] = lambda total: None,
) -> Transfers:
    """Yield a reduce-scatter, call `finish` on the complete segment, yield an all-gather."""
    if len(segments) == 1 and result is not source:
        result[:] = source
    yield from reduce_scatter_transfers(source, result, segments, position, reduce)
    finish(result[segments[(position + 1) % len(segments)]])
    yield from all_gather_transfers(result, segments, position)


def broadcast_transfers(buffer: Array, position: int, size: int) -> Transfers:
    """Return the steps of a broadcast from position 0 along the ring, in chunks."""
    return starmap(Transfer, _chunks_along(buffer, position, size))


def chain_transfers(values: Array, position: int, size: int, reduce: Reduce) -> Transfers:
    """Yield the steps that reduce along a chain from position 0 to `size` - 1, in chunks.

    `values`: one-dimensional, overwritten by the reduction over this position and all before.
    """
    arriving = np.empty(min(_chunk_length(values), values.size), values.dtype)
    for sent, chunk in _chunks_along(values, position, size):
        arrived = arriving[: chunk.size]
        yield Transfer(sent, arrived)
        reduce(arrived, chunk, out=chunk)


def _chunks_along(buffer: Array, position: int, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield the chunk to send and the one to receive, of each step along a chain; empty: none.

    Each rank forwards one chunk while it receives the next.
    """
    if size == 1 or buffer.size == 0:
        return
    chunk = _chunk_length(buffer)
    parts = [buffer[start : start + chunk] for start in range(0, buffer.size, chunk)]
    nothing = buffer[:0]
    for step in range(len(parts) + size - 2):
        sent, received = step - position, step - position + 1
        sends = position < size - 1 and 0 <= sent < len(parts)
        receives = position > 0 and 0 <= received < len(parts)
        yield parts[sent] if sends else nothing, parts[received] if receives else nothing


def _chunk_length(buffer: Array) -> int:
    return max(CHUNK_BYTES // buffer.itemsize, 1)


def run_transfers(transfers: Transfers, transport: Transport, backwards: bool = False) -> None:
    """Collective: run the transfers of this rank over a transport, in order.

    Overflow and NaN are valid results: NumPy's warnings are off.
    """
    with np.errstate(all="ignore"):
        for outgoing, incoming, meanwhile in transfers:
            transport.sendrecv(outgoing, incoming, backwards=backwards, meanwhile=meanwhile)


def reduce_scatter(
    buffer: Array, segments: Segments, transport: Transport, op: str = "sum"
) -> slice:
    """Collective: reduce the `buffer` of all ranks in place, one complete segment per rank.

    `buffer`: one-dimensional and contiguous, the same length and dtype on every rank.
    `segments`: one slice per rank, the same on every rank. The reduction of segments[r] begins at
    rank r and goes once round the ring. Returns the slice of the complete segment on this rank,
    segments[rank + 1]; the others hold partial results. Raises ValueError for another op or dtype.
    """
    _check_segments(segments, transport)
    reduce = reduction(op, buffer.dtype)
    transfers = reduce_scatter_transfers(buffer, buffer, segments, transport.rank, reduce)
    run_transfers(transfers, transport)
    segment = segments[(transport.rank + 1) % transport.size]
    finish(op, buffer[segment], transport.size)
    return segment


def all_gather(buffer: Array, segments: Segments, transport: Transport) -> None:
    """Collective: distribute the complete segment of each rank to all ranks, in place.

    On entry each rank holds the segment that `reduce_scatter` completed there, on return all.
    """
    _check_segments(segments, transport)
    run_transfers(all_gather_transfers(buffer, segments, transport.rank), transport)


def gather(values: Array, transport: Transport) -> Array:
    """Collective: return the `values` of all ranks in rank order, shape (ranks, elements).

    `values`: one-dimensional, of any dtype, the same length and dtype on every rank; not changed.
    """
    size, length = transport.size, values.size
    table = np.empty((size, length), values.dtype)
    table[transport.rank] = values
    # At the start of an all-gather, rank r holds segment r + 1.
    rows = [(rank - 1) % size for rank in range(size)]
    segments = [slice(row * length, (row + 1) * length) for row in rows]
    all_gather(table.reshape(-1), segments, transport)
    return table


def broadcast(buffer: Array, transport: Transport, root: int = 0) -> None:
    """Collective: copy the `buffer` of rank `root` into that of every rank, in place.

    `buffer`: contiguous, of the same length and dtype on every rank. It travels in chunks, so that
    all links are busy at once. Raises ValueError when there is no rank `root`.
    """
    if not 0 <= root < transport.size:
        raise ValueError(f"root={root}: there are {transport.size} ranks")
    position = (transport.rank - root) % transport.size
    flat = flatten(buffer, "buffer")
    run_transfers(broadcast_transfers(flat, position, transport.size), transport)


def all_reduce(
    values: Array, transport: Transport, op: str = "sum", out: Array | None = None
) -> Array:
    """Collective: return `values` reduced over all ranks by `op`, in a new array or in `out`.

    `values`: any shape, the same shape and dtype on every rank; not changed unless `out is
    values`. `out`: contiguous, of that shape and dtype. Extra memory: at most one segment plus one
    chunk. The order of addition is that of the ring, the same in every run: segment k is summed
    from rank k on, rightwards. See `hvdtrain.ring.operations` for ops, dtypes, rounding and NaN.
    Raises ValueError for another op or dtype, or when `out` does not fit.
    """
    reduce = reduction(op, values.dtype)
    result = np.empty(values.shape, values.dtype) if out is None else out
    if result.shape != values.shape or result.dtype != values.dtype:
        raise ValueError(
            f"out: is {result.dtype}{result.shape}, must be {values.dtype}{values.shape}"
        )
    if out is not None and out is not values and np.may_share_memory(values, out):
        raise ValueError("out: overlaps with values; pass values itself to work in place")
    target = flatten(result, "out")
    source = target if out is values else np.ascontiguousarray(values).reshape(-1)
    segments = split_evenly(source.size, transport.size)
    complete = partial(finish, op, size=transport.size)
    transfers = all_reduce_transfers(source, target, segments, transport.rank, reduce, complete)
    run_transfers(transfers, transport)
    return result


def flatten(array: Array, name: str) -> Array:
    """Return a one-dimensional view of `array`. Raises ValueError if it is not contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: is not contiguous in memory")
    return array.reshape(-1)


def _check_segments(segments: Segments, transport: Transport) -> None:
    if len(segments) != transport.size:
        raise ValueError(f"{len(segments)} segments for {transport.size} ranks")
