"""launch/slurm.sbatch and srun under a real Slurm on three hosts, undisturbed and under faults.

A disturbed job has a gate: its steps are slow until the test opens it, so that there is time for
the fault. It writes a checkpoint only when it is stopped. A later start that resumes from a step
therefore proves that the stop has saved.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hvdtrain.lab.hosts.network import why_not as why_no_hosts
from tests.hosts.gated import GATE
from tests.hosts.namespaces import Cluster
from tests.hosts.slurm import CORES, OVER, Slurm, why_not
from tests.parallel.launching import CHECKOUT, hvdtrain

RECIPE = CHECKOUT / "launch" / "slurm.sbatch"
STEPS = 60
EXPERIMENT = ["--model=tests.hosts.gated:lenet", "--data=synthetic:1x28x28,samples=256"]
EXPERIMENT += ["--global-batch-size=30", f"--max-steps={STEPS}", "--eval-interval=4"]
EXPERIMENT += ["--log-interval=1", "--audit-every=10", "--checkpoint-interval=1000"]
START_S = 240.0  # for the first steps of a job on a busy machine
END_S = 300.0
GONE_S = 60.0
LIMIT_TICK_S = 30.0  # interval of Slurm's checks of time limits
REQUEUED = "stopped; requeued, to resume from the last checkpoint"
RESUMED, STEP = "resume: continuing from", r"step \d+/"


@dataclass
class Job:
    """A job of the recipe, with its own gate."""

    slurm: Slurm
    number: int
    folder: Path

    @property
    def output(self) -> str:
        """Return the output of all its starts."""
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def wait_for(self, part: str, times: int = 1, limit_s: float = START_S) -> None:
        """Wait until a pattern was printed `times` times. Raises AssertionError."""
        deadline = time.monotonic() + limit_s
        while self._count(part) < times:
            state = self.slurm.job(self.number)["JobState"]
            going_on = state not in OVER and time.monotonic() < deadline
            assert going_on, f"no {part!r}, {state}:\n{self.output}"
            time.sleep(0.3)

    def wait_for_steps(self) -> None:
        """Wait for two more steps. Raises AssertionError."""
        self.wait_for(STEP, self._count(STEP) + 2)

    def _count(self, part: str) -> int:
        return len(re.findall(part, self.output))

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def finish(self) -> dict[str, object]:
        """Open the gate, wait for the end of the job, and return its summary."""
        self.open_gate()
        assert self.slurm.wait(self.number, timeout_s=END_S) == "COMPLETED", self.output
        (run,) = (self.folder / "runs").iterdir()
        assert run.name == f"slurm-{self.number}"
        summary: dict[str, object] = json.loads((run / "summary.json").read_text())
        return summary


Submit = Callable[..., Job]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yield Slurm on three hosts with two cores each."""
    if reason := why_no_hosts() or why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    visible = [tmp_path_factory.getbasetemp()]
    with Cluster([1, 1, 1], folder, visible=visible) as cluster, Slurm(cluster) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def submit(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Submit:
    """Return a factory of jobs: submit("--nodes=3"), flags of sbatch; `train`: flags of train."""

    def submit(*flags: str, recipe: Path = RECIPE, train: str = "--seed=0") -> Job:
        slurm.wait_until_idle()
        folder = tmp_path_factory.mktemp("job")
        slurm.environment |= {GATE: str(folder / "gate"), "OMP_NUM_THREADS": "1"}
        arguments = [
            *flags,
            f"--output={folder / 'output'}",
            str(recipe),
            *EXPERIMENT,
            *train.split(),
        ]
        return Job(slurm, slurm.submit(*arguments, f"--output={folder / 'runs'}"), folder)

    return submit


@pytest.fixture(autouse=True)
def nothing_left(slurm: Slurm) -> Iterator[None]:
    """Fail a test whose jobs have left processes on any host."""
    before = slurm.cluster.processes()
    yield
    slurm.run("scancel", "--user=root")
    left = slurm.cluster.wait_until_gone(before, GONE_S)
    slurm.cluster.kill_since(before)
    assert not left, f"left behind: {[_command_of(process) for process in left]}"


@pytest.fixture(scope="module")
def peace(submit: Submit) -> dict[str, object]:
    """Run an undisturbed job on three hosts, and return its summary."""
    return submit("--nodes=3").finish()


@pytest.mark.timeout(360)
def test_sbatch_trains_on_three_hosts(peace: dict[str, object]) -> None:
    """Fails if a job of the recipe does not train on all hosts that Slurm gives it."""
    assert (peace["status"], peace["world_size"], peace["steps"]) == ("finished", 3, STEPS)
    audit = peace["audit"]
    assert isinstance(audit, dict)
    assert (audit["checked"], audit["failed"]) == (STEPS // 10, 0)


@pytest.mark.timeout(900)
def test_time_limit_and_requeue(slurm: Slurm, submit: Submit, peace: dict[str, object]) -> None:
    """Fails if the signal before the time limit, or `scontrol requeue`, does not save, if workers
    have another time for it than the recipe states, if the job does not come back, or if it does
    not end with the parameters of the undisturbed one.
    """
    job = submit("--nodes=3", "--time=60")
    job.wait_for_steps()
    # Slurm sends the signal 120 s before the end, up to LIMIT_TICK_S early.
    slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")
    job.wait_for(REQUEUED, limit_s=LIMIT_TICK_S + START_S)
    log = job.folder / "runs" / f"slurm-{job.number}" / "logs" / "horovodrun.log"
    assert "SIGTERM: workers asked to stop within 110 s" in log.read_text()
    slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait_for(RESUMED)
    first = int(re.findall(r"checkpoints/step-(\d+)", job.output)[0])
    job.wait_for(f"step {first + 2}/")  # new steps since the restart
    slurm.ask("scontrol", "requeue", str(job.number))
    job.wait_for(RESUMED, times=2)
    second = int(re.findall(r"checkpoints/step-(\d+)", job.output)[1])
    assert second > first, "it was requeued without saving first"
    summary = job.finish()
    assert slurm.job(job.number)["Restarts"] == "2"
    assert summary["params_sha256"] == peace["params_sha256"], job.output
    assert summary["samples_seen"] == peace["samples_seen"]


@pytest.mark.timeout(900)
def test_srun_needs_no_ssh(
    slurm: Slurm, submit: Submit, peace: dict[str, object], tmp_path: Path
) -> None:
    """Fails if `srun hvdtrain train`, or the recipe's lines for srun, need SSH, or if the latter,
    whose PATH is not that of the submission, do not save when SIGUSR1 is sent to the tasks, come
    back, and end with the parameters of an undisturbed run.
    """
    text = RECIPE.read_text()
    recipe = tmp_path / "srun.sbatch"
    recipe.write_text(text.replace("\n#start=", "\nstart=").replace("\n#stop()", "\nstop()"))
    assert len(recipe.read_text()) == len(text) - 2, "the recipe's two lines are not there"
    hosts = range(len(slurm.cluster.hosts))
    for host in hosts:
        slurm.cluster.stop_sshd(host)
    try:
        job = submit("--nodes=3", f"--export={GATE},OMP_NUM_THREADS", recipe=recipe)
        job.wait_for_steps()
        slurm.ask("scancel", "--signal=USR1", str(job.number))  # as --signal=USR1 does
        job.wait_for(REQUEUED)
        job.wait_for(RESUMED)
        summary = job.finish()
        command = ["srun", "--nodes=3", *hvdtrain("train", *EXPERIMENT)]
        done = slurm.run(*command, f"--output={tmp_path}", "--experiment=alone", timeout_s=END_S)
    finally:
        for host in hosts:
            slurm.cluster.start_sshd(host)
    assert done.exit_code == 0, done.output
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert (alone["world_size"], alone["controller"]) == (3, "gloo")
    assert alone["audit"]["failed"] == 0 < alone["audit"]["checked"]
    assert summary["params_sha256"] == alone["params_sha256"], job.output
    assert summary["samples_seen"] == alone["samples_seen"] == peace["samples_seen"]


@pytest.mark.timeout(600)
def test_a_host_that_goes_down_and_scancel(slurm: Slurm, submit: Submit) -> None:
    """Fails if a job does not go on elsewhere when Slurm has given up one of its hosts, or if a
    cancelled one comes back or leaves a process on any host.
    """
    before = slurm.cluster.processes()
    job = submit("--nodes=2", train="--checkpoint-interval=1")
    job.wait_for_steps()
    assert slurm.job(job.number)["NodeList"] == "alpha,beta"
    slurm.ask("scontrol", "update", "NodeName=beta", "State=DOWN", "Reason=test")
    try:
        job.wait_for(RESUMED)
        job.wait_for_steps()
        assert slurm.job(job.number)["NodeList"] == "alpha,gamma"
        slurm.ask("scancel", str(job.number))
        assert slurm.wait(job.number, timeout_s=GONE_S) == "CANCELLED"
        assert not slurm.cluster.wait_until_gone(before, GONE_S)
        assert slurm.job(job.number)["JobState"] == "CANCELLED"
    finally:
        slurm.ask("scontrol", "update", "NodeName=beta", "State=RESUME")


@pytest.mark.timeout(600)
def test_the_same_bits_after_a_requeue_on_fewer_hosts(
    slurm: Slurm, submit: Submit, tmp_path: Path
) -> None:
    """Fails if a job that goes on with two hosts of three, as Slurm has given up one of them, ends
    with other bits than one process.
    """
    virtual = "--virtual-workers=4 --checkpoint-interval=1"
    job = submit("--nodes=3", train=virtual)
    job.wait_for_steps()
    assert slurm.job(job.number)["NodeList"] == "alpha,beta,gamma"
    slurm.ask("scontrol", "update", "NodeName=gamma", "State=DOWN", "Reason=test")
    try:
        slurm.wait(job.number, states=["PENDING"], timeout_s=GONE_S)
        slurm.ask("scontrol", "update", f"JobId={job.number}", "NumNodes=2", "NumTasks=2")
        job.wait_for(RESUMED)
        summary = job.finish()
        assert slurm.job(job.number)["NodeList"] == "alpha,beta"
    finally:
        slurm.ask("scontrol", "update", "NodeName=gamma", "State=RESUME")
    command = hvdtrain("train", *EXPERIMENT, *virtual.split(), f"--output={tmp_path}")
    done = slurm.run(*command, "--experiment=alone", timeout_s=END_S)
    assert done.exit_code == 0, done.output
    alone = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert (summary["world_size"], alone["world_size"]) == (2, 1)
    for name in ("params_sha256", "samples_seen", "valid_loss"):
        assert summary[name] == alone[name], job.output


@pytest.mark.timeout(360)
def test_srun_starts_the_launcher_on_each_host(
    slurm: Slurm, submit: Submit, peace: dict[str, object], tmp_path: Path
) -> None:
    """Fails if launchers that srun starts do not make one job, without SSH; if a worker that stands
    still has no verdict and no restart; or if the end is not that of the job over SSH.
    """
    flags = ["--nproc-per-node=1", "--restarts=3", "--watchdog-timeout-s=8"]
    launch = shlex.join(hvdtrain("launch", *flags, "--", "train"))
    recipe = tmp_path / "job.sh"
    name = "--experiment=slurm-$SLURM_JOB_ID"
    recipe.write_text(f'#!/bin/sh\nsrun --ntasks-per-node=1 {launch} "$@" {name}\n')
    job = submit("--nodes=3", recipe=recipe)
    job.wait_for_steps()
    workers = [p for p in slurm.cluster.processes() if "[rank 1]" in p.cmdline()]
    assert len(workers) == 1, workers
    workers[0].suspend()
    job.wait_for("restart 1 of 3")
    summary = job.finish()
    assert re.search(r"rank 1 on beta: stopped \(SIGSTOP\)", job.output), job.output
    assert "all nodes have joined: alpha, beta, gamma" in job.output
    for field in ("params_sha256", "samples_seen", "steps", "world_size"):
        assert summary[field] == peace[field], job.output


@pytest.mark.parametrize(
    ("partition", "flags"),
    [("one", []), ("all", []), ("all", ["--nodes=3", f"--ntasks-per-node={CORES}"])],
)
def test_defaults_fit(slurm: Slurm, partition: str, flags: list[str]) -> None:
    """Fails if a job of the recipe waits for ever where Slurm has one host, few cores or a short
    time limit: nothing then reports it.
    """
    slurm.wait_until_idle()  # a host that was down counts only after it has responded
    name = "PartitionName=one"
    slurm.run("scontrol", "create", name, "Nodes=alpha", "MaxTime=10", "State=UP")
    asked = [*flags, f"--partition={partition}", "--test-only", str(RECIPE)]
    done = slurm.run("sbatch", *asked)
    assert done.exit_code == 0 and "to start at" in done.output, done.output


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(itertools.islice(process.cmdline(), 12))
    except psutil.Error:
        return str(process)
