"""Faults at random moments in jobs over several hosts: does every run end as if nothing had been?

    python -m tests.campaigns.recovery [--repeat 10] [--controllers gloo mpi] [--faults 0 1 ...]

Needs root (hosts are made of namespaces; see tests/hosts) and, for `docker stop`, a Docker engine
(docker/start-engine). Prints each trial, and the table after each round of all faults and in the
end, also if it is ended by Ctrl-C or SIGTERM. Ends with exit code 1 unless each run ended with the
undisturbed run's parameters, with no process left on any host.

`--jobs 2` runs two trials at a time. Each has hosts of its own, so what they end with counts as
much as one by one, but the times in the table are those of a machine with twice the load.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.launcher.cluster_engine import Engine
from hvdtrain.launcher.cluster_image import ensure_image
from tests.cluster import trials as containers
from tests.cluster.containers import ROOT
from tests.hosts import trials as hosts
from tests.hosts.namespaces import Cluster
from tests.hosts.trials import Ended, Recovery
from tests.parallel.launching import CONTROLLERS

STEPS = 40
STEPS_IN_CONTAINERS = 120  # with fewer workers they are faster
FAULTS = [*hosts.FAULTS, *containers.FAULTS]
SAME = ("params_sha256", "samples_seen", "steps", "world_size")


@dataclass(frozen=True)
class Trial:
    """One fault in one job."""

    number: int
    controller: str
    fault: str

    @property
    def kind(self) -> tuple[str, str]:
        """What jobs that end alike have in common: the controller, and where they run."""
        alone = "one container" if self.fault == containers.STOP_CONTAINER else "containers"
        return self.controller, "namespaces" if self.fault in hosts.FAULTS else alone


@dataclass(frozen=True)
class Row:
    """What became of a trial."""

    trial: Trial
    recovery: Recovery
    problem: str  # empty when all was right


class Campaign:
    """Runs jobs, in threads: each has hosts and a folder of its own."""

    def __init__(self, folder: Path, image: str, seed: int) -> None:
        self._folder, self._image, self._seed = folder, image, seed
        self._peace: dict[tuple[str, str], dict[str, object]] = {}

    def run(self, trials: Sequence[Trial], jobs: int) -> Iterator[Row]:
        """The rows, as they come; first the undisturbed runs are made."""
        pool = ThreadPoolExecutor(jobs)
        try:
            kinds = {trial.kind: pool.submit(self._job, trial, False) for trial in _kinds(trials)}
            for kind, future in kinds.items():
                self._peace[kind] = future.result().summary
                digest = self._peace[kind]["params_sha256"]
                print(f"{', '.join(kind)}: undisturbed {digest}", flush=True)
            rows = [pool.submit(self._try, trial) for trial in trials]
            for row in as_completed(rows):
                yield row.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _try(self, trial: Trial) -> Row:
        try:
            ended = self._job(trial, True)
        except Exception:  # whatever it is, the other trials go on
            return Row(trial, Recovery(trial.fault, math.nan, math.nan), traceback.format_exc())
        peace = self._peace[trial.kind]
        wrong = [name for name in SAME if ended.summary[name] != peace[name]]
        problem = f"other {', '.join(wrong)}; {ended.left} processes left\n{ended.output}"
        return Row(trial, ended.recoveries[0], problem if wrong or ended.left else "")

    def _job(self, trial: Trial, disturbed: bool) -> Ended:
        dice = random.Random(f"{self._seed} {trial}")
        faults = [trial.fault] * disturbed
        if trial.fault in hosts.FAULTS:
            name = f"{trial.controller}-{trial.number}-{FAULTS.index(trial.fault)}"
            place = self._folder / (name if disturbed else f"{trial.controller}-peace")
            with Cluster(hosts.SLOTS, place / "hosts", visible=[place]) as cluster:
                runs = place / "runs"
                return hosts.disturb(cluster, faults, trial.controller, runs, STEPS, dice)
        with containers.make_site(trial.fault, self._image) as site:
            steps = STEPS_IN_CONTAINERS
            return containers.disturb(site, faults, trial.controller, steps, "run", dice)


def _kinds(trials: Sequence[Trial]) -> list[Trial]:
    """One trial of each kind."""
    return list({trial.kind: trial for trial in trials}.values())


def _line(row: Row) -> str:
    recovery = row.recovery
    return (
        f"{row.trial.controller:4} {row.trial.fault:25} detected {recovery.detected_s:5.1f} s  "
        f"recovered {recovery.recovered_s:5.1f} s  {'WRONG' if row.problem else 'right'}"
    )


def print_table(found: Sequence[Row]) -> None:
    """A row for each fault and controller. An equal hash means that no sample was lost, or seen
    twice.
    """
    print("fault                      controller  trials  detected after  recovered after  wrong")
    for fault in FAULTS:
        for controller in CONTROLLERS:
            of_both = (fault, controller)
            rows = [row for row in found if (row.trial.fault, row.trial.controller) == of_both]
            if rows:
                detected = _spread([row.recovery.detected_s for row in rows])
                recovered = _spread([row.recovery.recovered_s for row in rows])
                wrong = sum(bool(row.problem) for row in rows)
                print(
                    f"{fault:26} {controller:10} {len(rows):7}  {detected:>14}  "
                    f"{recovered:>15}  {wrong:5}"
                )
    wrong = sum(bool(row.problem) for row in found)
    print(f"{len(found)} trials, {wrong} wrong", flush=True)


def _spread(values: Sequence[float]) -> str:
    """The median and the largest of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.median(known):.1f} ({max(known):.1f}) s" if known else "-"


def _parse() -> argparse.Namespace:
    numbered = ", ".join(f"{number} {fault}" for number, fault in enumerate(FAULTS))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"faults: {numbered}"
    )
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controllers", nargs="+", choices=CONTROLLERS, default=CONTROLLERS)
    numbers = range(len(FAULTS))
    parser.add_argument("--faults", type=int, nargs="+", choices=numbers, default=numbers)
    return parser.parse_args()


def _find_image(faults: Sequence[str]) -> str:
    """The image of this checkout, where a fault needs it. Raises PreflightError."""
    if not set(faults) & set(containers.FAULTS):
        return ""
    engine = Engine("hvdtrain", ROOT / "docker" / "compose.yaml")
    engine.check()
    return ensure_image(engine, ROOT)


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = [FAULTS[number] for number in arguments.faults]
    round_ = [(controller, fault) for controller in arguments.controllers for fault in faults]
    trials = [Trial(number, *pair) for number in range(arguments.repeat) for pair in round_]
    found: list[Row] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            campaign = Campaign(Path(folder), _find_image(faults), arguments.seed)
            with closing(campaign.run(trials, arguments.jobs)) as rows:
                for row in rows:
                    found.append(row)
                    minutes = (time.monotonic() - began_s) / 60
                    progress = f"{len(found)}/{len(trials)} after {minutes:.0f} min"
                    print(f"{_line(row)}  ({progress})", flush=True)
                    if row.problem:
                        print(row.problem, flush=True)
                    if len(found) % len(round_) == 0 and len(found) < len(trials):
                        print_table(found)
        except HvdtrainError as error:
            print(f"recovery: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("recovery: cut short", file=sys.stderr)
            return 130
        finally:
            print_table(found)
    return 1 if any(row.problem for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
