"""Training with more workers than cores. (tests.campaigns.crowded: more of it, repeated.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.crowd import busy_processes, crowded_command, slots_of, why_not_audited
from tests.hosts.namespaces import Cluster

WORKERS, BUSY = 6, 2


@pytest.mark.timeout(600)
def test_more_workers_than_cores(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Fails if ranks that wait keep the cores from those that compute, beside other busy processes,
    until one is taken for lost; or if the ring stands still beside Horovod's thread in Open MPI.
    """
    cluster = make_cluster(slots_of(WORKERS))
    with busy_processes(BUSY):
        done = cluster.run(crowded_command(cluster, "mpi", "horovodrun", tmp_path), timeout_s=240)
    assert done.exit_code == 0, done.output
    assert not why_not_audited(tmp_path, WORKERS), done.output
