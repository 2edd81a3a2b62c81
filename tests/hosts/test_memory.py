"""The state in memory, of a job that loses rank 0's host and all that is on its disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.hosts.trials import END_S, NOTICED_S, RESTART, Lines
from tests.parallel.experiments import train
from tests.parallel.launching import hvdtrain

EVERY, STEPS, LOST_AFTER = 3, 40, 11
FLAGS = ["--model=lenet", "--data=synthetic:1x28x28,samples=256", "--global-batch-size=30"]
FLAGS += [f"--max-steps={STEPS}", "--virtual-workers=3", "--trace-every=2", "--log-interval=1"]
FLAGS += ["--eval-interval=9", f"--memory-interval={EVERY}", "--audit-every=5"]


@pytest.mark.timeout(420)
def test_the_same_bits_though_rank_0s_host_and_disk_are_lost(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a job whose only disk copies are lost with rank 0's host begins again, loses more
    steps than the interval, lacks a record, or ends with other bits than one process; or if it has
    nothing on disk once it has gone on.
    """
    cluster, output = make_cluster([1, 1]), tmp_path / "runs"
    cluster.make_private(0, output, mib=64)
    command = hvdtrain("launch", "-H", "alpha:1,beta:1", "--controller=gloo", "--restarts=3")
    command += ["--min-np=1", "--watchdog-timeout-s=8", "--", "train", *FLAGS]
    command += [f"--output={output}", "--experiment=run"]
    threads = {"OMP_NUM_THREADS": "1"}
    lines = Lines(cluster.start(command, host=1, variables=threads))
    lines.wait_for(f"step {LOST_AFTER}/", END_S)
    cluster.kill_host(0)
    lines.wait_for(RESTART, NOTICED_S)
    made = max(int(step) for step in re.findall(r"^step (\d+)/", lines.text, re.MULTILINE))
    assert lines.wait(END_S) == 0, lines.text
    run = cluster.path(1, output / "run")
    summary = json.loads((run / "summary.json").read_text())
    assert made - EVERY <= summary["resumed_from"] <= made + 1, lines.text
    assert (run / "checkpoints" / "last").exists()
    assert train(FLAGS, tmp_path / "alone", 1, "none", variables=threads).exit_code == 0
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    for name in ("params_sha256", "samples_seen", "train_loss", "valid_loss", "status", "trace"):
        assert summary[name] == alone[name], name
    audits = summary["resumed_from"] // 5  # on one worker there is nothing to audit
    assert summary["audit"]["checked"] == audits > 0 == summary["audit"]["failed"]
    steps = [record["step"] for record in records(run) if record["kind"] == "step"]
    assert steps == [*range(1, STEPS + 1)]


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
