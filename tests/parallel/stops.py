"""Stops of jobs with reader processes, by each signal and to each set of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.parallel.launching import (
    BIN,
    CHECKOUT,
    environment_of,
    hvdtrain,
    kill_all,
    marked,
    wait_until_gone,
)
from tests.unit.folders import make_folder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# To the process group of the command, as timeout(1) and `kill -- -PGID` do; to its session; to each
# process of the job, as systemd and Slurm do.
SCOPES = ("group", "session", "each")
READERS = (0, 2)
STARTERS = ("train", "horovodrun gloo", "horovodrun mpi", "launch gloo", "launch mpi")
BEGUN_S, ENDED_S = 240.0, 90.0  # a busy machine; usually some seconds


@dataclass(frozen=True)
class Stop:
    """One way to stop a job."""

    starter: str
    number: signal.Signals
    scope: str
    readers: int

    def __str__(self) -> str:
        return f"{self.starter}, {self.number.name}, {self.scope}, {self.readers} readers"


@dataclass(frozen=True)
class Stopped:
    """How a stopped job ended."""

    exit_code: int
    output: str
    checkpoints: list[str]
    left: list[psutil.Process]

    def problem(self, stop: Stop) -> str:
        """Return what is wrong about the end; empty if it is right."""
        right = {128 + stop.number}
        if stop.starter.startswith("horovodrun"):  # whose own end hides that of the workers
            right |= {1, -stop.number}
        wrong = []
        if not self.checkpoints:
            wrong.append("no checkpoint")
        if self.exit_code not in right:
            wrong.append(f"exit code {self.exit_code}")
        if self.left:
            wrong.append(f"processes left: {self.left}")
        if "Traceback" in self.output and not stop.starter.startswith("horovodrun"):
            wrong.append("a traceback")
        return ", ".join(wrong)


def stop_job(stop: Stop, folder: Path) -> Stopped:
    """Start a job in an empty folder, stop it once it has shown a step, and return how it ended."""
    pictures = make_folder(folder / "pictures", train=20)
    mark = uuid.uuid4().hex
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            _command(stop, pictures, folder),
            cwd=CHECKOUT,
            env=environment_of(mark) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_heed_all,
        )
        shown = lambda: (folder / "output").read_text(errors="replace")  # noqa: E731
        try:
            _wait(lambda: shown().count("step ") >= 3 or process.poll() is not None, BEGUN_S)
            for pid in _receivers(stop.scope, process.pid, mark):
                try:
                    os.kill(pid, stop.number)
                except ProcessLookupError:
                    continue
            _wait(lambda: process.poll() is not None, ENDED_S)
            left = wait_until_gone(mark)
        finally:
            kill_all(marked(mark))
            process.wait()
    checkpoints = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step*"))
    return Stopped(process.returncode, shown(), checkpoints, left)


def _heed_all() -> None:
    """Let a job be stopped by SIGHUP also where the tests are run under nohup."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _command(stop: Stop, pictures: Path, folder: Path) -> list[str]:
    train = ["train", "--model=lenet", f"--data=imagefolder:{pictures}", "--image-size=28"]
    train += ["--global-batch-size=8", "--max-steps=100000", "--log-interval=5"]
    train += [f"--output={folder}", "--experiment=run", f"-j{stop.readers}"]
    starter, _, controller = stop.starter.partition(" ")
    if starter == "train":
        return hvdtrain(*train)
    if starter == "launch":
        return hvdtrain("launch", "-np", "2", "--controller", controller, "--", *train)
    return [str(BIN / "horovodrun"), "-np", "2", f"--{controller}", *hvdtrain(*train)]


def _receivers(scope: str, leader: int, mark: str) -> list[int]:
    pids = [process.pid for process in marked(mark)]
    if scope == "group":
        return [pid for pid in pids if os.getpgid(pid) == leader]
    if scope == "session":
        return [pid for pid in pids if os.getsid(pid) == leader]
    return pids


def _wait(done: Callable[[], bool], limit_s: float) -> None:
    """Wait until something is so. Raises AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, f"waited {limit_s} s"
        time.sleep(0.1)
