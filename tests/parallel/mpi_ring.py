"""Run by mpirun with 9 processes: rings of 1 to 9 ranks over MPI against NumPy's sum."""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

from hvdtrain.errors import TransportError
from hvdtrain.ring import all_reduce, gamma
from hvdtrain.ring.transports.mpi import MpiTransport
from tests.rings import lengths_for, rank_data


def check(transport: MpiTransport) -> None:
    """Integers exactly, floats within N - 1 roundings; raises AssertionError."""
    size = transport.size
    for length in lengths_for(size):
        for dtype in (np.int64, np.float32, np.float64):
            data = [rank_data(rank, length, dtype) for rank in range(size)]
            result = all_reduce(data[transport.rank], transport)
            assert result.dtype == dtype
            if dtype == np.int64:
                np.testing.assert_array_equal(result, np.sum(data, axis=0))
                continue
            wide = np.array(data, dtype=np.longdouble)
            allowed = gamma(max(size - 1, 1), dtype) * np.abs(wide).sum(axis=0)
            assert (np.abs(result - wide.sum(axis=0)) <= allowed).all(), (size, length, dtype)


def rest_until_all_are_here(world: MPI.Intracomm) -> None:
    """Collective: a barrier whose waiting leaves the cores to the ranks that compute."""
    barrier = world.Ibarrier()
    while not barrier.Test():
        time.sleep(0.01)


def check_silence(world: MPI.Intracomm) -> None:
    """Rank 1 sends nothing: rank 0 reports it in time, and its memory is left alone afterwards."""
    part = world.Split(color=0 if world.rank < 2 else 1, key=world.rank)
    if world.rank < 2:
        transport = MpiTransport(part, timeout_s=0.5)
        incoming = np.zeros(10)
        if world.rank == 0:
            started = time.monotonic()
            try:
                transport.sendrecv(np.ones(10), incoming)
                raise AssertionError("nobody has sent anything")
            except TransportError as error:
                assert "rank 1 was silent for 0.5 s" in str(error), error
            assert time.monotonic() - started < 10
        part.Barrier()
        if world.rank == 1:
            transport.sendrecv(np.ones(10), np.empty(10))
        part.Barrier()
        assert not incoming.any()
    part.Free()


def main() -> int:
    world = MPI.COMM_WORLD
    for size in range(1, world.size + 1):
        part = world.Split(color=0 if world.rank < size else 1, key=world.rank)
        if world.rank < size:
            transport = MpiTransport(part)
            check(transport)
            transport.close()
            transport.close()  # a second close is harmless
        part.Free()
        rest_until_all_are_here(world)
        if world.rank == 0:
            sys.stdout.write(f"ring of {size} over MPI is right\n")
    check_silence(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
