"""The end of a job: no rank may take Horovod, or MPI, away from another that still uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parallel.launching import horovodrun

LATE = """
import time
import numpy as np
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.ring import all_reduce

exchange = HorovodExchange()
ring = exchange.ring()
total = all_reduce(np.ones(4), ring)
if exchange.rank == 0:
    time.sleep(1)
ring.close()
exchange.close()
print(f"rank {exchange.rank} closed")
"""


def test_a_rank_that_closes_late() -> None:
    """Fails if the first to close ends MPI under a rank that is still freeing its ring."""
    finished = horovodrun(3, "mpi", [sys.executable, "-c", LATE])
    assert finished.exit_code == 0, finished.output
    assert all(f"rank {rank} closed" in finished.output for rank in range(3)), finished.output


LEFT = """
import sys, time
from pathlib import Path
import numpy as np
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.errors import TransportError
from hvdtrain.ring import all_reduce

folder = Path(sys.argv[1])
exchange = HorovodExchange()
ring = exchange.ring()
assert all_reduce(np.full(4, exchange.rank + 1.0), ring).tolist() == [6.0] * 4
if exchange.rank == 1:
    exchange.abandon()
    while len(list(folder.glob("waits-*"))) < 2:
        time.sleep(0.05)
    ring.close()
    while len(list(folder.glob("lost-*"))) < 2:  # the first to end would end the others
        time.sleep(0.05)
else:
    (folder / f"waits-{exchange.rank}").touch()
    try:
        all_reduce(np.ones(4), ring)
    except TransportError as error:
        print(f"rank {exchange.rank}: {error}", flush=True)
        ring.close()
        (folder / f"lost-{exchange.rank}").touch()
"""


def test_a_rank_that_leaves_others_in_the_ring(tmp_path: Path) -> None:
    """Fails if Horovod's end, which is MPI's, aborts ranks that wait in the ring: nobody may call
    MPI then, and they are to report who has left.
    """
    finished = horovodrun(3, "mpi", [sys.executable, "-c", LEFT, str(tmp_path)], timeout_s=240)
    assert finished.exit_code == 0, finished.output
    assert "rank 2: ring: rank 1 closed its connection" in finished.output, finished.output
    assert finished.output.count("rank 0: ring: rank ") == 1, finished.output
    assert "MPI_FINALIZE" not in finished.output, finished.output


STOPS = """
import os, signal, subprocess, sys
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

hvd.init()
values = torch.ones(int(sys.argv[1]))
for step in range(20):
    if hvd.rank() == 1 and step == 5:
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    if hvd.rank() == 1 and step in (5, 10):
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        assert hvd.allreduce(values, name="values", op=hvd.Sum)[0] == 3
    except HorovodInternalError as error:
        print(f"rank {hvd.rank()}, step {step}: {error}", flush=True)
        sys.exit(5)
"""


@pytest.mark.parametrize("elements", [3_000_000, 3])
def test_a_rank_that_is_stopped(elements: int) -> None:
    """Fails if the others wait for ever for it, in a sum in memory, in a small one, in the
    agreement before them or at the end of MPI; if they do not name it; or if they end where it only
    pauses.
    """
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"}
    command = [sys.executable, "-c", STOPS, str(elements)]
    finished = horovodrun(3, "mpi", command, timeout_s=60, variables=limits)
    assert finished.exit_code == 5, finished.output
    for rank in (0, 2):
        text = f"rank {rank}, step 10: waited 5 s for rank "
        assert text in finished.output, finished.output
    assert "step 10: waited 5 s for rank 1, which has stopped" in finished.output, finished.output


KILLED = """
import os, signal, sys
import horovod.torch as hvd
import torch

def end():
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "start-up":
    end()
hvd.init()
values = torch.ones(3_000_000)
for step in range(20):
    if step == 10:
        end()
    hvd.allreduce_(values, name="values")
"""


@pytest.mark.parametrize("when", ["start-up", "steps"])
def test_a_killed_job_leaves_no_memory(when: str, tmp_path: Path) -> None:
    """Fails if a file of ours, or a segment of Open MPI, stays in memory."""
    files = set(Path("/dev/shm").glob("horovod*"))
    folder = {"OMPI_MCA_btl_vader_backing_directory": str(tmp_path)}  # of this job alone
    finished = horovodrun(3, "mpi", [sys.executable, "-c", KILLED, when], variables=folder)
    assert finished.exit_code == 137, finished.output
    assert set(Path("/dev/shm").glob("horovod*")) == files
    assert list(tmp_path.iterdir()) == []
