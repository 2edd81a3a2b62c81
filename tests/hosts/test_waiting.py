"""The scheduling of Horovod's threads between hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.parallel.launching import CONTROLLERS, hvdtrain

SCRIPT = """\
import os
from hvdtrain.exchange.horovod import HorovodExchange
from hvdtrain.exchange.waiting import thread_ids
from hvdtrain.models import LeNet
import torch

def leave_the_core():
    policies = {os.sched_getscheduler(thread) for thread in thread_ids()}
    return policies == {os.SCHED_OTHER, os.SCHED_BATCH}

exchange = HorovodExchange()
found = [leave_the_core()]
wide = torch.nn.Sequential(torch.nn.Linear(784, 2048), torch.nn.Linear(2048, 2048))
for model in (LeNet(1, 10), wide):
    exchange.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found.append(leave_the_core())
print("before, LeNet, wide:", *found, flush=True)
exchange.close()
"""


@pytest.mark.timeout(300)
def test_messages_that_overlap_computing_begin_at_once(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails unless Horovod's threads leave the core to the computing thread between hosts until a
    model has several messages, which travel while it computes.
    """
    cluster = make_cluster([1, 1])
    (tmp_path / "threads.py").write_text(SCRIPT)
    for controller in CONTROLLERS:
        start = hvdtrain("launch", "-H", cluster.host_list, f"--controller={controller}", "--")
        done = cluster.run([*start, "python", "threads.py"], 120, cwd=tmp_path)
        assert done.exit_code == 0, f"{controller}: {done.output}"
        assert done.output.count("before, LeNet, wide: True True False") == 2, done.output
