"""Plain horovodrun on three real hosts with unequal slots, on both controllers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.crowd import horovodrun
from tests.hosts.namespaces import Cluster
from tests.hosts.placed import FOLDER
from tests.parallel.launching import CONTROLLERS, hvdtrain

# By rank: host, local rank, local size, cross rank, cross size. Hosts have 1, 2 and 1 slots: only
# one of them has a second local rank.
PLACES = [["alpha", 0, 1, 0, 3], ["beta", 0, 2, 1, 3], ["beta", 1, 2, 0, 1], ["gamma", 0, 1, 2, 3]]
EXPERIMENT = [
    "--model=tests.hosts.placed:lenet",
    "--data=synthetic:1x28x28,samples=64",
    "--global-batch-size=16",
]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_train(make_cluster: Callable[..., Cluster], controller: str, tmp_path: Path) -> None:
    """Fails if training over hosts fails an audit, loses a sample, or leaves a process behind; or
    if a rank runs on another host than -H says, or counts its neighbours wrongly.
    """
    cluster = make_cluster(ssh_port=2222)
    flags = ["--epochs=1", "--audit-every=1", f"--output={tmp_path}", "--experiment=run"]
    command = horovodrun(cluster, controller, hvdtrain("train", *EXPERIMENT, *flags))
    done = cluster.run(command, timeout_s=240, variables={FOLDER: str(tmp_path)})
    assert done.exit_code == 0, done.output
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)] == PLACES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["controller"]) == ("finished", controller)
    assert (summary["world_size"], summary["steps"], summary["samples_seen"]) == (4, 4, 64)
    assert (summary["audit"]["checked"], summary["audit"]["failed"]) == (4, 0)
