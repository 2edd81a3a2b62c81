"""The test hosts themselves: the properties that other tests rely on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.hosts.namespaces import Cluster, name_of
from tests.parallel.launching import CHECKOUT, VANISH_S

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
SLEEP = ["sleep", "1000"]


def hostname_of(cluster: Cluster, name: str) -> str:
    """Return the hostname that alpha reaches by SSH under a name, host keys checked; or ""."""
    done = cluster.run([*SSH, name, "hostname"], timeout_s=20)
    return done.output.strip() if done.exit_code == 0 else ""


def test_hosts_are_separate(cluster: Cluster) -> None:
    """Fails when two hosts share a name, an address, processes or /tmp, or names do not lead."""
    seen = []
    program = "hostname; ip -4 -o address show eth0; ls /proc /tmp; touch /tmp/mine"
    for index, host in enumerate(cluster.hosts):
        done = cluster.run(["sh", "-ec", program], timeout_s=20, host=index)
        lines = done.output.split("\n")
        assert done.exit_code == 0 and lines[0] == host.name and f" {host.address}/" in lines[1]
        assert "mine" not in lines
        assert sum(line.isdigit() for line in lines) < 8, "it sees others' processes"
        seen.append(lines[0])
        cluster.path(index, "/tmp/mine").unlink()
    for name in cluster.hosts[1].names:
        assert hostname_of(cluster, name) == "beta"
    assert seen == ["alpha", "beta", "gamma"]
    assert cluster.hostfile.read_text() == "alpha slots=1\nbeta slots=2\ngamma slots=1\n"


def test_a_host_that_is_cut_or_dead_cannot_be_reached(cluster: Cluster) -> None:
    """Fails when a fault leaves the host reachable, or it stays unreachable afterwards."""
    for harm, heal in (
        (cluster.cut, cluster.mend),
        (cluster.stop_sshd, cluster.start_sshd),
        (cluster.kill_host, cluster.revive),
    ):
        assert hostname_of(cluster, "beta") == "beta"
        harm(1)
        assert hostname_of(cluster, "beta") == ""
        assert hostname_of(cluster, "gamma") == "gamma"
        heal(1)
        assert hostname_of(cluster, "beta") == "beta"


def test_an_unknown_host_key_is_refused(cluster: Cluster) -> None:
    """Fails when SSH between the hosts works without a known key, so that no test could see it."""
    (cluster.hosts[0].folder / "ssh" / "known_hosts").write_text("")
    done = cluster.run([*SSH, "beta", "hostname"], timeout_s=20)
    assert done.exit_code == 255 and "Host key verification failed" in done.output


def test_what_is_left_behind_is_seen(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a process that outlives its command, on any host, passes or is left running."""
    monkeypatch.setattr("tests.hosts.namespaces.VANISH_S", 1.0)
    there = cluster.start(SLEEP, host=2)  # started before the command, so it is not left behind
    assert there.inner.is_running()
    detached = f"setsid {' '.join(SLEEP)} >/dev/null 2>&1 </dev/null &"
    for command in (["sh", "-c", detached], [*SSH, "beta", detached]):
        with pytest.raises(AssertionError, match="left behind"):
            cluster.run(command, timeout_s=20)
    with pytest.raises(AssertionError, match="no end after"):
        cluster.run([*SSH, "beta", *SLEEP], timeout_s=1)
    assert cluster.processes() == [there.inner]
    cluster.kill_since()


def test_break_ssh_ends_connections_only(cluster: Cluster) -> None:
    """Fails when a connection survives, or its command or the listening sshd does not."""
    client = cluster.start([*SSH, "beta", *SLEEP])
    wait_for(lambda: "sleep" in map(name_of, cluster.processes(1)))
    assert cluster.break_ssh(1)
    assert client.wait(20) == 255
    wait_for(lambda: [name_of(it) for it in cluster.processes()] == ["sleep"])
    assert hostname_of(cluster, "beta") == "beta"
    cluster.kill_since()


def test_signals_reach_the_command(cluster: Cluster) -> None:
    """Fails when a signal to a started command stops at its keeper, or its end is not the same."""
    trap = "trap 'echo caught; exit 5' TERM; echo on; while :; do sleep 0.05; done"
    process = cluster.start(["sh", "-c", trap], host=1)
    assert process.stdout and process.stdout.readline() == "on\n"
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert (output, process.returncode) == ("caught\n", 5)
    for number in (signal.SIGKILL, signal.SIGINT):
        process = cluster.start(SLEEP)
        process.send_signal(number)  # also while the command is starting
        assert process.wait(20) == -number
    wait_for(lambda: not cluster.processes())


def test_full_disk_is_one_hosts_own(cluster: Cluster, tmp_path: Path) -> None:
    """Fails when the disk that is filled is not full, or is full on another host too."""
    folder = tmp_path / "data"
    write = ["sh", "-c", f"head -c 20000 /dev/zero > {folder}/file"]
    cluster.fill(1, folder, free_kib=8)
    assert cluster.run(write, timeout_s=20, host=1).exit_code != 0
    assert cluster.run(write, timeout_s=20, host=0).exit_code == 0
    assert (folder / "file").stat().st_size == 20000
    cluster.drain(1, folder)
    assert cluster.run(write, timeout_s=20, host=1).exit_code == 0
    assert cluster.path(1, folder / "file").stat().st_size == 20000


OWNER = """
import json, sys, time
from pathlib import Path
from tests.hosts.namespaces import Cluster
with Cluster([1, 1], Path(sys.argv[1])) as cluster:
    for host in range(2):
        cluster.start(["sleep", "1000"], host=host).inner
    nodes = [cluster._switch, *cluster._nodes]
    print(json.dumps([it.pid for it in cluster.processes()] + [node.pid for node in nodes]))
    sys.stdout.flush()
    time.sleep(1000)
"""


def test_a_killed_test_leaves_nothing(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """Fails when hosts outlive a test that is killed, or a second cluster is in the first's way."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "first")],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout
        pids = json.loads(owner.stdout.readline())
        assert len(pids) == 5 and all(map(psutil.pid_exists, pids))
        second = make_cluster([1, 1])
        assert hostname_of(second, "beta") == "beta"
        assert not second.processes()
        owner.kill()
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    assert hostname_of(second, "beta") == "beta"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + VANISH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
