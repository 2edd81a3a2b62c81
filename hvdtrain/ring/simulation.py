"""A simulation of up to a thousand ranks of the ring in one thread.

The generators of all ranks (`hvdtrain.ring.algorithm`) are advanced in lockstep. Each outgoing
array is copied to the incoming array of the next rank. The algorithm is not implemented again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.errors import TransportError
from hvdtrain.ring.algorithm import (
    Exchange,
    Exchanges,
    all_reduce_exchanges,
    broadcast_exchanges,
    flatten,
)
from hvdtrain.ring.operations import Array, finish, reduction
from hvdtrain.ring.segments import split_evenly

Watch = Callable[[Sequence[Exchange]], object]


def run_in_step(positions: Sequence[Exchanges], watch: Watch | None = None) -> None:
    """Run one generator for each position of a ring; position p sends to p + 1.

    `watch` is called at each step with the exchanges of all positions, before the messages are
    delivered. Raises TransportError when the lengths of a message and of its incoming array differ,
    and ValueError when the generators do not yield the same number of exchanges.
    """
    with np.errstate(all="ignore"):
        for exchanges in zip(*positions, strict=True):
            if watch:
                watch(exchanges)
            _deliver(exchanges)


def _deliver(exchanges: Sequence[Exchange]) -> None:
    outgoing = exchanges[-1].outgoing
    for position, exchange in enumerate(exchanges):
        if outgoing.size != exchange.incoming.size:
            raise TransportError(
                f"position {position} expects {exchange.incoming.size} elements and is sent "
                f"{outgoing.size}"
            )
        exchange.incoming[...] = outgoing
        outgoing = exchange.outgoing
    for exchange in exchanges:
        if exchange.meanwhile:
            exchange.meanwhile()


def simulate_all_reduce(
    values: Sequence[Array], op: str = "sum", watch: Watch | None = None
) -> list[Array]:
    """Return the result of `all_reduce` on every rank, in rank order, bit for bit as on real ranks.

    `values`: one array per rank, of the same shape and dtype; not changed.
    """
    size = len(values)
    reduce = reduction(op, values[0].dtype)
    results = [np.empty(one.shape, one.dtype) for one in values]
    segments = split_evenly(values[0].size, size)

    def close(total: Array) -> None:
        finish(op, total, size)

    ranks = [
        all_reduce_exchanges(
            np.ascontiguousarray(one).reshape(-1), result.reshape(-1), segments, rank, reduce, close
        )
        for rank, (one, result) in enumerate(zip(values, results, strict=True))
    ]
    run_in_step(ranks, watch)
    return results


def simulate_broadcast(buffers: Sequence[Array], root: int, watch: Watch | None = None) -> None:
    """Copy the buffer of rank `root` into that of every rank, in place."""
    size = len(buffers)
    ranks = [
        broadcast_exchanges(flatten(buffer, "buffer"), (rank - root) % size, size)
        for rank, buffer in enumerate(buffers)
    ]
    run_in_step([ranks[(root + place) % size] for place in range(size)], watch)
