"""When a job is started again, and when it is given up; signals to the launcher."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import PreflightError, Stopped
from hvdtrain.launcher import job as recovery
from hvdtrain.launcher import processes as stopping
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.job import JobPlan, LaunchJob, channel_address
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.processes import StopRequests, spared_by_slurm
from hvdtrain.launcher.ranks import Limits
from hvdtrain.launcher.retries import FRUITLESS
from hvdtrain.launcher.ssh import SshOptions
from hvdtrain.launcher.verdict import JobOutcome

FINE, AWAY = JobOutcome(0), PreflightError("away")
REGROUPS = JobOutcome(1, "saved", may_retry=True, steps=8, regroups=True)


def failed(steps: int) -> JobOutcome:
    return JobOutcome(9, f"failed at {steps}", may_retry=True, steps=steps)


class Scripted(LaunchJob):
    """Its starts end as given; nothing is run."""

    def __init__(self, restarts: int, ends: list[JobOutcome | Exception], folder: Path) -> None:
        plan = JobPlan(
            typed="hvdtrain launch",
            command=["true"],
            restarted=["true"],
            workers=1,
            min_workers=1,
            hosts=(Host("localhost"),),
            controller="gloo",
            interface=None,
            ssh=SshOptions(),
            limits=Limits(30.0, 10.0),
            restarts=restarts,
            settings={},
            verbose=False,
        )
        self.lines: list[str] = []
        logs = Logs(folder / "logs", lambda rank, line: None)
        logs.close()
        stop = StopRequests.__new__(StopRequests)
        super().__init__(plan, logs, stop, self.lines.append, lambda watch: None)
        self._ends = ends
        self.started: list[int] = []

    def _start(self, start: int) -> JobOutcome:
        self.started.append(start)
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that moves by pauses alone."""
    passed: list[float] = []
    monkeypatch.setattr(recovery.time, "sleep", passed.append)
    monkeypatch.setattr(recovery.time, "monotonic", lambda: sum(passed))
    yield passed


@pytest.mark.parametrize(
    ("restarts", "ends", "code", "started", "waited"),
    [
        (0, [failed(1)], 9, [0], []),
        (3, [FINE], 0, [0], []),
        (3, [failed(1), FINE], 0, [0, 1], []),
        (1, [failed(1), failed(2)], 9, [0, 1], []),
        # Ones that come further each time may go on at once, as often as they are allowed to.
        (9, [*(failed(n) for n in range(1, 8)), FINE], 0, list(range(8)), []),
        # Ones that do not are tried less and less, and given up.
        (9, [failed(5)] * 9, 9, [0, 1, 2, 3], [1.0, 2.0]),
        (9, [failed(0)] * 9, 9, [0, 1, 2], [1.0, 2.0]),
        (9, [JobOutcome(2, "usage")], 2, [0], []),
        # One that takes hosts back has not failed.
        (1, [REGROUPS, failed(9), REGROUPS, FINE], 0, [0, 1, 2, 3], []),
        # A host that comes back in time is waited for, within one restart.
        (1, [failed(1), AWAY, AWAY, FINE], 0, [0, 1, 1, 1], [1.0, 2.0]),
    ],
)
def test_restarts(
    tmp_path: Path,
    pauses: list[float],
    restarts: int,
    ends: list[JobOutcome | Exception],
    code: int,
    started: list[int],
    waited: list[float],
) -> None:
    """Fails when a job is given up that comes further, or tried for ever that does not."""
    job = Scripted(restarts, ends, tmp_path)
    outcome = job.run()
    assert (outcome.exit_code, job.started, pauses) == (code, started, waited)
    given_up = f"{FRUITLESS} starts in a row made no progress" in outcome.text
    assert given_up == (code == 9 and restarts == 9)


def test_hosts_that_stay_away_leave_the_first_failure(tmp_path: Path, pauses: list[float]) -> None:
    """Fails when the exit code of the failure is lost because no restart was possible."""
    job = Scripted(5, [failed(3), *[PreflightError("beta: ssh: no route")] * 99], tmp_path)
    outcome = job.run()
    assert outcome.exit_code == 9
    assert "failed at 3" in outcome.text and "not restarted: beta: ssh: no route" in outcome.text
    assert sum("waiting for hosts" in line for line in job.lines) == 1, "reported once"


def test_a_start_that_cannot_be_is_no_restart(tmp_path: Path) -> None:
    """Fails when a first start waits for hosts."""
    with pytest.raises(PreflightError):
        Scripted(5, [PreflightError("away")], tmp_path).run()


def test_signals_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a batch system's double signal is taken for impatience, or impatience for one."""
    at_s = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: at_s[0])
    stop = StopRequests()
    with stop.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        at_s[0] += 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.numbers == [signal.SIGTERM]
        at_s[0] += stopping.TOGETHER_S
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.numbers == [signal.SIGTERM, signal.SIGINT]


def test_in_slurm_sigterm_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the SIGTERM that Slurm sends to all, and later its batch script, is impatience."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    at_s = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: at_s[0])
    stop = StopRequests()
    with stop.noted():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            at_s[0] += 2 * stopping.TOGETHER_S
        assert stop.numbers == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.numbers == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("in_slurm", [False, True])
def test_slurm_spares_horovodrun(monkeypatch: pytest.MonkeyPatch, in_slurm: bool) -> None:
    """Fails when Slurm's SIGTERM to every process ends horovodrun, its shell or mpirun (which has a
    handler of its own), and with them the workers before they have saved; or when it is ignored
    elsewhere.
    """
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    handles = "import os, signal\nsignal.signal(15, signal.default_int_handler)\nos.kill(0, 15)"
    inner = spared_by_slurm([sys.executable, "-c", handles])
    outer = spared_by_slurm(["/bin/sh", "-c", f"{shlex.join(inner)}; exit 5"])
    code = subprocess.run(outer, start_new_session=True).returncode
    assert code == (5 if in_slurm else -15)


def test_without_workers_a_signal_ends_the_command() -> None:
    """Fails when the launcher cannot be stopped in its checks and pauses."""
    StopRequests()
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_a_stop_is_no_error(tmp_path: Path, monkeypatch, capfd) -> None:
    """Fails when `launch` reports a stop before the start as an error, or its code changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "launch", "-np", "1", "--", "python", "x.py"])
    monkeypatch.setattr(LaunchJob, "run", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    assert main() == 128 + signal.SIGTERM
    output, errors = capfd.readouterr()
    assert "hvdtrain launch: stopped by SIGTERM\n" in output and "error" not in output + errors


def test_sigterms_to_several_nodes_are_one() -> None:
    """Fails when a cluster that signals each host of a job keeps its workers from saving."""
    stop = StopRequests(many=True)
    with stop.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        stop._first_s -= 60.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.numbers == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.numbers == [signal.SIGTERM, signal.SIGINT]


def test_nohup_is_respected() -> None:
    """Fails when a launcher under nohup ends with its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequests()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.numbers == []


def test_where_the_launcher_listens() -> None:
    """Fails when agents of this machine alone can be spoken to from outside, or the user's choice
    of a network is not kept to.
    """
    here, there = Host("localhost"), Host("203.0.113.7")
    assert channel_address([here], "eth77") == "127.0.0.1"
    assert channel_address([here, there], None) == "0.0.0.0"
    assert channel_address([here, there], "lo") == "127.0.0.1"
    with pytest.raises(PreflightError, match="--network-interface=eth77: has no IPv4 address"):
        channel_address([here, there], "eth77")
