"""The transports between a rank and its two neighbours, interchangeable for the algorithm.

Here: their interface, and the ring over threads of one process. Beside it:

tcp   authenticated sockets, for training, scripts and verify
mpi   mpi4py on the MPI that Horovod has initialised, for comparative measurements
"""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TransportError
from hvdtrain.ring.operations import Array

DEFAULT_TIMEOUT_S = 60.0

Work = Callable[[], object] | None  # to do while messages travel


class Transport(Protocol):
    """The place of a rank in the ring. These four members are the whole interface."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sendrecv(
        self, outgoing: Array, incoming: Array, *, backwards: bool = False, meanwhile: Work = None
    ) -> None:
        """Send `outgoing` to the right neighbour while filling `incoming` from the left one.

        Both are contiguous. Their lengths may differ, and an empty array is no message. The left
        neighbour must send exactly as many bytes as `incoming` holds. `backwards`: send to the left
        and receive from the right. `meanwhile` is called once, while the messages are in transit;
        it must not access either array. Raises TransportError, naming the neighbour, when a message
        does not arrive or has the wrong length.
        """

    def close(self) -> None:
        """Release the resources of the transport. Safe to call twice."""


Channel = queue.SimpleQueue[NDArray[np.uint8]]


@dataclass(eq=False)
class InProcessTransport:
    """One rank of a ring made by `in_process_ring`: messages are copied through queues."""

    rank: int
    size: int
    mailboxes: Mapping[tuple[int, int], Channel]  # incoming, by rank and direction: +1 or -1

    def sendrecv(
        self, outgoing: Array, incoming: Array, *, backwards: bool = False, meanwhile: Work = None
    ) -> None:
        direction = -1 if backwards else 1
        if outgoing.size:
            receiver = (self.rank + direction) % self.size
            self.mailboxes[receiver, direction].put(outgoing.view(np.uint8).copy())
        if meanwhile:
            meanwhile()
        if not incoming.size:
            return
        sender = (self.rank - direction) % self.size
        try:
            message = self.mailboxes[self.rank, direction].get(timeout=DEFAULT_TIMEOUT_S)
        except queue.Empty:
            raise TransportError(
                f"rank {self.rank}: no message from rank {sender} for {DEFAULT_TIMEOUT_S:g} s"
            ) from None
        if message.size != incoming.nbytes:
            raise TransportError(
                f"rank {self.rank}: rank {sender} sent {message.size} bytes "
                f"where {incoming.nbytes} were expected"
            )
        incoming.view(np.uint8)[:] = message

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def in_process_ring(size: int) -> list[InProcessTransport]:
    """Return the transports of a ring of `size` ranks, each for one thread."""
    mailboxes: dict[tuple[int, int], Channel] = {
        (rank, direction): queue.SimpleQueue() for rank in range(size) for direction in (1, -1)
    }
    return [InProcessTransport(rank, size, mailboxes) for rank in range(size)]
