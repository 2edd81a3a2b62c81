"""launch/slurm.sbatch with a fake launcher and a fake Slurm, for what a real one
(tests/hosts/test_slurm.py) does not show quickly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[3] / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
JOB_S = 30.0  # for a fake job of a moment

FAKE_HVDTRAIN = """#!/bin/bash
echo "$@" >> arguments
trap 'echo TERM >> signals; sleep 0.3; exit "$ON_TERM"' TERM
touch started
for _ in $(seq "$TENTHS"); do sleep 0.1; done
exit "$AT_END"
"""
FAKE_SCONTROL = """#!/bin/bash
echo "$@" >> scontrol
if [ "$1" = show ]; then
    [ -e shown ] && FIRST_STATE=$STATE
    echo "JobId=7 JobName=hvdtrain JobState=${FIRST_STATE:-$STATE} Reason=None"
    touch shown
fi
if [ "$1" = requeue ]; then exit "$REQUEUE"; fi
"""


def start_job(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """launch/slurm.sbatch as Slurm starts it, in a folder with the fakes."""
    for name, text in {"hvdtrain": FAKE_HVDTRAIN, "scontrol": FAKE_SCONTROL}.items():
        fake = folder / ".venv/bin" / name  # the recipe puts this folder first
        fake.parent.mkdir(parents=True, exist_ok=True)
        fake.write_text(text)
        fake.chmod(0o755)
    defaults = {"ON_TERM": "143", "AT_END": "0", "TENTHS": "300", "STATE": "RUNNING"}
    return subprocess.Popen(
        ["bash", str(SBATCH), *arguments],
        cwd=folder,
        env={**os.environ, **defaults, "REQUEUE": "0", "SLURM_JOB_ID": "7", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(
    job: subprocess.Popen[str],
    folder: Path,
    signals: int = 0,
    kind: signal.Signals = signal.SIGTERM,
) -> tuple[int, str]:
    """Signal the script so often, as --signal=B: does, and wait; its exit code and output."""
    try:
        end = time.monotonic() + JOB_S
        while not (folder / "started").exists() and time.monotonic() < end:
            time.sleep(0.02)
        for number in range(signals):
            time.sleep(0.1 * bool(number))
            job.send_signal(kind)
        output, _ = job.communicate(timeout=JOB_S)
        return job.returncode, output
    finally:
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            job.wait()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_sbatch_starts_the_launcher_once(tmp_path: Path) -> None:
    """Fails when the job's arguments do not arrive, or hosts are named that Slurm chooses."""
    job = start_job(tmp_path, "--model", "a b", "--epochs=2", TENTHS="1")
    assert finish(job, tmp_path) == (0, "")
    assert lines(tmp_path / "arguments") == [
        "launch -- train --experiment slurm-7 --resume auto --model a b --epochs=2"
    ]
    assert lines(tmp_path / "scontrol") == []


@pytest.mark.parametrize("code", [1, 2, 3, 17, 143])
def test_sbatch_does_not_requeue_a_failure(tmp_path: Path, code: int) -> None:
    """Fails when a job that failed, or was stopped by hand, comes back again and again."""
    job = start_job(tmp_path, TENTHS="1", AT_END=str(code))
    assert finish(job, tmp_path) == (code, "")
    assert lines(tmp_path / "scontrol") == []


@pytest.mark.parametrize("signals", [1, 3])
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGUSR1])
def test_sbatch_requeues_when_stopped(tmp_path: Path, kind: signal.Signals, signals: int) -> None:
    """Fails when the launcher receives no signal, or more than one (it would not save then), or
    when the job does not go back into the queue after it has saved.
    """
    code, output = finish(start_job(tmp_path), tmp_path, signals, kind)
    assert (code, lines(tmp_path / "signals")) == (143, ["TERM"])
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7", "requeue 7"]
    assert "stopped; requeued" in output


def test_sbatch_requeues_while_slurm_hands_out_the_signal(tmp_path: Path) -> None:
    """Fails when a job is not requeued because Slurm shows SIGNALING for a moment."""
    job = start_job(tmp_path, FIRST_STATE="SIGNALING")
    code, output = finish(job, tmp_path, 1)
    assert (code, lines(tmp_path / "signals")) == (143, ["TERM"])
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7"] * 2 + ["requeue 7"]
    assert "stopped; requeued" in output


def test_sbatch_requeues_when_its_tasks_were_stopped(tmp_path: Path) -> None:
    """Fails when a job that has saved after SIGUSR1 to all but the script does not come back."""
    code, output = finish(start_job(tmp_path, TENTHS="1", AT_END="138"), tmp_path)
    assert (code, "stopped; requeued" in output) == (138, True)


def test_sbatch_says_that_there_is_no_hvdtrain(tmp_path: Path) -> None:
    """Fails when a job whose PATH was emptied ends with a riddle of srun or bash."""
    done = subprocess.run(
        ["/bin/bash", str(SBATCH)],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode == 127
    assert "no hvdtrain in" in done.stderr and "--export=NONE" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("variables", "code", "asked", "said"),
    [
        ({"SLURM_RESTART_COUNT": "100"}, 143, True, "not requeued, as this was done 100 times"),
        ({"ON_TERM": "0"}, 0, False, ""),
        ({"ON_TERM": "1"}, 1, False, ""),
        ({"ON_TERM": "17"}, 17, False, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sbatch_requeues_only_when_right(
    tmp_path: Path, variables: dict[str, str], code: int, asked: bool, said: str
) -> None:
    """Fails when a job is requeued that has finished, failed, or never ends."""
    assert finish(start_job(tmp_path, **variables), tmp_path, 1)[0] == code
    assert lines(tmp_path / "signals") == ["TERM"]
    assert lines(tmp_path / "scontrol") == ["show job --oneliner 7"] * asked


def test_sbatch_reports_a_refusal_of_slurm(tmp_path: Path) -> None:
    """Fails when a job that Slurm will not requeue leaves without a word on how to go on."""
    code, output = finish(start_job(tmp_path, REQUEUE="1"), tmp_path, 1)
    assert code == 143
    assert "Slurm refuses to requeue" in output
    assert "--experiment slurm-7" in output


def test_sbatch_keeps_the_exit_code_whenever_signals_come(tmp_path: Path) -> None:
    """Fails when the launcher's code is lost to a signal that comes as it ends (with
    bash's `wait` alone, now and then): such a job would not be requeued, or wrongly.
    """
    folders = [tmp_path / str(number) for number in range(10)]
    jobs = [start_job(folder, ON_TERM="17") for folder in folders]
    try:
        for number, (job, folder) in enumerate(zip(jobs, folders, strict=True)):
            end = time.monotonic() + JOB_S
            while not (folder / "started").exists() and time.monotonic() < end:
                time.sleep(0.01)
            job.send_signal(signal.SIGTERM)
            time.sleep(0.26 + 0.005 * number)  # the fake launcher ends 0.3 s after its signal
            for _ in range(20):
                job.send_signal(signal.SIGTERM)
                time.sleep(0.002)
    finally:
        codes = [finish(job, folder)[0] for job, folder in zip(jobs, folders, strict=True)]
    assert codes == [17] * len(jobs)
    assert not any((folder / "scontrol").exists() for folder in folders)
