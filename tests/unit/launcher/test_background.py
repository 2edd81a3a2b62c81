"""Jobs in the background: records of every kind, and processes that outlive their starter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launcher import background
from hvdtrain.launcher.background import BackgroundJob, find_job, jobs_folder, list_jobs
from hvdtrain.launcher.processes import boot_id, has_ended, start_of
from tests.unit.commands import ROOT

ENDED = {"ended": "2026-01-01T02:00:00+00:00", "exit_code": 0}
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which jobs are recorded."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits, as a launcher."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def record(name: str, pid: int = os.getpid(), **changes: object) -> BackgroundJob:
    """Write the record of a job whose launcher is a process that lives, and return it."""
    job = BackgroundJob(
        name=name,
        command=f"hvdtrain launch --detach -- {name}",
        folder="/job",
        logs="/job/logs",
        begin=0,
        pid=pid,
        process_start=start_of(pid),
        boot=boot_id(),
        started="2026-01-01T00:00:00+00:00",
    )
    job = replace(job, **changes)  # type: ignore[arg-type]
    path = background.record_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(job)))
    return job


def hvdtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that reads records."""
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


def test_states(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Fails when leftovers of a reboot, of a killed launcher, or of one whose number another
    process has by now are shown as running, or a running job is not.
    """
    record("running", child.pid)
    record("ended", 1, process_start="0", **ENDED)
    stopped = {**ENDED, "exit_code": 143, "verdict": "stopped by SIGTERM: all\nmore"}
    record("stopped", 1, process_start="0", **stopped)
    record("rebooted", child.pid, boot="another")
    record("recycled", child.pid, process_start="1")
    done = hvdtrain("jobs", "--json", str(tmp_path / "jobs.json"))
    assert (done.returncode, done.stderr) == (0, "")
    heads = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line[0] != " ")
    assert heads == {
        "running": "running since 2026-01-01T00:00:00+00:00",
        "ended": "ended with exit code 0 at 2026-01-01T02:00:00+00:00",
        "stopped": "ended with exit code 143 at 2026-01-01T02:00:00+00:00: stopped by SIGTERM: all",
        "rebooted": "lost: this machine has been restarted since 2026-01-01T00:00:00+00:00",
        "recycled": f"lost: its launcher (process {child.pid}) was killed, upon which its workers "
        "save",
    }
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    states = [(job["name"], job["state"]) for job in jobs]
    assert sorted(states) == [
        *(("ended", "ended"), ("rebooted", "lost"), ("recycled", "lost")),
        *(("running", "running"), ("stopped", "ended")),
    ]
    child.kill()
    while not has_ended(child.pid):
        time.sleep(0.01)
    assert find_job("running").state == "lost", "a process that nobody has reaped has ended"


def test_a_recycled_pid_is_never_signalled(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Fails when `stop` signals a process that has the number of a launcher of before a restart, or
    of one that was killed, or `attach` waits for its end.
    """
    (tmp_path / "launch.log").write_text("output\n")
    for name, change in (("boot", {"boot": "another"}), ("start", {"process_start": "1"})):
        record(name, child.pid, logs=str(tmp_path), **change)
        done = hvdtrain("stop", name)
        assert done.returncode == 0 and f"{name} does not run: lost: " in done.stdout
        done = hvdtrain("attach", name)
        assert (done.returncode, done.stdout) == (1, "output\n")
        assert f"hvdtrain attach: {name}: lost: " in done.stderr
    assert child.poll() is None


def test_names(child: subprocess.Popen[bytes]) -> None:
    """Fails when a name means another job, or an unknown or ambiguous one is not refused with the
    names that there are.
    """
    with pytest.raises(UsageError, match=r"^x: no such job; this machine has none of yours$"):
        find_job("x")
    for name in ("lenet", "lenet-2", "mlp-digits"):
        record(name)
    assert find_job("lenet").name == "lenet" and find_job("m").name == "mlp-digits"
    problems = {
        "le": "le: may be lenet, lenet-2: give the whole name",
        "x": "x: no such job; this machine has lenet, lenet-2, mlp-digits",
    }
    for name, problem in problems.items():
        with pytest.raises(UsageError, match=f"^{re.escape(problem)}$"):
            find_job(name)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"name": "a"}', json.dumps({"name": "a", "pid": "1"})]
)
def test_damaged_records_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when a record that is cut, or anything else, hides the others, or is not named."""
    record("good")
    (jobs_folder() / "bad.json").write_text(text)
    assert [job.name for job in list_jobs()] == ["good"]
    assert "bad.json: is not the record of a job: " in capsys.readouterr().err


def test_records_of_other_machines_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a machine with the same home folder is asked to stop the jobs of this one."""
    record("here")
    monkeypatch.setattr(background.socket, "gethostname", lambda: "beta")
    assert list_jobs() == []


def test_a_name_is_taken_while_its_job_runs(child: subprocess.Popen[bytes]) -> None:
    """Fails when a running job loses its record to another, or an ended one keeps its name."""
    record("a", child.pid)
    record("b", 1, process_start="0", **ENDED)
    assert background._register("a", "second", Path("logs"), 0)[0].name == "a-2"
    assert background._register("b", "second", Path("logs"), 7)[0].begin == 7
    assert {job.name: job.command for job in list_jobs()} == {
        "a": "hvdtrain launch --detach -- a",
        "a-2": "second",
        "b": "second",
    }


