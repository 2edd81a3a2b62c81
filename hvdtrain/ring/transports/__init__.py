"""How a rank talks to its two neighbours. The algorithm never knows which transport it has.

in_process   threads of one process, for tests and for simulating many ranks
mpi          mpi4py, sharing the MPI that Horovod has initialised
tcp          sockets, authenticated, for the gloo controller, where mpi4py sees no peers
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

DEFAULT_TIMEOUT_S = 60.0


class Transport(Protocol):
    """A rank's place in the ring: four members, and no more."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sendrecv(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        """Send `outgoing` to the right neighbour while filling `incoming` from the left one.

        Both are contiguous; their lengths may differ and may be zero. The left neighbour must
        send exactly as many bytes as `incoming` holds. Raises TransportError, naming the
        neighbour, when that does not happen.
        """

    def close(self) -> None:
        """Let go of what the transport holds. Safe to call twice."""
