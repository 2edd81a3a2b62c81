"""launch/cluster from `up` to `down`, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cluster.containers import docker, launch_cluster, must

TRAIN = ["train", "--model", "lenet", "--data", "digits", "--max-steps", "4", "-j", "0"]


def test_a_run_from_up_to_down(image: str, tmp_path: Path) -> None:
    """Fails when the script loses what stands behind --, a log does not show, the runs are not
    copied, or `down` leaves something behind.
    """
    name = f"hvdtrain-script-{os.getpid()}"
    try:
        launch_cluster(name, "up", "--hosts", "1", "--slots", "2", "--image", image)
        launch_cluster(name, "run", "-np", "2", "--", *TRAIN, "--experiment", "mine")
        logs = launch_cluster(name, "logs")
        assert "Accepted publickey for hvdtrain" in logs or "Server listening" in logs
        assert "rank.0.log" in logs and "finished: 1 epoch, 4 steps" in logs
        launch_cluster(name, "down", "--output", str(tmp_path))
    finally:
        launch_cluster(name, "down", "--discard")
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("finished", 4, 2)
    for what in ("ps --all", "volume ls", "network ls"):
        label = f"label=com.docker.compose.project={name}"
        left = must(docker(*what.split(), "--quiet", "--filter", label))
        assert not left, f"left behind: {what}: {left}"
