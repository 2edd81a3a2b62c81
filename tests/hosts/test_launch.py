"""`hvdtrain launch` on three hosts with unequal slots, undisturbed and under faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.hosts.trials import (
    BREAK_SSH,
    CHECKPOINT_EVERY,
    END_S,
    EXPERIMENT,
    FAULTS,
    KILL_LAUNCHER,
    RESTART,
    disturb,
    launch,
    undisturbed,
)
from tests.parallel.experiments import largest_difference, summary_and_weights, train

# Each fault once. (tests.campaigns.recovery repeats all of them on both controllers.)
FAULTS_OF = {
    "gloo": ["SIGKILL a worker", BREAK_SSH, "fill the disk of rank 0", KILL_LAUNCHER],
    "mpi": ["SIGSTOP a worker", "abort in native code", "cut off a host"],
}
SAME_IN_FLOAT64 = 1e-9  # design: whole runs agree for all N
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


@pytest.mark.timeout(300)
def test_the_same_experiment_goes_on_without_a_host_that_is_gone(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a host without power is not noticed, if the job does not go on with those that are
    left, or if it learns anything else than one process alone: by another global batch, say, or a
    sample that was lost or counted twice.
    """
    cluster, steps = make_cluster([1, 1, 1]), 30
    lines = launch(cluster, "gloo", tmp_path / "runs", steps, "--min-np=2", train="--dtype=float64")
    lines.wait_for(f"step {CHECKPOINT_EVERY + 1}/", END_S)
    cluster.kill_host(2)
    lines.wait_for(RESTART, 60)
    assert lines.wait(END_S) == 0, lines.text
    assert "left out: gamma: ssh: " in lines.text
    flags = [*EXPERIMENT, f"--max-steps={steps}", "--dtype=float64"]
    assert train(flags, tmp_path / "alone", 1, "none").exit_code == 0
    summary, weights = summary_and_weights(tmp_path / "runs" / "run")
    alone, expected = summary_and_weights(tmp_path / "alone")
    assert (summary["world_size"], alone["world_size"]) == (2, 1)
    assert summary["samples_seen"] == alone["samples_seen"]
    assert summary["audit"]["failed"] == 0
    assert largest_difference(weights, expected) < SAME_IN_FLOAT64
