"""Comparison of jobs on several hosts, with faults at random moments, with undisturbed ones.

    python -m tests.campaigns.recovery [--repeat 10] [--controllers gloo mpi] [--faults 0 1 ...]
        [--json FILE] [--before FILE]

Each job is exposed to every fault that its place allows, in a random order, each after recovery
from the previous one. `--repeat` is the number of such jobs for each place and controller.

Requires root (hosts are made of namespaces; see tests/hosts) and, for `docker stop`, a Docker
engine (docker/start-engine). Prints each job, and the table after each round and at the end, also
after Ctrl-C or SIGTERM. Exits with 1 unless each job ended with the parameters of the undisturbed
one, and left no process on any host.

A second table has the parts of each recovery that the launcher has made, as medians in seconds,
from the fault to the first step that the job had not begun before. `--json` keeps all times;
`--before` shows such a file beside them.

`--jobs 2` runs two jobs at a time. Each has its own hosts, so that their results are as valid as
those of single jobs, but the times in the table are those of a machine with twice the load.
"""

from __future__ import annotations

import argparse
import json
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import HvdtrainError
from launch.containers.engine import Engine
from launch.containers.image import ensure_image
from tests.cluster import trials as containers
from tests.cluster.containers import ROOT
from tests.hosts import trials as hosts
from tests.hosts.namespaces import Cluster
from tests.hosts.trials import Ended, Recovery
from tests.parallel.launching import CONTROLLERS

STEPS = {"namespaces": (40, 90), "containers": (60, 60), "one container": (60, 60)}
FAULTS = [*hosts.FAULTS, *containers.FAULTS]
ROWS = [*FAULTS, hosts.TAKEN_BACK]
PARTS = (  # as in the launcher's line
    *("earlier starts", "noticed", "ended", "paused", "checked", "started", "imported", "joined"),
    *("loaded", "caught up"),
)
SAME = ("params_sha256", "samples_seen", "steps", "world_size")


@dataclass(frozen=True)
class Kind:
    """The properties that determine the result of a job."""

    controller: str
    place: str
    faults: tuple[str, ...]  # all faults of a job of this kind

    @property
    def steps(self) -> int:
        """Return a number of steps that outlasts all faults, on a fast machine too."""
        base, for_each = STEPS[self.place]
        return base + for_each * len(self.faults)


@dataclass(frozen=True)
class Trial:
    """One job, and the number of its round."""

    number: int
    kind: Kind


@dataclass(frozen=True)
class Row:
    """The result of a trial."""

    trial: Trial
    recoveries: list[Recovery]
    problem: str  # empty: none


def place_of(fault: str) -> str:
    """Return the place of a job with this fault: a key of STEPS."""
    if fault in hosts.FAULTS:
        return "namespaces"
    return "one container" if fault == containers.STOP_CONTAINER else "containers"


def kinds_of(controllers: Sequence[str], faults: Sequence[str]) -> list[Kind]:
    """Return the kinds of jobs with these faults."""
    found = [
        Kind(controller, place, tuple(fault for fault in faults if place_of(fault) == place))
        for place in STEPS
        for controller in controllers
    ]
    return [kind for kind in found if kind.faults]


class Campaign:
    """The runner of jobs, in threads; each job has its own hosts and folder."""

    def __init__(self, folder: Path, image: str, seed: int) -> None:
        self._folder, self._image, self._seed = folder, image, seed
        self._peace: dict[Kind, dict[str, object]] = {}

    def run(self, kinds: Sequence[Kind], repeat: int, jobs: int) -> Iterator[Row]:
        """Run the undisturbed jobs, then the trials; yield the rows as they are completed."""
        pool = ThreadPoolExecutor(jobs)
        try:
            peace = {kind: pool.submit(self._job, Trial(0, kind), ()) for kind in kinds}
            for kind, future in peace.items():
                self._peace[kind] = future.result().summary
                digest = self._peace[kind]["params_sha256"]
                print(f"{kind.controller}, {kind.place}: undisturbed {digest}", flush=True)
            trials = [Trial(number, kind) for number in range(repeat) for kind in kinds]
            rows = [pool.submit(self._try, trial) for trial in trials]
            for row in as_completed(rows):
                yield row.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _try(self, trial: Trial) -> Row:
        faults = random.Random(f"{self._seed} {trial}").sample(
            trial.kind.faults, len(trial.kind.faults)
        )
        try:
            ended = self._job(trial, faults)
        except Exception:  # the other trials continue after any error
            return Row(trial, [], f"{', '.join(faults)}\n{traceback.format_exc()}")
        peace = self._peace[trial.kind]
        wrong = [name for name in SAME if ended.summary[name] != peace[name]]
        problem = f"other {', '.join(wrong)}; {ended.left} processes left\n{ended.output}"
        return Row(trial, ended.recoveries, problem if wrong or ended.left else "")

    def _job(self, trial: Trial, faults: Sequence[str]) -> Ended:
        kind, dice = trial.kind, random.Random(f"{self._seed} {trial} times")
        if kind.place == "namespaces":
            place = self._folder / f"{kind.controller}-{trial.number if faults else 'peace'}"
            with Cluster(hosts.SLOTS, place / "hosts", visible=[place]) as cluster:
                runs = place / "runs"
                return hosts.disturb(cluster, faults, kind.controller, runs, kind.steps, dice)
        with containers.make_site(kind.faults[0], self._image) as site:
            return containers.disturb(site, faults, kind.controller, kind.steps, "run", dice)


