"""A ring of threads in one process: real messages, copied through queues, but no network."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TransportError
from hvdtrain.ring.transports import DEFAULT_TIMEOUT_S, Transport

Result = TypeVar("Result")
Channel = queue.SimpleQueue[NDArray[np.uint8]]


class InProcessTransport:
    """One rank of a ring made by `in_process_ring`."""

    def __init__(
        self, rank: int, size: int, left: Channel, right: Channel, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._left = left
        self._right = right
        self._timeout_s = timeout_s

    def sendrecv(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        self._right.put(outgoing.view(np.uint8).copy())
        left_rank = (self.rank - 1) % self.size
        try:
            message = self._left.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransportError(
                f"rank {self.rank}: nothing from rank {left_rank} for {self._timeout_s:g} s"
            ) from None
        if message.size != incoming.nbytes:
            raise TransportError(
                f"rank {self.rank}: rank {left_rank} sent {message.size} bytes "
                f"where {incoming.nbytes} were expected"
            )
        incoming.view(np.uint8)[:] = message

    def close(self) -> None:
        """Nothing is held."""


def in_process_ring(size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[InProcessTransport]:
    """The transports of a ring of `size` ranks, each for a thread of its own."""
    channels: list[Channel] = [queue.SimpleQueue() for _ in range(size)]
    return [
        InProcessTransport(rank, size, channels[rank], channels[(rank + 1) % size], timeout_s)
        for rank in range(size)
    ]


def run_in_process(size: int, work: Callable[[Transport], Result]) -> list[Result]:
    """Run `work` once for each of `size` ranks, in threads; the results in rank order.

    The first exception of any rank is raised.
    """
    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(work, transport) for transport in in_process_ring(size)]
        return [future.result() for future in futures]
