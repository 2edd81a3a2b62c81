"""Comparison of runs killed and stopped at random moments with undisturbed ones.

    python -m tests.campaigns.kills [--cuts 40] [--sizes 1 2 3] [--controllers gloo mpi] [--seed 0]

Runs `hvdtrain verify-resume` for each number of workers and controller. Its cuts are SIGKILL and
SIGTERM in turn, three in four of them after a checkpoint. Each cut is printed with the step that
the run was resumed from. Exits with 1 if a run ended with other parameters than the undisturbed
one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.parallel.launching import CONTROLLERS, hvdtrain

FLAGS = ["--max-steps=200", "--global-batch-size=64", "--lr=0.1", "--checkpoint-interval=5"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failures = 0
    for size in arguments.sizes:
        # A single process has no controller.
        for controller in arguments.controllers if size > 1 else arguments.controllers[:1]:
            command = hvdtrain("verify-resume", f"-np={size}", f"--controller={controller}")
            command += [f"--cuts={arguments.cuts}", f"--seed={arguments.seed}", "--", "train"]
            print(f"N={size} {controller}", flush=True)
            failures += subprocess.run([*command, *FLAGS], check=False).returncode != 0
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
