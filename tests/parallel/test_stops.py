"""Stops that reach more processes than the run's own; all of them: tests/campaigns/stops.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.parallel.stops import EVALUATION, STEP, Stop, stop_job

CASES = [
    Stop("train", signal.SIGTERM, "group", 2),
    Stop("launch gloo", signal.SIGHUP, "session", 2),
    Stop("launch mpi", signal.SIGTERM, "each", 2),
    Stop("launch mpi", signal.SIGUSR1, "group", 0),
    Stop("horovodrun mpi", signal.SIGINT, "each", 2),
    # Longer than the time to stop in: a step, of one rank, and an evaluation.
    Stop("launch gloo", signal.SIGTERM, "leader", 0, STEP),
    Stop("horovodrun mpi", signal.SIGTERM, "workers", 0, EVALUATION),
]


@pytest.mark.parametrize("stop", CASES, ids=str)
def test_every_stop_saves(stop: Stop, tmp_path: Path) -> None:
    """Fails when readers do not outlive a signal until the run is saved, when the exit code is
    another than the signal's, or when a process is left; where it cannot be saved in time, when the
    job ends later, without naming the checkpoint that is kept, or leaves another half written.
    """
    ended = stop_job(stop, tmp_path)
    assert not ended.problem(stop), f"{ended.problem(stop)}\n{ended.output}"
