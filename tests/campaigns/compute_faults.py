"""Wrong backward passes are found by `--audit-compute`, and honest ones raise no alarm.

    python -m tests.campaigns.compute_faults [--faults 300] [--checks 5000]

For each number of workers and controller, one start runs many experiments: LeNet, ResNet and
Transformer, with dropout, bf16 autocast, accumulation and virtual workers. In most of them one bit
of an activation's gradient is wrong on one rank, once or always. The audit must find it at the
first step where it computes a share of that rank, or with that rank; it must name the rank, with
three ranks or more always, with two if the fault repeats; and report whether it repeats. (With two
ranks and bf16 it may also name none, as then a fault can be smaller than the rounding of bf16.) All
other experiments check each step, without an alarm. Exits with 1 if anything is missed or wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import tempfile
from pathlib import Path

from tests.parallel.launching import BIN, CONTROLLERS, horovodrun

PLUGINS = "tests.parallel.plugins"
WORKLOADS = {
    "lenet": ["--model=lenet", "--global-batch-size=60"],
    "lenet-dropout": [f"--model={PLUGINS}:lenet_with_dropout", "--global-batch-size=60"]
    + ["--grad-accum-steps=2", "--virtual-workers=6"],
    "lenet-bf16": ["--model=lenet", "--global-batch-size=50", "--amp=bf16"],
    "resnet": [f"--model={PLUGINS}:resnet_with_dropout", "--global-batch-size=24"],
    "transformer": ["--task=examples.language_model:WithDropout", "--global-batch-size=20"]
    + ["--opt=adamw", "--lr=0.003"],
    "transformer-bf16": ["--task=examples.language_model:WithDropout", "--global-batch-size=20"]
    + ["--opt=adamw", "--lr=0.003", "--amp=bf16", "--virtual-workers=5"],
}
# Of all honest checks; a step of ResNet takes the longest.
PARTS = {"lenet": 8, "lenet-dropout": 4, "lenet-bf16": 2, "resnet": 1, "transformer": 3}
PARTS["transformer-bf16"] = 2
LAYERS = 3  # from the last one
LOWEST_BIT = 22  # places below the highest of the exponent: a change of 2^-14
CHECKED = ["--audit-compute=1", "--hash-every=0"]


def faults_of(size: int, number: int, dice: random.Random) -> dict[str, dict[str, object]]:
    """Return faults by the name of their experiment."""
    found: dict[str, dict[str, object]] = {}
    for place in range(number):
        workload = list(WORKLOADS)[place % len(WORKLOADS)]
        found[f"{workload}.{place}"] = {
            "rank": dice.randrange(size),
            "when": dice.choice(["always", "owner", "checker"]),
            "layer": dice.randrange(LAYERS),
            "bits_down": dice.randrange(LOWEST_BIT + 1),
        }
    return found


def run_start(size: int, controller: str, faults: int, checks: int, seed: int) -> list[str]:
    """Run the experiments of one start, print the result, and return the problems."""
    dice = random.Random(f"{seed} {size} {controller}")
    with tempfile.TemporaryDirectory() as name:
        folder, injected = Path(name), faults_of(size, faults, dice)
        steps = {it: -(-checks * part // sum(PARTS.values())) for it, part in PARTS.items()}
        honest = {
            f"honest-{it}": [*WORKLOADS[it], f"--max-steps={steps[it]}", *CHECKED] for it in PARTS
        }
        wrong = {
            it: [*WORKLOADS[it.partition(".")[0]], "--max-steps=60", *CHECKED] for it in injected
        }
        (folder / "faults.json").write_text(json.dumps(injected))
        (folder / "experiments.json").write_text(json.dumps(honest | wrong))
        command = [str(BIN / "python"), "-m", "tests.campaigns.compute_trials", str(folder)]
        finished = horovodrun(size, controller, command, timeout_s=3000)
        try:
            problems = [text for it in honest if (text := honest_problem(folder, it))]
            problems += [
                f"{it} {injected[it]}: {text}"
                for it in injected
                if (text := fault_problem(folder, it, injected[it], size))
            ]
            named = sum("is wrong: " in (folder / f"{it}.rank-0").read_text() for it in injected)
            done = sum(checks_of(folder, it) for it in honest)
        except FileNotFoundError as error:
            return [f"the job aborted: {error}\n{finished.output[-3000:]}"]
    print(
        f"N={size} {controller:4}  {faults} faults, of {named} the rank was named; {done} honest "
        f"checks; {len(problems)} problems",
        flush=True,
    )
    return problems


def checks_of(folder: Path, name: str) -> int:
    found: int = json.loads((folder / name / "summary.json").read_text())["compute_audit"][
        "checked"
    ]
    return found


def honest_problem(folder: Path, name: str) -> str | None:
    error = (folder / f"{name}.rank-0").read_text()
    return f"{name}: {error}" if error else None


def fault_problem(folder: Path, name: str, fault: dict[str, object], size: int) -> str | None:
    """Return how the verdict on a fault is wrong, if it is."""
    error = (folder / f"{name}.rank-0").read_text()
    expected = folder / f"{name}.expected"
    if not expected.exists():
        return "never injected"
    if not error.startswith(f"exit code 17: at step {expected.read_text()} ranks "):
        return f"not found at step {expected.read_text()}: {error or 'no error'}"
    wrong = re.search(r"Rank (\d+) on \S+ is wrong", error)
    repeats = fault["when"] == "always"
    if wrong is None:
        is_large = repeats and "bf16" not in name
        return f"no rank is named: {error}" if size > 2 or is_large else None
    if int(wrong[1]) != fault["rank"]:
        return f"the wrong rank is named: {error}"
    kind = "repeatable" if repeats else "transient"
    return None if f"the fault is {kind}" in error else f"is not called {kind}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300, help="over all starts")
    parser.add_argument("--checks", type=int, default=5000, help="without faults, over all starts")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    starts = list(itertools.product(arguments.sizes, arguments.controllers))
    failures = 0
    for size, controller in starts:
        each = (-(-number // len(starts)) for number in (arguments.faults, arguments.checks))
        for problem in run_start(size, controller, *each, seed=arguments.seed):
            print(f"  {problem}", flush=True)
            failures += 1
    print(f"{failures} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
