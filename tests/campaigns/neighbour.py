"""Runs beside a program that comes and goes on one core: equal shares, and shares that follow.

    python -m tests.campaigns.neighbour [--rounds 5] [--steps 600] [--busy-s 20] [--idle-s 5]
        [--programs 1] [--controllers gloo mpi] [--virtual-workers 12] [--samples 240]
        [--model lenet]

Two workers have a core each. On the core of the second, other programs compute for `--busy-s`
seconds, and then not for `--idle-s`, from before the start to the end of a run. Prints samples/s of
each run, in turns, and the moves. Exits with 1 if the median ratio is below 1.3, or a hash differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from hvdtrain.lab.disturbance import Disturbance
from hvdtrain.models import build_model
from hvdtrain.topology import Topology
from tests.hosts.crowd import busy_processes
from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import CONTROLLERS

GOAL = 1.3
MODEL = "HVDTRAIN_TEST_MODEL"
WORKERS = 2
SHARES = {"equal": "--rank-weights=1,1", "following": "--rank-weights=auto"}

# Computes on one core, for some seconds and then not for others; ends with its parent.
PROGRAM = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
busy_s, period_s, parent = float(sys.argv[2]), float(sys.argv[3]), os.getppid()
began_s = time.monotonic()
while os.getppid() == parent:
    into_s = (time.monotonic() - began_s) % period_s
    if into_s < busy_s:
        sum(range(100_000))
    else:
        time.sleep(min(0.1, period_s - into_s))
"""


def pinned(shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    """Return the model of the campaign; this worker computes on a core of its own from now on."""
    os.sched_setaffinity(0, {core_of(Topology.from_environment().rank)})
    return build_model(os.environ[MODEL], shape, classes, torch.float32)


def core_of(rank: int) -> int:
    """Return the core of a worker: of this machine's first ones."""
    return sorted(os.sched_getaffinity(os.getppid()))[rank]


def run_one(kind: str, controller: str, asked: argparse.Namespace, folder: Path) -> dict:
    """Return the summary of a run with shares of a kind."""
    flags = ["--model=tests.campaigns.neighbour:pinned", f"--max-steps={asked.steps}"]
    flags += [f"--data=synthetic:1x28x28,samples={20 * asked.samples}", "--lr=0.01"]
    flags += [f"--global-batch-size={asked.samples}", f"--eval-interval={asked.steps}"]
    flags += [f"--virtual-workers={asked.virtual_workers}", SHARES[kind]]
    at_times = map(str, (core_of(WORKERS - 1), asked.busy_s, asked.busy_s + asked.idle_s))
    with busy_processes(asked.programs, PROGRAM, *at_times):
        variables = {MODEL: asked.model}
        done = train(flags, folder, WORKERS, controller, timeout_s=3600, variables=variables)
    assert done.exit_code == 0, done.output
    summary, _ = summary_and_weights(folder)
    print(f"{controller:4}  {kind:9}  {summary['samples_per_s']:,.0f} samples/s", flush=True)
    for line in done.output.splitlines():
        if "virtual workers move" in line or "rank weights" in line:
            print(f"      {line}", flush=True)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--busy-s", type=float, default=20)
    parser.add_argument("--idle-s", type=float, default=5)
    parser.add_argument("--programs", type=int, default=1)
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--virtual-workers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=240, help="of the global batch")
    parser.add_argument("--model", default="lenet")
    asked, disturbance = parser.parse_args(), Disturbance()
    ratios, hashes = [], set()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-neighbour-") as scratch:
        for number, controller in product(range(asked.rounds), asked.controllers):
            folder = Path(scratch) / f"{controller}-{number}"
            both = [
                run_one(kind, controller, asked, folder.with_suffix(f".{kind}")) for kind in SHARES
            ]
            hashes |= {summary["params_sha256"] for summary in both}
            equal, following = (summary["samples_per_s"] for summary in both)
            ratios.append(following / equal)
            print(f"{controller:4}  ratio {ratios[-1]:.2f}", flush=True)
    middle = statistics.median(ratios)
    print(f"ratio {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(hashes)} hashes")
    print(disturbance.line())
    return 0 if middle >= GOAL and len(hashes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
