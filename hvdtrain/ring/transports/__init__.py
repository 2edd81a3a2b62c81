"""How a rank talks to its two neighbours. The algorithm never knows which transport it has.

in_process   threads of one process, for tests and for simulating many ranks
tcp          sockets, authenticated: what training, scripts and verify use
mpi          mpi4py, sharing the MPI that Horovod has initialised, for measuring beside it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

DEFAULT_TIMEOUT_S = 60.0


class Transport(Protocol):
    """A rank's place in the ring: four members, and no more."""

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

        Both are contiguous; their lengths may differ, and an empty one is no message at all. The
        left neighbour must send exactly as many bytes as `incoming` holds. `backwards`: to the
        left and from the right. `meanwhile` is called once, while the messages are on their way;
        it must touch neither array. Raises TransportError, naming the neighbour, when a message
        does not come or is of the wrong length.
        """

    def close(self) -> None:
        """Let go of what the transport holds. Safe to call twice."""
