"""Faults of the recovery campaign in a job of torchrun, on the same hosts.

    python -m tests.campaigns.torchrun [--repeat 3] [--faults 0 1 ...] [--seed 0]

Four workers on three hosts train tests/campaigns/elastic_ddp.py, started on each host by `torchrun
--nnodes=2:3 --max-restarts=99 --rdzv-backend=c10d`. A job meets one fault at a random step. Prints
the time from the fault to the first step that the job had not made before, and whether it ends with
the weights of an undisturbed job. Requires root.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set: without it, with torch 2.13, workers that are started
again read the addresses of those before, and need many starts.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hvdtrain.lab.bench.peer_runs import SCRIPTS
from tests.hosts.namespaces import Cluster
from tests.hosts.trials import CUT_OFF, KILL_LAUNCHER, SLOTS, TAKEN_BACK, Lines

SCRIPT = str(Path(__file__).with_name("elastic_ddp.py"))
STEPS, FIRST, LAST = 400, 8, 20  # of a job; between which steps the fault comes
RESTARTS, LIMIT_S = 99, 120.0
ON_THE_WAY_S = 0.5  # for lines that were printed before a fault
STEP = re.compile(r"^step (\d+)/\d+ by (\d+) workers$")
LOST_HOST = "lose the first host"
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(SCRIPTS),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=alpha:29400"]


@dataclass
class ElasticJob:
    """The command of each host, and what they have printed."""

    cluster: Cluster
    folder: Path
    dice: random.Random
    nodes: list[Lines] = field(default_factory=list)

    def start(self) -> None:
        """Start the command on every host."""
        for host in self.cluster.hosts:
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", *RENDEZVOUS]
            command += [f"--nproc-per-node={host.slots}", f"--max-restarts={RESTARTS}"]
            command += [f"--local-addr={host.name}", SCRIPT]
            command += [str(self.folder / "snapshot.pt"), str(STEPS)]
            number = len(self.nodes)
            self.nodes.append(Lines(self.cluster.start(command, number, variables=VARIABLES)))

    def steps(self) -> list[tuple[float, int, int]]:
        """Return the time, number and workers of each step that was printed."""
        lines = [(at_s, STEP.match(text)) for node in self.nodes for at_s, text in list(node.seen)]
        return sorted((at_s, int(m[1]), int(m[2])) for at_s, m in lines if m)

    def newest(self) -> int:
        """Return the newest step, 0 before the first."""
        return max((step for _, step, _ in self.steps()), default=0)

    def wait_for(self, step: int, workers: int = 0, after_s: float = 0.0) -> float | None:
        """Return the time of the first such step, by this many workers (0: any); None: never."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            for at_s, number, size in self.steps():
                if number >= step and at_s >= after_s and workers in (0, size):
                    return at_s
            if all(node.process.poll() is not None for node in self.nodes):
                return None
            time.sleep(0.05)
        return None

    def weights(self) -> str:
        """Wait for the end of the job; return the hash that it has printed, or empty."""
        with suppress(subprocess.TimeoutExpired):
            for node in self.nodes:
                node.wait(LIMIT_S)
        found = re.findall(r"^weights (\w+)", "".join(n.text for n in self.nodes), re.MULTILINE)
        return found[-1] if found else ""

    def signal_worker(self, number: signal.Signals) -> None:
        """Send a signal to a random worker."""
        workers = []
        for process in self.cluster.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                if SCRIPT in words and "torch.distributed.run" not in words:
                    workers.append(process)
        self.dice.choice(workers).send_signal(number)


def _cut_off(job: ElasticJob) -> None:
    job.cluster.cut(job.dice.choice([1, 2]))


def _signals(number: signal.Signals) -> Callable[[ElasticJob], None]:
    return lambda job: job.signal_worker(number)


FAULTS: dict[str, Callable[[ElasticJob], None]] = {
    "SIGKILL a worker": _signals(signal.SIGKILL),
    "SIGSTOP a worker": _signals(signal.SIGSTOP),
    "abort in native code": _signals(signal.SIGABRT),
    CUT_OFF: _cut_off,
    KILL_LAUNCHER: lambda job: job.nodes[0].process.kill(),
    LOST_HOST: lambda job: job.cluster.kill_host(0),
}


def disturb(fault: str, folder: Path, dice: random.Random) -> tuple[dict[str, float | None], str]:
    """Run a job with a fault (empty: none); return times by row, and the hash at the end."""
    with Cluster(SLOTS, folder / "hosts", visible=[folder]) as cluster:
        job = ElasticJob(cluster, folder, dice)
        job.start()
        if not fault:
            return {}, job.weights()
        if job.wait_for(dice.randint(FIRST, LAST)) is None:
            raise SystemExit("".join(node.text for node in job.nodes))
        began_s = time.monotonic()
        FAULTS[fault](job)
        time.sleep(ON_THE_WAY_S)
        new_s = job.wait_for(job.newest() + 1, after_s=began_s + ON_THE_WAY_S)
        times = {fault: None if new_s is None else new_s - began_s}
        if fault == CUT_OFF:
            began_s = time.monotonic()
            for host in (1, 2):
                cluster.mend(host)
            back_s = job.wait_for(0, sum(SLOTS), began_s)
            times[TAKEN_BACK] = None if back_s is None else back_s - began_s
        if new_s is None:
            print("".join(node.text for node in job.nodes), file=sys.stderr)
            return times, ""
        return times, job.weights()


def spread(seconds: Sequence[float | None]) -> str:
    """Return the median, the largest, and how many never came."""
    came = [value for value in seconds if value is not None]
    text = f"{statistics.median(came):.1f} ({max(came):.1f}) s" if came else ""
    never = len(seconds) - len(came)
    return f"{text} {never} not within {LIMIT_S:g} s".strip() if never else text


def main() -> int:
    numbered = ", ".join(f"{number} {fault}" for number, fault in enumerate(FAULTS))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"faults: {numbered}"
    )
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each fault")
    parser.add_argument("--seed", type=int, default=0)
    numbers = range(len(FAULTS))
    parser.add_argument("--faults", type=int, nargs="+", choices=numbers, default=numbers)
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        _, undisturbed = disturb("", Path(folder, "undisturbed"), dice)
        _, again = disturb("", Path(folder, "again"), dice)
        print(f"undisturbed, twice: {'the same' if again == undisturbed else 'other'} weights")
        for fault in [list(FAULTS)[number] for number in arguments.faults]:
            rows: dict[str, list[float | None]] = {}
            same = 0
            for number in range(arguments.repeat):
                times, weights = disturb(fault, Path(folder, f"{fault} {number}"), dice)
                same += weights == undisturbed != ""
                print(f"{fault}: {times}, {weights[:12]}", file=sys.stderr, flush=True)
                for row, seconds in times.items():
                    rows.setdefault(row, []).append(seconds)
            for row, each in rows.items():
                print(f"{row:26} {spread(each)}", flush=True)
            print(f"{'':26} the weights of the undisturbed job: {same} of {arguments.repeat}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
