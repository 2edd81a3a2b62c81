"""A job in the background, by the commands of docs/guide.md, which outlives its terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import termios
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.parallel.launching import (
    CHECKOUT,
    environment_of,
    kill_all,
    marked,
    wait_until_gone,
)

GUIDE = (CHECKOUT / "docs" / "guide.md").read_text("utf-8")
WAIT_S = 240.0


def commands() -> list[str]:
    """Return the commands of the section, without comments."""
    section = GUIDE.partition("### Jobs that outlive the terminal")[2]
    return [line.partition("#")[0].strip() for line in section.split("```")[1].strip().splitlines()]


def as_in_foreground() -> None:
    """Let signals of a terminal have their effect, though the tests run under nohup or with `&`."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def close_terminal_after(command: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command in a shell on a terminal, close the terminal, and return what it has shown."""
    master, slave = os.openpty()

    def on_terminal() -> None:
        as_in_foreground()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    shell = subprocess.Popen(
        ["bash", "-c", f"{command}; echo exit code $?; sleep 600"],
        cwd=folder,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=on_terminal,
    )
    os.close(slave)
    shown = b""
    while not re.search(rb"exit code \d+", shown):
        shown += os.read(master, 4096)
    os.close(master)
    assert shell.wait(WAIT_S) == -signal.SIGHUP
    return shown.decode()


def test_a_job_outlives_its_terminal(tmp_path: Path) -> None:
    """Fails when a job ends with its terminal or with the command that shows it; when `stop` does
    not save; or when the job that continues it does not end with the bits of one worker alone.
    """
    start, listing, attach, stop = commands()
    start = start.replace("--detach", "--detach --controller gloo")  # MPI spins on busy cores
    mark = uuid.uuid4().hex
    environment = environment_of(mark) | {"XDG_STATE_HOME": str(tmp_path / "state")}
    environment["OMP_NUM_THREADS"] = "1"

    def call(command: str, code: int = 0) -> str:
        done = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def summary(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / "runs" / name / "summary.json").read_text())

    try:
        shown = close_terminal_after(start, tmp_path, environment)
        assert "job night goes on in the background" in shown and "exit code 0" in shown
        with subprocess.Popen(
            shlex.split(attach),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=as_in_foreground,
        ) as watching:
            assert watching.stdout is not None
            assert any(line.startswith("step ") for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
        assert watching.returncode == 130
        assert call(listing).startswith("night: running since ")
        assert "ended with exit code 143" in call(stop)
        assert summary("night")["status"] == "stopped"
        assert "night: ended with exit code 143" in call(listing)
        start += f" --max-steps {summary('night')['steps'] + 10}"
        call(start)
        assert "stopped by SIGTERM" not in call(attach), "the output of the job before"
        assert not wait_until_gone(mark)
        call("hvdtrain train " + start.partition("-- train ")[2].replace("night", "alone"))
    finally:
        kill_all(marked(mark))
    resumed = summary("night")
    assert resumed["status"] == "finished" and resumed["resumed_from"]
    assert resumed["params_sha256"] == summary("alone")["params_sha256"]
