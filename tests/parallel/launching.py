"""Starting real workers: always with a time limit, and leaving no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
CHECKOUT = Path(__file__).resolve().parents[2]
CONTROLLERS = ("gloo", "mpi")
MARK = "HVDTRAIN_TEST_MARK"
VANISH_S = 15.0  # a job's processes have this long to go once its launcher has ended


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    exit_code: int
    output: str  # standard output and error together
    seconds: float


TWO_HOSTS = "localhost:2,127.0.0.1:2"  # this machine, by two names


def horovodrun(
    size: int, controller: str, command: Sequence[str], hosts: str = "", **options: object
) -> Finished:
    """Run `command` on `size` workers of this machine under plain horovodrun; `hosts`: as in -H."""
    launcher = [str(BIN / "horovodrun"), "-np", str(size), f"--{controller}"]
    launcher += ["-H", hosts] if hosts else []
    return run([*launcher, *command], **options)  # type: ignore[arg-type]


def check_exit_code(finished: Finished, controller: str, exit_code: int) -> None:
    """MPI passes the workers' exit code on; under Gloo horovodrun gives 1, and prints theirs."""
    assert finished.exit_code == (exit_code if controller == "mpi" else 1), finished.output
    assert f"Exit code: {exit_code}" in finished.output.replace("Exit code:    ", "Exit code: ")


def hvdtrain(*arguments: str) -> list[str]:
    """The hvdtrain command of the environment under test."""
    return [str(BIN / "hvdtrain"), *arguments]


def environment_of(mark: str) -> dict[str, str]:
    """Of a job's processes: they are this checkout's, and found again by the mark."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {MARK: mark, "PATH": path, "PYTHONPATH": str(CHECKOUT)}


def run(
    command: Sequence[str],
    timeout_s: float = 240,  # a busy machine of two cores may be three times as slow as an idle one
    cwd: Path = CHECKOUT,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command in a process group of its own.

    Raises AssertionError when it does not end in time, or leaves processes behind (they are
    recognised by a variable in their environment); both are killed.
    """
    mark = uuid.uuid4().hex
    environment = environment_of(mark) | (variables or {})
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        kill_all(marked(mark))
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout_s} s: {command}\n{output}") from None
    seconds = time.monotonic() - started
    left = wait_until_gone(mark)
    kill_all(left)
    assert not left, f"processes left behind by {command}: {left}\n{output}"
    return Finished(process.returncode, output, seconds)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of the job with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            running = process.status() != psutil.STATUS_ZOMBIE
            if running and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def rank_of(process: psutil.Process) -> int:
    """The rank of a worker, which the command line of a standby's fork has at its end."""
    if fork := re.search(r"\[rank (\d+)\]$", " ".join(process.cmdline()).strip()):
        return int(fork[1])
    return int(process.environ().get("RANK", -1))


def wait_until_gone(mark: str) -> list[psutil.Process]:
    """What is still there of a job once its time to vanish is over."""
    deadline = time.monotonic() + VANISH_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
