"""Workers on hosts as their sshd and their login shells are, of `launch` and plain horovodrun."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.crowd import horovodrun
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import BIN, CONTROLLERS, hvdtrain

PYTHON = str(BIN / "python")
WORKERS = 32
SHELLS = ("rbash", "tcsh", "fish", "bash")
SAY_RANK = """\
import os
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.write(1, f"rank {rank}\\n".encode())
"""
# Every rank prints its end, but for the one that fails.
FAILING = """\
import os, signal, sys, time
rank, folder = int(os.environ["HOROVOD_RANK"]), sys.argv[1]
def save(number, frame):
    print("saved", rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"{folder}/{rank}", "w").close()
while len(os.listdir(folder)) < 4:
    time.sleep(0.05)
if rank == 3 and sys.argv[2] == "fail":
    sys.exit(7)
time.sleep(120)
"""


def command_of(cluster: Cluster, start: str, controller: str, worker: list[str]) -> list[str]:
    if start == "horovodrun":
        return horovodrun(cluster, controller, worker)
    flags = ["-H", cluster.host_list, f"--ssh-port={cluster.ssh_port}"]
    return hvdtrain("launch", *flags, f"--controller={controller}", "--", *worker)


@pytest.mark.timeout(600)
def test_many_workers_and_any_login_shell(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if sshd, with its own limits, refuses one of the many workers of a host; or if a login
    shell changes a command that starts them.
    """
    script = tmp_path / "say_rank.py"
    script.write_text(SAY_RANK)
    cluster = make_cluster([WORKERS // 2] * 2)
    ways = [(start, name) for start in ("launch", "horovodrun") for name in CONTROLLERS]
    for (start, controller), shell in zip(ways, SHELLS, strict=True):
        path = shutil.which(shell)
        assert path, f"there is no {shell}: launch/setup --test-packages"
        cluster.set_login_shell(1, path)
        command = command_of(cluster, start, controller, [PYTHON, str(script)])
        done = cluster.run(command, timeout_s=120, cwd=tmp_path)
        assert done.exit_code == 0, (start, controller, shell, done.output)
        ranks = {int(it) for it in re.findall(r"rank (\d+)", done.output)}
        assert ranks == set(range(WORKERS)), (start, controller, shell, done.output)


@pytest.mark.parametrize("how", ["fail", "stop", "kill"])
def test_workers_of_other_hosts_end_with_the_job(
    make_cluster: Callable[..., Cluster], tmp_path: Path, how: str
) -> None:
    """Fails if a rank's failure, a stop of horovodrun or its death leaves workers on other hosts,
    as Horovod does; if these cannot save before; or if the exit code of a worker is lost.
    """
    script, folder = tmp_path / "failing.py", tmp_path / "ranks"
    script.write_text(FAILING)
    folder.mkdir()
    cluster = make_cluster([2, 2])
    before = cluster.processes()
    command = horovodrun(cluster, "gloo", [PYTHON, str(script), str(folder), how])
    process = cluster.start(command, 0, None, tmp_path)
    try:
        deadline = time.monotonic() + 30
        while len(list(folder.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        if how != "fail":
            process.send_signal(signal.SIGTERM if how == "stop" else signal.SIGKILL)
        output, _ = process.communicate(timeout=40)
        assert not cluster.wait_until_gone(before, timeout_s=10)
    finally:
        cluster.kill_since(before)
    assert (process.returncode == 0) == (how == "stop")  # after which all have ended well
    if how == "fail":
        assert "Process 3 exit with status code 7" in output
    if how != "kill":  # there is no horovodrun to print it
        assert "saved 2" in output, output
