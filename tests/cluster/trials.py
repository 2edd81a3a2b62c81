"""Trials of `docker stop`, with its default 10 s of grace, on the containers of a job.

A job that is stopped must save and end within that time, and the same command resumes it. It must
end bit for bit with the result of the same job undisturbed.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from launch.containers.engine import launcher_label
from tests.cluster.containers import (
    HOSTFILE,
    RUNS,
    cluster_of_three,
    docker,
    must,
    start,
)
from tests.hosts.trials import (
    CHECKPOINT_EVERY,
    END_S,
    EXPERIMENT,
    MOST_STEPS_BETWEEN,
    NOTICED_S,
    RESTART,
    Ended,
    Lines,
    Recovery,
)
from tests.parallel.launching import VANISH_S

STOP_CONTAINER = "docker stop the container"  # the only one: two workers
STOP_LAUNCHER = "docker stop the launcher"  # beside three hosts with a worker each
STOP_HOST = "docker stop a host"  # one of three; it is started again
FAULTS = (STOP_CONTAINER, STOP_LAUNCHER, STOP_HOST)
STOPPED = 143  # 137 would mean a SIGKILL after the 10 s
LONGEST_AWAY_S = 8.0
PROGRAMS = "/opt/hvdtrain/"  # those of jobs; sshd and the health check are elsewhere


@dataclass(frozen=True)
class Site:
    """The place of a job: containers as hosts, or a single container with the whole job."""

    name: str
    start: list[str]  # command line that starts a container, without the command in it
    hosts: Sequence[str]

    def launch(self, controller: str, steps: int, experiment: str) -> Lines:
        """Start the job, or resume it."""
        command = [*self.start, "hvdtrain", "launch", f"--controller={controller}", "--restarts=9"]
        command += [f"--hostfile={HOSTFILE}"] if self.hosts else ["-np", "2"]
        command += ["--", "train", *EXPERIMENT]
        command += [f"--max-steps={steps}", f"--experiment={experiment}", "--resume=auto"]
        return Lines(start(command))

    def stop_launcher(self) -> None:
        """Stop the container in which the job was started."""
        which = f"label={launcher_label(self.name)}" if self.hosts else f"name=^/{self.name}$"
        must(docker("stop", must(docker("ps", "--quiet", "--filter", which)).strip()))

    def summary(self, experiment: str) -> dict[str, object]:
        """Return the summary of the run."""
        text = must(docker(*self.start[1:], "cat", f"{RUNS}/{experiment}/summary.json"))
        found: dict[str, object] = json.loads(text)
        return found

    def left(self) -> list[str]:
        """Return the processes of jobs on the hosts, as lines, that are left after VANISH_S."""
        deadline = time.monotonic() + VANISH_S
        while True:
            tops = [must(docker("top", host, "-eo", "pid,args")) for host in self.hosts]
            found = [line for top in tops for line in top.splitlines() if PROGRAMS in line]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.3)


@contextmanager
def make_site(fault: str, image: str) -> Iterator[Site]:
    """Yield the site for a fault, removed at the end."""
    name = f"hvdtrain-trial-{uuid.uuid4().hex[:8]}"
    if fault != STOP_CONTAINER:
        with cluster_of_three(name, image) as containers:
            yield Site(containers.name, containers.beside(), containers.hosts)
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
    """Run a job with faults at random moments, each after recovery from the previous one.

    Without faults the job is undisturbed.
    """
    lines = site.launch(controller, steps, experiment)
    lines.wait_for(f"step {CHECKPOINT_EVERY}/", END_S)
    output, recoveries = "", []
    for fault in faults:
        lines.wait_for_steps(dice.randint(0, MOST_STEPS_BETWEEN))
        began_s = time.monotonic()
        if fault == STOP_HOST:
            host = dice.choice(site.hosts)
            must(docker("stop", host))
            time.sleep(dice.uniform(0, LONGEST_AWAY_S))
            must(docker("start", host))
            detected_s = lines.wait_for(RESTART, NOTICED_S, began_s)
        else:
            site.stop_launcher()
            code, output = lines.wait(END_S), output + lines.text
            assert code == STOPPED, f"{fault}, {controller}: ended with {code}:\n{output}"
            detected_s = time.monotonic()
            lines = site.launch(controller, steps, experiment)
        recovered_s = lines.wait_for("step ", END_S, detected_s)
        parts = lines.parts(began_s) if fault == STOP_HOST else {}
        recoveries.append(Recovery(fault, detected_s - began_s, recovered_s - began_s, parts))
    code, output = lines.wait(END_S), output + lines.text
    assert code == 0, f"{faults}, {controller}: ended with {code}:\n{output}"
    return Ended(recoveries, site.summary(experiment), len(site.left()), output)
