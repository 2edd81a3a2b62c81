"""`hvdtrain doctor` with its ring of real workers, on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import uuid
from pathlib import Path

from tests.parallel.launching import (
    MARK,
    environment_of,
    hvdtrain,
    kill_all,
    marked,
    run,
    wait_until_gone,
)


def test_a_good_machine_passes(tmp_path: Path) -> None:
    """Fails when a check complains of a machine that trains, or the ring is not really run."""
    file = tmp_path / "doctor.json"
    flags = ["--controller", "mpi", "--json", str(file), "--output", str(tmp_path)]
    finished = run(hvdtrain("doctor", *flags), cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert "ok    ring            2 workers" in finished.output
    found = json.loads(file.read_text())
    assert found["ring"]["controller"] == found["ring"]["measured"]["controller"] == "mpi"
    assert found["ring"]["measured"]["workers"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


def test_a_stop_leaves_no_worker(tmp_path: Path) -> None:
    """Fails when SIGTERM while the ring runs leaves horovodrun or a worker behind."""
    mark = uuid.uuid4().hex
    environment = environment_of(mark) | {"HOROVOD_TEST_MARK": mark}
    doctor = subprocess.Popen(
        hvdtrain("doctor"), cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not ring_runs(doctor.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ring_runs(doctor.pid)
        time.sleep(1.0)  # workers are starting
        workers = ring_processes(mark)
        doctor.send_signal(signal.SIGTERM)
        assert doctor.wait(20) == 128 + signal.SIGTERM
    finally:
        doctor.kill()
        doctor.wait()
        left = [pid for pid in ring_processes(mark) if Path(f"/proc/{pid}").exists()]
        kill_all(marked(mark))
    assert workers
    assert left == []
    assert wait_until_gone(mark) == []


def ring_runs(pid: int) -> bool:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any("horovodrun" in command_of(child) for child in children)


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def ring_processes(mark: str) -> list[int]:
    """Of the ring: the doctor hands variables of Horovod on, and no others."""
    wanted, found = f"HOROVOD_TEST_MARK={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and f"{MARK}={mark}".encode() not in environment:
            found.append(int(folder.name))
    return found