def _lines(row: Row) -> str:
    kind = row.trial.kind
    head = f"{kind.controller}, {kind.place}, {row.trial.number + 1}: "
    times = [
        f"    {it.fault:25} detected {it.detected_s:5.1f} s  recovered {it.recovered_s:5.1f} s"
        for it in row.recoveries
    ]
    return "\n".join([head + ("WRONG" if row.problem else "right"), *times])


def print_table(found: Sequence[Row]) -> None:
    """Print a row for each fault and controller.

    An equal hash means that no sample was lost or seen twice.
    """
    print("fault                      controller  jobs  detected after  recovered after  wrong")
    for fault in ROWS:
        cause = hosts.CUT_OFF if fault == hosts.TAKEN_BACK else fault
        for controller in CONTROLLERS:
            rows = [
                row
                for row in found
                if row.trial.kind.controller == controller and cause in row.trial.kind.faults
            ]
            recoveries = [it for row in rows for it in row.recoveries if it.fault == fault]
            if rows:
                detected = _spread([recovery.detected_s for recovery in recoveries])
                recovered = _spread([recovery.recovered_s for recovery in recoveries])
                wrong = sum(bool(row.problem) for row in rows)
                print(
                    f"{fault:26} {controller:10} {len(rows):5}  {detected:>14}  "
                    f"{recovered:>15}  {wrong:5}"
                )
    wrong = sum(bool(row.problem) for row in found)
    print(f"{len(found)} jobs, {wrong} wrong", flush=True)


def times_of(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the times of all recoveries, as JSON holds them."""
    return [
        {"controller": row.trial.kind.controller, **asdict(recovery)}
        for row in rows
        for recovery in row.recoveries
    ]


def medians_of(times: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the median of each part, and of their sum, by fault and controller."""
    grouped: dict[tuple[str, str], list[dict[str, float]]] = {}
    for each in times:
        if parts := each["parts"]:
            grouped.setdefault((each["fault"], each["controller"]), []).append(parts)
    return {
        key: {part: statistics.median(p.get(part, 0.0) for p in parts) for part in PARTS}
        | {"all": statistics.median(sum(p.values()) for p in parts)}
        for key, parts in grouped.items()
    }


def print_parts(times: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> None:
    """Print the medians of the parts, and those of before under them."""
    now, earlier = medians_of(times), medians_of(before)
    columns = [part for part in (*PARTS, "all") if any(row[part] for row in now.values())]
    print("fault                      controller         " + "".join(f"{c:>15}" for c in columns))
    for (fault, controller), row in now.items():
        for name, medians in (("", row), ("before", earlier.get((fault, controller)))):
            if medians is not None:
                figures = "".join(f"{medians[part]:15.1f}" for part in columns)
                print(f"{fault:26} {controller:10} {name:8}{figures}")
    print(flush=True)


def _spread(values: Sequence[float]) -> str:
    """Return the median and the largest value as text."""
    return f"{statistics.median(values):.1f} ({max(values):.1f}) s" if values else "-"


def _parse() -> argparse.Namespace:
    numbered = ", ".join(f"{number} {fault}" for number, fault in enumerate(FAULTS))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"faults: {numbered}"
    )
    parser.add_argument("--repeat", type=int, default=10, help="jobs of each kind")
    parser.add_argument("--jobs", type=int, default=1, help="jobs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controllers", nargs="+", choices=CONTROLLERS, default=CONTROLLERS)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    parser.add_argument("--before", type=json_file, help="show the medians of such a file too")
    numbers = range(len(FAULTS))
    parser.add_argument("--faults", type=int, nargs="+", choices=numbers, default=numbers)
    return parser.parse_args()


def json_file(path: str) -> list[dict[str, Any]]:
    """Return the times of an earlier campaign. Raises ArgumentTypeError for another file."""
    try:
        times: list[dict[str, Any]] = json.loads(Path(path).read_text())
        medians_of(times)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: not what --json wrote: {error}") from error
    return times


def _find_image(faults: Sequence[str]) -> str:
    """Return the image of this checkout, empty if no fault needs it. Raises PreflightError."""
    if not set(faults) & set(containers.FAULTS):
        return ""
    engine = Engine("hvdtrain", ROOT / "docker" / "compose.yaml")
    engine.check()
    return ensure_image(engine, ROOT)


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = [FAULTS[number] for number in arguments.faults]
    kinds = kinds_of(arguments.controllers, faults)
    found: list[Row] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            campaign = Campaign(Path(folder), _find_image(faults), arguments.seed)
            with closing(campaign.run(kinds, arguments.repeat, arguments.jobs)) as rows:
                for row in rows:
                    found.append(row)
                    minutes = (time.monotonic() - began_s) / 60
                    progress = f"{len(found)}/{len(kinds) * arguments.repeat}"
                    print(f"{_lines(row)}\n({progress} after {minutes:.0f} min)", flush=True)
                    if row.problem:
                        print(row.problem, flush=True)
                    if len(found) % len(kinds) == 0 and len(found) < len(kinds) * arguments.repeat:
                        print_table(found)
        except HvdtrainError as error:
            print(f"recovery: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            print("recovery: interrupted", file=sys.stderr)
            return 130
        finally:
            print_table(found)
            print_parts(times_of(found), arguments.before or [])
            if arguments.json:
                arguments.json.write_text(json.dumps(times_of(found), indent=1) + "\n")
    return 1 if any(row.problem for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
