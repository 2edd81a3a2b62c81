"""`hvdtrain doctor` with its ring of real workers, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from hvdtrain.log import counted
from tests.parallel.bad_core import FIRST, write_fault
from tests.parallel.bad_device import FIRST as BAD_DEVICE
from tests.parallel.bad_device import write_devices
from tests.parallel.launching import (
    CHECKOUT,
    MARK,
    environment_of,
    hvdtrain,
    kill_all,
    marked,
    run,
    wait_until_gone,
)
from tests.unit.sshd import ADDRESS, running_sshd


def test_a_good_machine_passes(tmp_path: Path) -> None:
    """Fails when a check complains of a machine that trains, the ring is not really run, or a core
    is left out of the burn-in.
    """
    file = tmp_path / "doctor.json"
    flags = ["--controller", "mpi", "--json", str(file), "--output", str(tmp_path)]
    flags += ["--burn-in", "0.02"]
    finished = run(hvdtrain("doctor", *flags), cwd=tmp_path)
    assert finished.exit_code == 0, finished.output
    assert "ok    ring            2 workers" in finished.output
    found = json.loads(file.read_text())
    assert found["ring"]["controller"] == found["ring"]["measured"]["controller"] == "mpi"
    assert found["ring"]["measured"]["workers"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]
    cores = [it for it in found["burn_in"]["units"]["localhost"] if it["what"] == "core"]
    answer = found["burn_in"]["right"][cores[0]["kind"]]
    assert [core["number"] for core in cores] == sorted(os.sched_getaffinity(0))
    assert all(core["answers"][answer]["count"] == core["repetitions"] > 1 for core in cores)
    assert f"localhost: {counted(len(cores), 'core')}, " in finished.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a majority needs several cores")
def test_burn_in_names_the_bad_cores(tmp_path: Path) -> None:
    """Fails when a wrong bit of one core goes unnoticed, or another core or host is named for it,
    or another place in the training than the one where the bit was wrong.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    write_fault(tmp_path, {("local", first): {2}, ("ssh", second): None})
    with running_sshd(tmp_path) as sshd:
        flags = ["-H", f"localhost:1,{ADDRESS}:1", "-p", str(sshd.port), "-i", f"{tmp_path}/key"]
        flags += ["--no-ring", "--burn-in", "0.02"]
        variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
        finished = run(hvdtrain("doctor", *flags), variables=variables)
    assert finished.exit_code == 3, finished.output
    here, there = re.findall(r"^fail  burn-in         ([\w.]+: .*)", finished.output, re.MULTILINE)
    assert re.fullmatch(
        rf"localhost: .*, 1 wrong; core {first} wrong in 1 of \d+ repetitions \(transient: 2\), "
        rf"{FIRST}",
        here,
    )
    assert re.fullmatch(
        rf"{ADDRESS}: .*; core {second} wrong in (\d+) of \1 repetitions \(repeatable\), {FIRST}",
        there,
    )
    assert "fix: take the host out of the hostfile, and test its memory" in finished.output


def test_burn_in_covers_every_device(tmp_path: Path) -> None:
    """Fails when a device that torch finds is left out, a wrong bit of one goes unnoticed or
    another one is named for it, or the all-reduce between devices is not measured. (The CPU stands
    for two.)
    """
    write_devices(tmp_path, 2, {1: {2}})
    file = tmp_path / "doctor.json"
    flags = ["--no-ring", "--burn-in", "0.05", "--json", str(file), "--output", str(tmp_path)]
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    finished = run(hvdtrain("doctor", *flags), variables=variables)
    assert finished.exit_code == 3, finished.output
    found = json.loads(file.read_text())["burn_in"]
    first, second = [it for it in found["units"]["localhost"] if it["what"] == "GPU"]
    assert (first["number"], second["number"]) == (0, 1)
    assert first["repetitions"] >= 2 and list(first["answers"]) == [found["right"][first["kind"]]]
    (wrong,) = re.findall(r"^fail  burn-in +localhost: (.*)", finished.output, re.MULTILINE)
    assert re.fullmatch(
        r"2 GPUs, \d+ repetitions, 1 wrong; GPU 1 \(cpu\) wrong in 1 of \d+ repetitions "
        rf"\(transient: 2\), {BAD_DEVICE}",
        wrong,
    )
    sums = (
        r"^ok    burn-in +localhost: all-reduce of 16 MiB between 2 GPUs \(gloo\): bus bandwidth "
    )
    assert re.search(sums, finished.output, re.MULTILINE), finished.output


def test_a_stop_ends_the_burn_in(tmp_path: Path) -> None:
    """Fails when Ctrl-C leaves a training behind, or does not end the doctor."""
    mark = uuid.uuid4().hex
    command = hvdtrain("doctor", "--no-ring", "--burn-in", "9")
    doctor = subprocess.Popen(
        command, cwd=tmp_path, env=environment_of(mark), stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not any("known_answer" in command_of(str(it.pid)) for it in marked(mark)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        doctor.send_signal(signal.SIGINT)
        assert doctor.wait(20) == 128 + signal.SIGINT
    finally:
        doctor.kill()
        doctor.wait()
        left = wait_until_gone(mark)
        kill_all(left)
    assert left == []


def test_a_stop_leaves_no_worker(tmp_path: Path) -> None:
    """Fails when SIGTERM while the ring runs leaves horovodrun or a worker behind."""
    mark = uuid.uuid4().hex
    environment = environment_of(mark) | {"OMPI_MCA_hvdtrain_test_mark": mark}
    doctor = subprocess.Popen(
        hvdtrain("doctor"), cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not any(map(is_worker, ring_processes(mark))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        doctor.send_signal(signal.SIGTERM)
        assert doctor.wait(20) == 128 + signal.SIGTERM
    finally:
        doctor.kill()
        doctor.wait()
        left = [pid for pid in ring_processes(mark) if Path(f"/proc/{pid}").exists()]
        kill_all(marked(mark))
    assert left == []
    assert wait_until_gone(mark) == []


def is_worker(pid: int) -> bool:
    """Whether it runs `hvdtrain verify` itself; horovodrun only names that."""
    return command_of(str(pid)).split("\0")[1:3] == hvdtrain("verify")


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def ring_processes(mark: str) -> list[int]:
    """Of the ring: the doctor hands variables of Horovod on, and no others."""
    wanted, found = f"OMPI_MCA_hvdtrain_test_mark={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and f"{MARK}={mark}".encode() not in environment:
            found.append(int(folder.name))
    return found
