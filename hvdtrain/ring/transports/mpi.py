"""The ring over MPI, on a communicator of its own, beside Horovod's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TransportError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class MpiTransport:
    """A rank of a ring over mpi4py's `Sendrecv` (buffers, no pickling)."""

    def __init__(self, communicator: Intracomm | None = None) -> None:
        """Collective: every rank of `communicator` (default: the whole MPI world) makes one.

        Horovod must have initialised MPI (`hvd.init()` under the mpi controller). Raises
        TransportError when it has not, or without thread support.
        """
        import mpi4py

        mpi4py.rc.initialize = False  # Horovod has done it, and will finalize
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            raise TransportError("MPI is not initialised: the MPI ring needs the mpi controller")
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise TransportError(
                "this MPI runs without MPI_THREAD_MULTIPLE beside Horovod's thread"
            )
        self._mpi = MPI
        self._communicator = (communicator or MPI.COMM_WORLD).Dup()
        self._open = True
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()

    def sendrecv(self, outgoing: NDArray[Any], incoming: NDArray[Any]) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        status = self._mpi.Status()
        try:
            self._communicator.Sendrecv(
                sendbuf=[outgoing.view(np.uint8), self._mpi.BYTE],
                dest=right,
                recvbuf=[incoming.view(np.uint8), self._mpi.BYTE],
                source=left,
                status=status,
            )
        except self._mpi.Exception as error:
            raise TransportError(f"ring: rank {self.rank}: {error}") from error
        received = status.Get_count(self._mpi.BYTE)
        if received != incoming.nbytes:
            raise TransportError(
                f"ring: rank {left} sent {received} bytes where {incoming.nbytes} were expected "
                f"(seen by rank {self.rank})"
            )

    def close(self) -> None:
        """Collective: frees the communicator (MPI asks all ranks to take part)."""
        if self._open:
            self._open = False
            self._communicator.Free()
