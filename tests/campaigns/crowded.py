"""Audited training on three hosts with more workers than cores, repeated.

    python -m tests.campaigns.crowded [--repeat 10] [--workers 6 8] [--busy 0 2]
        [--controllers gloo mpi] [--starts launch horovodrun]

Requires root (hosts are made of namespaces; see tests/hosts). All hosts share the cores of this
machine; `--busy` adds processes that only compute. Prints a table. Exits with 1 unless every run
ended with 0, every audit agreed, and no process was left on any host.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.hosts.crowd import STARTS, busy_processes, crowded_command, slots_of, why_not_audited
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import CONTROLLERS

END_S = 300.0


def run_one(workers: int, busy: int, controller: str, start: str, place: Path) -> tuple[str, float]:
    """Return the problem of one run (empty: none), and its duration in seconds."""
    with Cluster(slots_of(workers), place / "hosts", visible=[place]) as cluster:
        command = crowded_command(cluster, controller, start, place / "runs")
        with busy_processes(busy):
            try:
                done = cluster.run(command, END_S)
            except AssertionError as error:
                return str(error), END_S
        problem = f"ended with {done.exit_code}" if done.exit_code else ""
        problem = problem or why_not_audited(place / "runs", workers)
        return problem and f"{problem}\n{done.output}", done.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[6, 8])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--starts", nargs="+", default=list(STARTS))
    asked = parser.parse_args()
    found: dict[tuple[int, int, str, str], list[tuple[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.repeat):
            for case in itertools.product(
                asked.workers, asked.busy, asked.controllers, asked.starts
            ):
                place = Path(folder) / str(number) / "-".join(map(str, case))
                place.mkdir(parents=True)
                problem, seconds = run_one(*case, place)
                found[case].append((problem, seconds))
                print(number, *case, f"{seconds:.0f} s", problem or "right", flush=True)
    print("workers  busy  controller  start       right of  seconds (longest)")
    for (workers, busy, controller, start), trials in found.items():
        right = sum(not problem for problem, _ in trials)
        times = [seconds for _, seconds in trials]
        print(
            f"{workers:7}  {busy:4}  {controller:10}  {start:10}  {right:4} {len(trials):3}"
            f"  {statistics.median(times):7.0f} ({max(times):.0f})"
        )
    return 1 if any(problem for trials in found.values() for problem, _ in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
