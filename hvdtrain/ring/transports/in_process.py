"""The ring over threads of one process: messages are copied through queues, without a network."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
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
        self, rank: int, size: int, mailboxes: Mapping[tuple[int, int], Channel], timeout_s: float
    ) -> None:
        """`mailboxes`: the incoming queue of each (rank, direction), direction +1 or -1."""
        self.rank = rank
        self.size = size
        self._mailboxes = mailboxes
        self._timeout_s = timeout_s

    def sendrecv(
        self,
        outgoing: NDArray[Any],
        incoming: NDArray[Any],
        *,
        backwards: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        direction = -1 if backwards else 1
        if outgoing.size:
            receiver = (self.rank + direction) % self.size
            self._mailboxes[receiver, direction].put(outgoing.view(np.uint8).copy())
        if meanwhile:
            meanwhile()
        if incoming.size:
            self._receive(incoming, direction)

    def _receive(self, incoming: NDArray[Any], direction: int) -> None:
        sender = (self.rank - direction) % self.size
        try:
            message = self._mailboxes[self.rank, direction].get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransportError(
                f"rank {self.rank}: no message from rank {sender} for {self._timeout_s:g} s"
            ) from None
        if message.size != incoming.nbytes:
            raise TransportError(
                f"rank {self.rank}: rank {sender} sent {message.size} bytes "
                f"where {incoming.nbytes} were expected"
            )
        incoming.view(np.uint8)[:] = message

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def in_process_ring(size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[InProcessTransport]:
    """Return the transports of a ring of `size` ranks, each for one thread."""
    mailboxes: dict[tuple[int, int], Channel] = {
        (rank, direction): queue.SimpleQueue() for rank in range(size) for direction in (1, -1)
    }
    return [InProcessTransport(rank, size, mailboxes, timeout_s) for rank in range(size)]


def run_in_process(size: int, work: Callable[[Transport], Result]) -> list[Result]:
    """Run `work` once for each of `size` ranks, in threads, and return the results in rank order.

    Raises the exception of the lowest rank that failed.
    """
    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(work, transport) for transport in in_process_ring(size)]
        return [future.result() for future in futures]
