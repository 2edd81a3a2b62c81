"""The end of a job: no rank may take Horovod, or MPI, away from another that still uses it."""

from __future__ import annotations

import sys
from pathlib import Path

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
    finished = horovodrun(3, "mpi", [sys.executable, "-c", LEFT, str(tmp_path)], timeout_s=60)
    assert finished.exit_code == 0, finished.output
    assert "rank 2: ring: rank 1 closed its connection" in finished.output, finished.output
    assert finished.output.count("rank 0: ring: rank ") == 1, finished.output
    assert "MPI_FINALIZE" not in finished.output, finished.output
