"""`hvdtrain launch` on three hosts with unequal slots, undisturbed and under faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.hosts.trials import (
    ANSWERS,
    BACK,
    BREAK_SSH,
    CHECKPOINT_EVERY,
    END_S,
    EXPERIMENT,
    FAULTS,
    KILL_LAUNCHER,
    NOTICED_S,
    RESTART,
    Scene,
    disturb,
    launch,
    read_summary,
    undisturbed,
)
from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import hvdtrain

# Each fault once. (tests.campaigns.recovery repeats all of them on both controllers.)
FAULTS_OF = {
    "gloo": ["SIGKILL a worker", BREAK_SSH, "fill the disk of rank 0", KILL_LAUNCHER],
    "mpi": ["SIGSTOP a worker", "abort in native code", "cut off a host"],
}
STEPS = {"gloo": 130, "mpi": 100}  # more than the faults leave time for


def test_every_fault_has_its_turn() -> None:
    """Fails if a new fault is tested on no controller."""
    assert sorted(FAULTS_OF["gloo"] + FAULTS_OF["mpi"]) == sorted(FAULTS)


@pytest.mark.timeout(420)
@pytest.mark.parametrize("controller", FAULTS_OF)
def test_what_is_learned_survives_every_fault(
    make_cluster: Callable[..., Cluster], tmp_path: Path, controller: str
) -> None:
    """Fails if a job in peace fails an audit or loses a sample, if a disturbed one does not end
    with the same parameters bit for bit, or if anything is left running on any host.
    """
    cluster = make_cluster()
    steps = STEPS[controller]
    peace = undisturbed(cluster, controller, tmp_path / "peace", steps)
    assert (peace["world_size"], peace["controller"], peace["steps"]) == (4, controller, steps)
    assert peace["audit"]["checked"] == steps // 10  # type: ignore[index]
    assert peace["audit"]["failed"] == 0  # type: ignore[index]
    faults, dice = FAULTS_OF[controller], random.Random(0)
    ended = disturb(cluster, faults, controller, tmp_path / "runs", steps, dice)
    for name in ("status", "params_sha256", "samples_seen", "steps", "world_size"):
        assert ended.summary[name] == peace[name], ended.output
    assert ended.left == 0, ended.output


@pytest.mark.timeout(600)
def test_the_same_bits_though_a_host_is_lost_and_comes_back(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a host without power is not noticed, if the job does not go on with those that are
    left, or with all as soon as it is back, or if virtual workers then end with other bits than in
    one process: by a random number or statistic, or a sample, that was lost or counted twice; or if
    a process on one host alone, which replays 20 steps of the run, finds other bits.
    """
    cluster, steps = make_cluster(), 400
    lines = launch(cluster, "gloo", tmp_path / "runs", steps, train=["--trace-every=1"])
    lines.wait_for(f"step {CHECKPOINT_EVERY + 1}/", END_S)
    cluster.kill_host(2)
    lines.wait_for(BACK, NOTICED_S)
    cluster.revive(2)
    answered_s = lines.wait_for(ANSWERS, NOTICED_S)
    lines.wait_for(BACK, END_S, answered_s)
    Scene(cluster, tmp_path / "runs", lines, random.Random(0)).worker(1).kill()
    assert lines.wait(END_S) == 0, lines.text
    assert "left out until it answers again: gamma" in lines.text
    assert lines.text.count(RESTART) == 2, "a host that is taken back is no failure"
    sizes = [
        size for size in (3, 4) if f"{size} workers (gloo) for 4 virtual workers" in lines.text
    ]
    assert sizes == [3, 4], lines.text
    sampled = hvdtrain("replay", str(tmp_path / "runs" / "run"), "--sample=20", "--seed=3")
    replayed = cluster.run(sampled, host=2)
    assert "replay: 20 steps agreed bit for bit" in replayed.output
    flags = [*EXPERIMENT, f"--max-steps={steps}"]
    assert train(flags, tmp_path / "alone", 1, "none").exit_code == 0
    summary, _ = summary_and_weights(tmp_path / "runs" / "run")
    alone, _ = summary_and_weights(tmp_path / "alone")
    assert (summary["world_size"], alone["world_size"]) == (4, 1)
    assert summary["audit"]["failed"] == 0 < summary["audit"]["checked"]
    for name in ("params_sha256", "samples_seen", "valid_loss", "train_loss"):
        assert summary[name] == alone[name], name


@pytest.mark.timeout(600)
def test_a_host_that_computes_wrongly_is_left_out(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a wrong backward pass goes unnoticed, if another host is left out, or if the job
    is started on the wrong host again; or ends although enough others are left.
    """
    cluster, steps = make_cluster(), 40
    flags = ["--model=tests.hosts.wrong_host:lenet", "--audit-compute=1"]
    lines = launch(cluster, "mpi", tmp_path / "runs", steps, train=flags)
    assert lines.wait(END_S) == 0, lines.text
    assert "computed different gradients of share" in lines.text
    assert "left out: beta computes wrongly" in lines.text
    assert lines.text.count(RESTART) == 1, lines.text
    summary = read_summary(cluster, tmp_path / "runs")
    assert (summary["world_size"], summary["steps"]) == (2, steps)
    lines = launch(cluster, "gloo", tmp_path / "more", steps, "--min-np=3", train=flags)
    assert lines.wait(END_S) == 17, lines.text
    few = "not restarted: without beta, which computes wrongly, the hosts have 2 slots"
    assert few in lines.text
