"""`hvdtrain launch --nnodes`: the same command on each of three hosts, on which no sshd runs."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hvdtrain.launcher.nodes import SECRET
from tests.hosts.namespaces import Cluster
from tests.hosts.trials import (
    CHECKPOINT_EVERY,
    END_S,
    EXPERIMENT,
    RESTART,
    Lines,
    Scene,
    read_summary,
)
from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import hvdtrain

TOKEN = "a-secret-of-the-nodes"
STEPS = 30
WAIT = "import signal, time; print('waits'); time.sleep(60)"


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """Return three hosts of one slot, which cannot be reached by SSH."""
    cluster = make_cluster([1, 1, 1])
    for host in range(3):
        cluster.stop_sshd(host)
    return cluster


def launch(
    cluster: Cluster, rank: int, *flags: str, words: Sequence[str], secret: str = TOKEN
) -> Lines:
    """Start the command of a node, with the variables of a pod of an indexed Job."""
    own = {"JOB_COMPLETION_INDEX": str(rank), "OWN": f"of {rank}"}
    command = hvdtrain("launch", "--nnodes=3", "--rendezvous=alpha:29500", *flags, "--", *words)
    variables = {SECRET: secret, "OMP_NUM_THREADS": "1", **own}
    return Lines(cluster.start(command, rank, variables=variables))


@pytest.mark.timeout(420)
def test_the_same_bits_though_a_worker_is_killed_and_a_host_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Fails if nodes that start in any order do not make a job, if a worker that is killed is not
    named, if the job does not go on without the host that is lost at the same time, or ends with
    other bits than one process; or if a command does not end with the exit code of the job.
    """
    words = ["train", *EXPERIMENT, f"--max-steps={STEPS}"]
    words += [f"--output={tmp_path / 'runs'}", "--experiment=run"]
    flags = ["--restarts=3", "--min-np=2", "--watchdog-timeout-s=8"]
    nodes = [launch(cluster, rank, *flags, words=words) for rank in (2, 1, 0)][::-1]
    lines = nodes[0]
    lines.wait_for(f"step {CHECKPOINT_EVERY + 1}/", END_S)
    Scene(cluster, tmp_path / "runs", lines, random.Random(0)).worker(1).kill()
    cluster.kill_host(2)
    assert [node.wait(END_S) for node in nodes[:2]] == [0, 0], lines.text
    assert "rank 1 on beta was killed by SIGKILL" in lines.text
    assert re.search("left out(: gamma: node: | until it answers again: gamma)", lines.text)
    assert lines.text.count(RESTART) == 1, lines.text
    assert "the job has ended with exit code 0" in nodes[1].text
    flags = [*EXPERIMENT, f"--max-steps={STEPS}"]
    assert train(flags, tmp_path / "alone", 1, "none").exit_code == 0
    alone, _ = summary_and_weights(tmp_path / "alone")
    summary = read_summary(cluster, tmp_path / "runs")
    for name in ("params_sha256", "samples_seen", "valid_loss"):
        assert summary[name] == alone[name], name


@pytest.mark.timeout(240)
def test_who_may_join_and_what_ends_all(cluster: Cluster) -> None:
    """Fails if a node with another secret or command is admitted, if a missing one is not named; if
    workers do not have the environment of their own node, or get the secret; or if a signal to the
    command of any node does not end the job on all.
    """
    words = ["python", "-c", WAIT]
    short = "--start-timeout-s=15"  # on a busy machine a node takes some seconds to begin
    nodes = [launch(cluster, rank, short, words=words) for rank in (0, 1)]
    nodes.append(launch(cluster, 2, short, words=words, secret=TOKEN.upper()))
    assert [node.wait(90) for node in nodes] == [3, 3, 3], nodes[0].text
    assert "have not joined alpha:29500 within 15 s: 2; turned away" in nodes[0].text
    assert "does not have the secret of this node" in nodes[2].text
    nodes = [launch(cluster, 0, words=words), launch(cluster, 1, words=["python", "-c", "0"])]
    assert [node.wait(90) for node in nodes] == [3, 3], nodes[0].text
    for node in nodes:
        assert "node rank 1 on beta has another value of command" in node.text
    show = f"import os; print(os.environ['OWN'], os.environ.get('{SECRET}')); {WAIT}"
    nodes = [launch(cluster, rank, words=["python", "-c", show]) for rank in range(3)]
    for waits in ("waits", "[1] waits", "[2] waits"):
        nodes[0].wait_for(waits, 60)
    nodes[2].process.send_signal(signal.SIGTERM)
    assert [node.wait(60) for node in nodes] == [143, 143, 143], nodes[0].text
    for rank, mark in enumerate(("", "[1] ", "[2] ")):
        assert f"{mark}of {rank} None\n" in nodes[0].text
