"""The ring over real MPI processes, without Horovod."""

from __future__ import annotations

import os
import sys

from tests.parallel.launching import BIN, run

LARGEST = 9


def test_rings_of_1_to_9_ranks_over_mpi() -> None:
    """Fails if a sum over MPI is wrong for any number of ranks, length or type."""
    mpirun = BIN / "mpirun"
    command = [str(mpirun if mpirun.exists() else "mpirun"), "-np", str(LARGEST), "--oversubscribe"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command += [
        "--mca",
        "mpi_yield_when_idle",
        "1",
        sys.executable,
        "-m",
        "tests.parallel.mpi_ring",
    ]
    finished = run(command, timeout_s=200)
    assert finished.exit_code == 0, finished.output
    for size in range(1, LARGEST + 1):
        assert f"ring of {size} over MPI is right" in finished.output, finished.output
