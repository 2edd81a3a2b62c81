"""The ring over MPI, on its own communicator, beside Horovod's operations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.errors import TransportError
from hvdtrain.ring.operations import Array
from hvdtrain.ring.transports import DEFAULT_TIMEOUT_S, Work

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request, Status

# With two ranks both neighbours are the same rank: the tag separates the two directions.
TAG, TAG_BACKWARDS = 0, 1
PAUSE_S = 10e-6


class MpiTransport:
    """A rank of a ring over mpi4py's `Isend` and `Irecv` (buffers, no pickling)."""

    def __init__(
        self, communicator: Intracomm | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Collective: duplicate `communicator` (default: the whole MPI world).

        Horovod must have initialised MPI (`hvd.init()` under the mpi controller). Raises
        TransportError if it has not, or if MPI lacks MPI_THREAD_MULTIPLE.
        """
        self._mpi = mpi = _import_mpi()
        if not mpi.Is_initialized():
            raise TransportError("MPI is not initialised: the MPI ring needs the mpi controller")
        if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
            raise TransportError(
                "this MPI runs without MPI_THREAD_MULTIPLE beside Horovod's thread"
            )
        self._communicator: Intracomm = (communicator or mpi.COMM_WORLD).Dup()
        self._timeout_s = timeout_s
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()

    def sendrecv(
        self, outgoing: Array, incoming: Array, *, backwards: bool = False, meanwhile: Work = None
    ) -> None:
        ahead = -1 if backwards else 1
        receiver, sender = (self.rank + ahead) % self.size, (self.rank - ahead) % self.size
        tag = TAG_BACKWARDS if backwards else TAG
        statuses, byte = [self._mpi.Status(), self._mpi.Status()], self._mpi.BYTE
        try:
            arriving = leaving = self._mpi.REQUEST_NULL
            if incoming.size:
                arriving = self._communicator.Irecv((incoming.view(np.uint8), byte), sender, tag)
            if outgoing.size:
                leaving = self._communicator.Isend((outgoing.view(np.uint8), byte), receiver, tag)
            if meanwhile:
                meanwhile()
            self._finish((arriving, leaving), statuses, (sender, receiver))
        except self._mpi.Exception as error:
            raise TransportError(f"ring: rank {self.rank}: {error}") from error
        received = statuses[0].Get_count(byte) if incoming.size else 0
        if received != incoming.nbytes:
            raise TransportError(
                f"ring: rank {sender} sent {received} bytes where {incoming.nbytes} were expected "
                f"(seen by rank {self.rank})"
            )

    def _finish(
        self, requests: Sequence[Request], statuses: list[Status], neighbours: Sequence[int]
    ) -> None:
        """Wait for the requests, with a pause between polls.

        MPI's own wait spins. Where workers occupy all cores, that delays Horovod's thread, on this
        rank and the next, in releasing MPI: five times slower.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._mpi.Request.Testall(requests, statuses):
            if time.monotonic() > deadline:
                silent = neighbours[1]
                if not requests[0].Test():
                    silent = neighbours[0]
                    requests[0].Cancel()  # it could write into memory that is reused by then
                    requests[0].Wait()
                raise TransportError(
                    f"ring: rank {silent} was silent for {self._timeout_s:g} s "
                    f"(seen by rank {self.rank})"
                )
            time.sleep(PAUSE_S)

    def library_sum(self, values: Array) -> Array:
        """Collective: return the sum by MPI's own all-reduce, in place, for comparison."""
        self._communicator.Allreduce(self._mpi.IN_PLACE, values)
        return values

    def close(self) -> None:
        """Collective: free the communicator (MPI requires all ranks to take part)."""
        if self._communicator:  # not yet freed
            self._communicator.Free()


def library_version() -> str:
    """Return the version string of MPI ("Open MPI v4.1.8, ..."), which need not be initialised."""
    return str(_import_mpi().Get_library_version())


def _import_mpi() -> Any:
    """Return mpi4py's module, which must not initialise or finalise MPI: Horovod does."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI
