"""The end of a job: no rank may take Horovod, or MPI, away from another that still uses it."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.launching import CONTROLLERS, horovodrun

LATE = """
import time
import numpy as np
from hvdtrain.comm import HorovodExchange
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


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_rank_that_closes_late(controller: str) -> None:
    """Fails if the first to close ends MPI under a rank that is still freeing its ring."""
    finished = horovodrun(3, controller, [sys.executable, "-c", LATE])
    assert finished.exit_code == 0, finished.output
    assert all(f"rank {rank} closed" in finished.output for rank in range(3)), finished.output
