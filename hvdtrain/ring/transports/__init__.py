"""The transports between a rank and its two neighbours, interchangeable for the algorithm.

in_process   threads of one process, for tests and for simulating many ranks
tcp          authenticated sockets, for training, scripts and verify
mpi          mpi4py on the MPI that Horovod has initialised, for comparative measurements
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

DEFAULT_TIMEOUT_S = 60.0


class Transport(Protocol):
    """The place of a rank in the ring. These four members are the whole interface."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sendrecv(
        self,
        outgoing: NDArray[Any],
        incoming: NDArray[Any],
        *,
        backwards: bool = False,
        meanwhile: Callable[[], object] | None = None,
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
