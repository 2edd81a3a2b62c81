"""Standbys: workers that are forks of a process which has imported everything."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.test_launch import STARTED_S, TRAIN, Job, launch, read_summary, started

FLAGS = [*TRAIN[1:], "--max-steps=200", "--virtual-workers=2", "--eval-interval=1000"]
JOB_FOLDERS = Path("/dev/shm")


def process_of(job: Job, what: str) -> psutil.Process:
    """A process on the way to the worker of rank 1."""
    worker = job.worker(1)
    assert is_fork(worker) and "[rank 1]" in worker.cmdline()
    agent = worker.parent()
    assert agent is not None
    if what in ("worker", "agent"):
        return worker if what == "worker" else agent
    if what == "standby":
        named = [p for p in job.processes() if "hvdtrain.launcher.standby" in p.cmdline()]
        return next(process for process in named if not is_fork(process))
    words = [word for word in agent.cmdline() if word]  # a guard was started by the same ones
    return next(p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == words)


def is_fork(process: psutil.Process) -> bool:
    """Whether it shows another command than it was started with."""
    return process.cmdline()[-1] == ""


def wait_for_recoveries(job: Job, count: int) -> None:
    deadline = time.monotonic() + STARTED_S
    while job.text.count("back after") < count:
        assert job.process.poll() is None and time.monotonic() < deadline, job.text
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_whatever_is_killed_the_job_goes_on(tmp_path: Path) -> None:
    """Fails if workers are not forks, if one of the processes that start and watch them cannot be
    killed without the loss of the job, if something is left, or if the end is not that of one
    process.
    """
    before = {*JOB_FOLDERS.glob("hvdtrain-job-*")}
    with started(launch("--restarts=9", "--", "train", *FLAGS), tmp_path) as job:
        job.wait_for(r"^step 7/")
        for count, names in enumerate((["worker"], ["agent"], ["guard"], ["standby", "worker"]), 1):
            for name in names:
                process_of(job, name).send_signal(signal.SIGKILL)
            wait_for_recoveries(job, count)
        assert job.end() == 0, job.text
    assert {*JOB_FOLDERS.glob("hvdtrain-job-*")} <= before
    assert train(FLAGS, tmp_path / "alone", 1, "none").exit_code == 0
    alone, _ = summary_and_weights(tmp_path / "alone")
    assert read_summary(tmp_path)["params_sha256"] == alone["params_sha256"]


@pytest.mark.timeout(120)
def test_nothing_is_left_of_a_standby(tmp_path: Path) -> None:
    """Fails if a standby, the folder of the job or a suspended agent outlives the launcher."""
    before = {*JOB_FOLDERS.glob("hvdtrain-job-*")}
    command = launch("--restarts=9", "--", "train", *FLAGS, "--max-steps=100000", controller="mpi")
    with started(command, tmp_path) as job:
        job.wait_for(r"^step 7/")
        process_of(job, "agent").suspend()
        job.process.kill()
        job.end()
    assert {*JOB_FOLDERS.glob("hvdtrain-job-*")} <= before
