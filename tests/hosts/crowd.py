"""A job on three hosts with more workers than this machine has cores, audited at every step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.lab.hosts.network import INTERFACE
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import BIN, hvdtrain

STARTS = ("launch", "horovodrun")
STEPS, BATCH = 12, 32
EXPERIMENT = ["--model=lenet", "--data=synthetic:1x28x28,samples=384", "--audit-every=1"]
EXPERIMENT += [f"--global-batch-size={BATCH}", f"--max-steps={STEPS}", "--experiment=run"]
BURN = "while True: pass"


def slots_of(workers: int) -> list[int]:
    """Return the slots of three hosts, as equal as possible."""
    return [(workers + 2 - host) // 3 for host in range(3)]


@contextmanager
def busy_processes(count: int, *program: str) -> Iterator[None]:
    """Keep `count` processes computing during the context, by other Python code if it is given,
    with its arguments.
    """
    command = [sys.executable, "-c", *(program or [BURN])]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def crowded_command(cluster: Cluster, controller: str, start: str, output: Path) -> list[str]:
    """Return the command of the job on all slots: by `hvdtrain launch`, or plain horovodrun."""
    train = ["train", *EXPERIMENT, f"--output={output}"]
    if start == "launch":
        flags = ["--hostfile", str(cluster.hostfile), f"--controller={controller}"]
        return hvdtrain("launch", *flags, "--", *train)
    return horovodrun(cluster, controller, hvdtrain(*train))


def horovodrun(cluster: Cluster, controller: str, command: Sequence[str]) -> list[str]:
    """Return the command line of horovodrun on all slots of a cluster."""
    launcher = ["horovodrun", "-np", str(sum(host.slots for host in cluster.hosts))]
    launcher += ["-H", cluster.host_list, "-p", str(cluster.ssh_port), f"--{controller}"]
    launcher += ["--disable-cache", "--network-interface", INTERFACE]
    if controller == "mpi":
        # A login has no virtual environment on its PATH: with --prefix it finds orted.
        mpirun = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
        assert mpirun, "no mpirun"
        launcher += [f"--mpi-args=--prefix {Path(mpirun).parents[1]}"]
    return [*launcher, *command]


def why_not_audited(output: Path, workers: int) -> str:
    """Return the deviations in the summary of a job; empty if every step was correct."""
    summary = json.loads((output / "run" / "summary.json").read_text())
    found = {name: summary[name] for name in ("status", "world_size", "steps", "samples_seen")}
    expected = {"status": "finished", "world_size": workers}
    expected |= {"steps": STEPS, "samples_seen": STEPS * BATCH}
    audit = {name: summary["audit"][name] for name in ("checked", "failed")}
    right = found == expected and audit == {"checked": STEPS, "failed": 0}
    return "" if right else f"{found}, {audit}"
