"""Faults at random moments in jobs over three hosts: does every run end as if nothing had been?

    python -m tests.campaigns.recovery [--repeat 10] [--controllers gloo mpi] [--faults 0 1 ...]

Needs root (hosts are made of namespaces; see tests/hosts). Prints a table, and ends with exit code
1 unless each run ended with the undisturbed run's parameters, with no process left on any host.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tests.hosts.namespaces import Cluster
from tests.hosts.trials import FAULTS, SLOTS, Recovery, disturb, undisturbed
from tests.parallel.launching import CONTROLLERS

STEPS = 40
Row = tuple[str, Recovery, bool]  # controller, recovery, whether all was right


def run_all(
    faults: list[str], controllers: list[str], repeat: int, seed: int, folder: Path
) -> list[Row]:
    """One job a trial, with one fault."""
    dice = random.Random(seed)
    found: list[Row] = []
    for controller in controllers:
        with Cluster(SLOTS, folder / f"hosts-{controller}", visible=[folder]) as cluster:
            peace = undisturbed(cluster, controller, folder / f"{controller}-peace", STEPS)
            print(f"{controller}: undisturbed {peace['params_sha256']}", flush=True)
        for number in range(repeat):
            for fault in faults:
                place = folder / f"{controller}-{number}-{faults.index(fault)}"
                with Cluster(SLOTS, place / "hosts", visible=[folder]) as cluster:
                    ended = disturb(cluster, [fault], controller, place / "runs", STEPS, dice)
                names = ("params_sha256", "samples_seen", "steps", "world_size")
                right = all(ended.summary[name] == peace[name] for name in names)
                right = right and ended.left == 0
                found.append((controller, ended.recoveries[0], right))
                print(_line(found[-1]), flush=True)
                if not right:
                    print(ended.output, flush=True)
    return found


def _line(row: Row) -> str:
    controller, recovery, right = row
    return (
        f"{controller:4} {recovery.fault:25} detected {recovery.detected_s:5.1f} s  recovered "
        f"{recovery.recovered_s:5.1f} s  {'right' if right else 'WRONG'}"
    )


def print_table(found: list[Row]) -> None:
    """A row for each fault and controller. An equal hash means that no sample was lost, or seen
    twice.
    """
    print("fault                      controller  trials  detected after  recovered after  wrong")
    for fault in FAULTS:
        for controller in CONTROLLERS:
            rows = [row for row in found if (row[1].fault, row[0]) == (fault, controller)]
            if rows:
                detected = [recovery.detected_s for _, recovery, _ in rows]
                recovered = [recovery.recovered_s for _, recovery, _ in rows]
                wrong = sum(not right for _, _, right in rows)
                print(
                    f"{fault:26} {controller:10} {len(rows):7}  {_spread(detected):>14}  "
                    f"{_spread(recovered):>15}  {wrong:5}"
                )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f}) s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--faults", type=int, nargs="+", default=list(range(len(FAULTS))))
    arguments = parser.parse_args()
    faults = [list(FAULTS)[number] for number in arguments.faults]
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(
            faults, arguments.controllers, arguments.repeat, arguments.seed, Path(folder)
        )
    print_table(found)
    wrong = sum(not right for _, _, right in found)
    print(f"{len(found)} trials, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
