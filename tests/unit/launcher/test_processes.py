"""Finding processes again, and asking after them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from hvdtrain.launcher.processes import (
    command_of,
    has_ended,
    marked,
    process_state,
    remove_sessions_of_dead_mpiruns,
)


def test_a_marked_process_is_found_until_it_has_ended() -> None:
    """Fails when a process is not found by its mark, or by half of it, or after its end."""
    value = uuid.uuid4().hex
    program = [sys.executable, "-c", "input()"]
    child = subprocess.Popen(
        program, stdin=subprocess.PIPE, env={"MARK": value, "OTHER": "a=b"}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 20
        while child.pid not in marked("MARK", value) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = marked("MARK", value)
        assert list(found) == [child.pid]
        assert found[child.pid]["OTHER"] == "a=b"
        assert command_of(child.pid) == " ".join(program)
        assert marked("MARK", value[:-1]) == marked("ARK", value) == {}
        assert not has_ended(child.pid)
    finally:
        child.kill()
        while not has_ended(child.pid):
            time.sleep(0.01)
        assert process_state(child.pid) == "Z"  # its number is still its own
        assert marked("MARK", value) == {}
        assert command_of(child.pid) == ""
        child.communicate()
    assert process_state(child.pid) == ""
    assert process_state(os.getpid()) == "R"


def test_a_process_that_is_within_exec_is_found() -> None:
    """Fails when a process is not found while another program takes its place: the kernel shows no
    environment of it then. A short program that is started over and over is there some of the time.
    """
    value = uuid.uuid4().hex
    program = 'i=0; while [ $i -lt 500 ]; do i=$((i+1)); done; exec /bin/sh -c "$0" "$0"'
    child = subprocess.Popen(["/bin/sh", "-c", program, program], env={"MARK": value})
    try:
        found = [list(marked("MARK", value)) for _ in range(200)]
        assert child.poll() is None
        assert found == [[child.pid]] * len(found)
    finally:
        child.kill()
        child.wait()


def test_sessions_of_killed_mpiruns_are_removed(tmp_path: Path, monkeypatch) -> None:
    """Fails when the folder of one that was killed stays, or that of a live one, of another user or
    of another machine is removed.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    name, dead = socket.gethostname().partition(".")[0], 2**22 + 1  # above the largest pid
    own = tmp_path / f"ompi.{name}.{os.getuid()}"
    kept = [own / f"pid.{os.getpid()}", tmp_path / f"ompi.{name}.{os.getuid() + 1}" / f"pid.{dead}"]
    kept.append(tmp_path / f"ompi.other.{os.getuid()}" / f"pid.{dead}")
    for folder in (*kept, own / f"pid.{dead}"):
        (folder / "0").mkdir(parents=True)
    remove_sessions_of_dead_mpiruns()
    assert sorted(tmp_path.glob("*/*")) == sorted(kept)
    kept[0].joinpath("0").rmdir()
    kept[0].rmdir()
    remove_sessions_of_dead_mpiruns()
    assert not own.exists()
