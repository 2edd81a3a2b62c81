"""Up to a thousand ranks in one thread: the ring's own algorithm, its messages copied by hand.

All ranks' generators of exchanges are advanced in step; what one rank sends is copied to where the
next one receives. It is the algorithm of `hvdtrain.ring.algorithm`, not a second one.
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

    `watch` is called with every position's exchange, before each step's messages are delivered.
    Raises TransportError when a message does not fit where it is received, and ValueError when
    the generators do not make the same number of exchanges.
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
    """Every rank's result of `all_reduce`, in rank order; bit for bit that of real ranks.

    `values`: one array a rank, of the same shape and dtype; not changed.
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
    """Every rank's buffer becomes that of rank `root`, in place."""
    size = len(buffers)
    ranks = [
        broadcast_exchanges(flatten(buffer, "buffer"), (rank - root) % size, size)
        for rank, buffer in enumerate(buffers)
    ]
    run_in_step([ranks[(root + place) % size] for place in range(size)], watch)
