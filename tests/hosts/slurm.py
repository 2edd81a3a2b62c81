"""A real Slurm on test hosts: munged and slurmctld on the first host, and a slurmd on each.

    with Slurm(cluster) as slurm:
        job = slurm.submit("--nodes=3", "launch/slurm.sbatch", "--model=lenet")
        assert slurm.wait(job) == "COMPLETED"

All its files are in the cluster's folder, and all its processes run on the hosts, so that nothing
is left after the cluster. The hosts share the file system, so that one munged serves all of them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.lab.hosts.node import HostProcess, HostsError
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import BIN, Finished

CORES = 2  # of each host, as Slurm counts them
START_S = 60.0
REQUEUE_S = 5  # Slurm starts a requeued job after this time
KILL_WAIT_S = 20  # between the SIGTERM and the SIGKILL of a job
TOOLS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
}
SETTINGS = {
    "ClusterName": "test",
    "AuthType": "auth/munge",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "SwitchType": "switch/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "AccountingStorageType": "accounting_storage/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "JobRequeue": "0",  # only jobs that request it are requeued
    "ReturnToService": "1",  # a host that was set DOWN stays DOWN
    "SlurmdTimeout": "60",  # three pings: a host that is back counts after the next
    "KillWait": str(KILL_WAIT_S),
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2",
}
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def why_not() -> str | None:
    """Return the reason why this machine cannot run Slurm, or None."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    missing = {package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)}
    if missing:
        return f"a test Slurm needs these Debian packages: {' '.join(sorted(missing))}"
    return None


class Slurm:
    """Slurm on all hosts of a running cluster; a context manager. It ends with the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "slurm"
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        self._write_files()
        socket = self.folder / "munge.socket"
        key, log = self.folder / "munge.key", self.folder / "munged.log"
        files = [f"--key-file={key}", f"--socket={socket}", f"--log-file={log}"]
        files += [f"--{name}-file={self.folder / name}" for name in ("pid", "seed")]
        self._daemon(0, "munged", "--foreground", "--force", *files)
        self._wait("munged", socket.exists)
        self._daemon(0, "slurmctld", "-D")
        for number, host in enumerate(self.cluster.hosts):
            self._daemon(number, "slurmd", "-D", "-N", host.name)
        self.wait_until_idle()
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the daemons end with their hosts."""

    def run(self, *command: str, timeout_s: float = 120) -> Finished:
        """Run a command of Slurm (or any other) on the first host to its end."""
        process = self.start(*command)
        started = time.monotonic()
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.discard()
        return Finished(process.returncode, output, time.monotonic() - started)

    def start(self, *command: str) -> HostProcess:
        """Start a command on the first host."""
        return self.cluster.start(command, variables=self.environment)

    def ask(self, *command: str) -> str:
        """Run a command on the first host, and return its output. Raises HostsError."""
        done = self.run(*command)
        if done.exit_code != 0:
            raise HostsError(f"{' '.join(command)}: {done.output.strip()}")
        return done.output.strip()

    def submit(self, *arguments: str) -> int:
        """Submit a job by sbatch, and return its number."""
        return int(self.ask("sbatch", "--parsable", *arguments).splitlines()[-1].split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """Return the fields of a job: JobState, Reason, Restarts, ExitCode and others."""
        text = self.ask("scontrol", "show", "job", "--oneliner", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def nodes(self) -> set[str]:
        """Return the set of states of all hosts."""
        return set(self.run("sinfo", "--noheader", "--Node", "--format=%T").output.split())

    def wait_until_idle(self) -> None:
        """Wait until all hosts are up and free. Raises HostsError."""
        self._wait("slurmd", lambda: self.nodes() == {"idle"})

    def wait(self, number: int, states: Sequence[str] = OVER, timeout_s: float = 120) -> str:
        """Wait until a job has one of these states, and return it. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while (state := self.job(number)["JobState"]) not in states:
            assert time.monotonic() < deadline, f"job {number} is {state}: {self.job(number)}"
            time.sleep(0.3)
        return state

    def _write_files(self) -> None:
        self.folder.mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        first, names = self.cluster.hosts[0].name, [host.name for host in self.cluster.hosts]
        auth = f"socket={self.folder / 'munge.socket'},cred_expire={REQUEUE_S}"
        own = {
            "SlurmctldHost": first,
            "AuthInfo": auth,
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
        }
        lines = [f"{name}={value}" for name, value in {**SETTINGS, **own}.items()]
        lines.append(f"NodeName={','.join(names)} CPUs={CORES} State=UNKNOWN")
        lines.append(f"PartitionName=all Nodes={','.join(names)} Default=YES State=UP")
        (self.folder / "slurm.conf").write_text("".join(f"{line}\n" for line in lines))

    def _daemon(self, host: int, *command: str) -> None:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
        name = f"{command[0]}-{self.cluster.hosts[host].name}"
        with self._log(name).open("w") as log:
            variables = self.environment | {"PATH": path}
            self.cluster.start(command, host, variables, stdout=log)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.output"

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if time.monotonic() > deadline:
                logs = (f"{log.name}: {log.read_text()}" for log in self.folder.glob("*.output"))
                raise HostsError(f"{what} does not start:\n" + "\n".join(logs))
            time.sleep(0.2)
