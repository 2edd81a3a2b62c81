"""Detection of 500 faults of the exchange by audits in ordinary training, without false alarms.

    python -m tests.campaigns.faults [--trials 600] [--sizes 2 3 4] [--controllers gloo mpi]

For each number of workers and controller one job trains LeNet, a ResNet and a small Transformer,
with SGD and AdamW, accumulation, fp16 compression, bf16 autocast and clipping, audited at every
step. At some steps a fault is injected between Horovod's reduction and the audit. If it leaves
ranks with different bits, or changes any element by more than two rounding bounds (rounding alone
may account for one), the audit must find it at that step and name its parameter. Exits with 1 if a
fault is missed, or if a step without a fault raises an alarm.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter

from tests.parallel.launching import BIN, CONTROLLERS, horovodrun


def run_job(
    size: int, controller: str, trials: int, honest_steps: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Run one job, and return its counts and its problems."""
    command = [str(BIN / "python"), "-m", "tests.campaigns.fault_trials", f"--trials={trials}"]
    command += [f"--honest-steps={honest_steps}", f"--seed={seed}"]
    finished = horovodrun(size, controller, command, timeout_s=1500)
    tally = re.search(r"TALLY (\{.*\})", finished.output)
    problems = re.findall(r"PROBLEM (.*)", finished.output)
    if tally is None:
        problems.append(f"the job aborted:\n{finished.output}")
    return Counter(json.loads(tally.group(1)) if tally else {}), problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=600, help="over all jobs")
    parser.add_argument("--honest-steps", type=int, default=30, help="per job and workload")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jobs = [(size, name) for size in arguments.sizes for name in arguments.controllers]
    total: Counter[str] = Counter()
    failures = 0
    for number, (size, controller) in enumerate(jobs):
        tally, problems = run_job(
            size,
            controller,
            trials=-(-arguments.trials // len(jobs)),
            honest_steps=arguments.honest_steps,
            seed=arguments.seed + number,
        )
        for problem in problems:
            print(f"  {problem}", flush=True)
        found, wanted = tally["faults found"], tally["faults to be found"]
        print(
            f"N={size} {controller:4}  {found} of {wanted} faults found, "
            f"{tally['audited parameter-steps']} honest parameter-steps, "
            f"{len(problems)} problems",
            flush=True,
        )
        failures += len(problems)
        total += tally
    for name, count in sorted(total.items()):
        print(f"{count:8} {name}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
