"""`docker stop`, with the 10 s that it gives by default, of containers that take part in a job.

What stops the job makes it save and end within that time; the same command goes on. The job must
end with what the same job ends with, bit for bit, when nothing disturbs it.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.cluster.containers import (
    HOSTFILE,
    RUNS,
    Containers,
    cluster_of_three,
    docker,
    must,
)
from tests.hosts.trials import (
    CHECKPOINT_EVERY,
    END_S,
    EXPERIMENT,
    MOST_STEPS_BETWEEN,
    RESTART,
    Ended,
    Lines,
    Recovery,
)
from tests.parallel.launching import VANISH_S

STOP_CONTAINER = "docker stop the container"  # the only one: two workers
STOP_LAUNCHER = "docker stop the launcher"  # beside three hosts with a worker each
STOP_HOST = "docker stop a host"  # one of the three, which is started again
FAULTS = (STOP_CONTAINER, STOP_LAUNCHER, STOP_HOST)
STOPPED = 143  # 137 if docker had to send SIGKILL after its 10 s
LONGEST_AWAY_S = 8.0
PROGRAMS = "/opt/hvdtrain/"  # of jobs; a host's own, sshd and its health check, lie elsewhere


@dataclass(frozen=True)
class Site:
    """Where a job trains: containers as hosts, or a single one with the whole job."""

    name: str
    start: list[str]  # starts a container of the job, up to the job's own command
    hosts: Sequence[str]

    def launch(self, controller: str, steps: int, experiment: str) -> Lines:
        """Start the job, also to go on."""
        command = [*self.start, "hvdtrain", "launch", f"--controller={controller}", "--restarts=9"]
        command += [f"--hostfile={HOSTFILE}"] if self.hosts else ["-np", "2"]
        command += ["--", "train", *EXPERIMENT]
        command += [f"--max-steps={steps}", f"--experiment={experiment}", "--resume=auto"]
        return Lines(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def stop_launcher(self) -> None:
        """Stop the container in which the job was started."""
        which = f"label=hvdtrain.launcher={self.name}" if self.hosts else f"name=^/{self.name}$"
        must(docker("stop", must(docker("ps", "--quiet", "--filter", which)).strip()))

    def summary(self, experiment: str) -> dict[str, object]:
        """What the run left."""
        text = must(docker(*self.start[1:], "cat", f"{RUNS}/{experiment}/summary.json"))
        found: dict[str, object] = json.loads(text)
        return found

    def left(self) -> list[str]:
        """What runs on the hosts that a job has started, once it had time to go."""
        deadline = time.monotonic() + VANISH_S
        while True:
            tops = [must(docker("top", host, "-eo", "pid,args")) for host in self.hosts]
            found = [line for top in tops for line in top.splitlines() if PROGRAMS in line]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.3)


def site_of(containers: Containers) -> Site:
    """A cluster's hosts."""
    return Site(containers.name, containers.beside(), containers.hosts)


@contextmanager
def make_site(fault: str, image: str) -> Iterator[Site]:
    """What a fault happens to; gone when the context ends."""
    name = f"hvdtrain-trial-{uuid.uuid4().hex[:8]}"
    if fault != STOP_CONTAINER:
        with cluster_of_three(name, image) as containers:
            yield site_of(containers)
        return
    rights = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    start = ["docker", "run", "--rm", "--name", name, "--volume", f"{name}:{RUNS}", *rights]
    try:
        yield Site(name, [*start, "--shm-size", "1g", "--env", "OMP_NUM_THREADS=1", image], ())
    finally:
        docker("rm", "--force", name)
        docker("volume", "rm", name)


def disturb(
    site: Site,
    faults: Sequence[str],
    controller: str,
    steps: int,
    experiment: str,
    dice: random.Random,
) -> Ended:
    """Disturb a job at random moments, by one fault after the other, each once it has recovered
    from the one before; without any, it goes on in peace.
    """
    lines = site.launch(controller, steps, experiment)
    lines.wait_for(f"step {CHECKPOINT_EVERY}/", END_S)
    told, recoveries = "", []
    for fault in faults:
        lines.wait_for_steps(dice.randint(0, MOST_STEPS_BETWEEN))
        began_s = time.monotonic()
        if fault == STOP_HOST:
            host = dice.choice(site.hosts)
            must(docker("stop", host))
            time.sleep(dice.uniform(0, LONGEST_AWAY_S))
            must(docker("start", host))
            detected_s = lines.wait_for(RESTART, 90, began_s)
        else:
            site.stop_launcher()
            code, told = lines.wait(END_S), told + lines.text
            assert code == STOPPED, f"{fault}, {controller}: ended with {code}:\n{told}"
            detected_s = time.monotonic()
            lines = site.launch(controller, steps, experiment)
        recovered_s = lines.wait_for("step ", END_S, detected_s)
        recoveries.append(Recovery(fault, detected_s - began_s, recovered_s - began_s))
    code, told = lines.wait(END_S), told + lines.text
    assert code == 0, f"{faults}, {controller}: ended with {code}:\n{told}"
    return Ended(recoveries, site.summary(experiment), len(site.left()), told)