def test_old_records_go(monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]) -> None:
    """Fails when the list grows without end, or a running job is dropped from it."""
    monkeypatch.setattr(background, "KEPT", 2)
    record("running", child.pid)
    for day in range(1, 5):
        started = f"2026-01-0{day}T00:00:00+00:00"
        record(f"day-{day}", 1, process_start="0", started=started, **ENDED)
    background._register("new", "new", Path("logs"), 0)
    assert [job.name for job in list_jobs()] == ["running", "day-3", "day-4", "new"]


WORK = """
import os, sys, time
from pathlib import Path
from hvdtrain.errors import PreflightError
from hvdtrain.launcher.background import run_in_background
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.verdict import JobOutcome

def work(report):
    print("checks", os.getsid(0) == os.getpid(), repr(sys.stdin.read()), flush=True)
    if sys.argv[1] == "refuse":
        raise PreflightError("no host")
    if sys.argv[1] == "exit":
        return JobOutcome(7, "failed")
    report()
    logs.follow(sys.argv[2])
    while not Path("go").exists():
        report()
        time.sleep(0.01)
    print("later", flush=True)
    if sys.argv[1] == "raise":
        raise OSError("gone")
    return JobOutcome(9, "first line\\nsecond line")

logs = Logs(Path("logs"), lambda rank, text: None, follows=True)
sys.exit(run_in_background("job", "typed", logs, work))
"""


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start work in the background, with pipes that must not stay open."""
    return subprocess.run(
        [sys.executable, "-c", WORK, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="typed",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


@pytest.mark.parametrize(("how", "code"), [("return", 9), ("raise", 1)])
def test_work_goes_on(tmp_path: Path, how: str, code: int) -> None:
    """Fails when the start waits for the end of the work, its output is lost, shown with that of an
    earlier job, or no longer found after its logs have moved; or its end is not recorded.
    """
    run, logs = tmp_path / "run", tmp_path / "logs"
    for folder in (run, logs):
        folder.mkdir()
    (logs / "launch.log").write_text("of another job\n")
    done = start(tmp_path, how, str(run))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    job = find_job("job")
    assert done.stdout.startswith("checks True ''\nhvdtrain launch: job job goes on in the backgr")
    assert f"(process {job.pid})" in done.stdout and job.state == "running"
    deadline = time.monotonic() + WAIT_S
    while find_job("job").logs != str(run / "logs") and time.monotonic() < deadline:
        time.sleep(0.01)
    followed = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "attach", "job"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert followed.stdout is not None and followed.stdout.readline() == "checks True ''\n"
    (tmp_path / "go").touch()
    rest, _ = followed.communicate(timeout=WAIT_S)
    assert rest.startswith("later\n") and followed.returncode == code
    text = "first line\nsecond line" if how == "return" else "gone"
    job = find_job("job")
    assert (job.state, job.exit_code, job.verdict) == ("ended", code, text)
    assert hvdtrain("logs", "job", "-f").stdout == f"checks True ''\n{rest}"
    (run / "logs" / "rank.1.log").write_text("of rank 1")
    assert hvdtrain("logs", "job", "--rank", "1").stdout == "of rank 1"
    done = hvdtrain("stop", "job")
    assert done.returncode == 0
    assert done.stdout.startswith(f"job does not run: ended with exit code {code} at ")


@pytest.mark.parametrize(("how", "code"), [("refuse", 1), ("exit", 7)])
def test_what_ends_before_its_start_is_no_job(tmp_path: Path, how: str, code: int) -> None:
    """Fails when a refused job is announced or listed, in the place of an earlier one or beside it,
    or its exit code or reason is lost.
    """
    before = [record("job", 1, process_start="0", **ENDED)] if how == "exit" else []
    done = start(tmp_path, how)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("checks True ''") and ("no host" in done.stderr) == (
        how != "exit"
    )
    assert list_jobs() == before


def test_ctrl_c_in_the_checks_ends_them(tmp_path: Path) -> None:
    """Fails when the job starts though the user has stopped its start."""
    program = WORK.replace('print("checks"', 'time.sleep(60); print("checks"')
    process = subprocess.Popen(
        [sys.executable, "-c", program, "return"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + WAIT_S
    while not list_jobs() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) != 0 and list_jobs() == []


@pytest.mark.parametrize("place", ["file", "no home"])
def test_where_nothing_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Fails when a job starts that nobody could find again, or the message names no way out."""
    if place == "file":
        (tmp_path / "state").touch()
    else:
        monkeypatch.setenv("XDG_STATE_HOME", "")
        monkeypatch.setattr(Path, "home", lambda: Path("/proc/nowhere"))
        assert list_jobs() == []
    with pytest.raises(UsageError, match=r"cannot be written: .* set XDG_STATE_HOME"):
        background._register("a", "typed", Path("logs"), 0)
