"""Commands in containers, each with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.containers.engine import launcher_argv

ROOT = Path(__file__).parents[2]
RUNS = "/home/hvdtrain/runs"
HOSTFILE = "/etc/mpi/hostfile"


def run(command: list[str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command, with its errors in the output. Raises TimeoutExpired."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a command, with its errors in the output."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def docker(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return run(["docker", *arguments], timeout_s)


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command. Raises AssertionError if it has failed."""
    assert done.returncode == 0, f"exit code {done.returncode}: {done.args}\n{done.stdout}"
    return done.stdout


def launch_cluster(name: str, *arguments: str, timeout_s: float = 120) -> str:
    """Run ./launch/cluster as a user does, and return its output."""
    os.environ["PYTHON"] = sys.executable
    script = str(ROOT / "launch" / "cluster")
    return must(run([script, "--name", name, *arguments], timeout_s))


@dataclass(frozen=True)
class Containers:
    """A cluster of three hosts, one slot each."""

    name: str
    image: str

    @property
    def hosts(self) -> list[str]:
        return [f"{self.name}-worker-{number}" for number in (1, 2, 3)]

    def beside(self, *command: str) -> list[str]:
        """Return the command line of a container in the cluster's network, with its volumes."""
        return launcher_argv(self.name, self.hosts[0], self.image, command, False, 1)

    def summary(self, experiment: str) -> dict[str, object]:
        path = f"{RUNS}/{experiment}/summary.json"
        return json.loads(must(docker("exec", self.hosts[0], "cat", path)))


@contextmanager
def cluster_of_three(name: str, image: str) -> Iterator[Containers]:
    """Yield three hosts with one slot each, removed at the end.

    Raises AssertionError if `down` leaves containers, volumes or networks behind.
    """
    try:
        launch_cluster(name, "up", "--hosts", "3", "--slots", "1", "--image", image)
        yield Containers(name, image)
    finally:
        launch_cluster(name, "down", "--discard")
    for what in ("ps --all", "volume ls", "network ls"):
        left = docker(*what.split(), "--quiet", "--filter", f"name={name}").stdout
        assert not left, f"left behind: {what}: {left}"


def wait_for(condition: Callable[[], object], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait for a condition. Raises AssertionError, with `what()`, if it is not met in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.3)
