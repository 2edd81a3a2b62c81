"""Comparison of the bits that virtual workers end with on any number of workers.

    python -m tests.campaigns.same_bits [--every 1] [--sizes 1 2 ...] [--schedules 20] [--seed 0]

Grid: each experiment (models with dropout and batch norm; optimizers; accumulation; batches with
short last ones; V = 4, 5 and 8) on N = 1 to V workers, over both controllers by horovodrun, over
`launch`, and over `launch` on three hosts (as root; see tests/hosts). Experiments on the same
workers share one start. `--every 3` takes every third experiment.

Schedules: one run that is killed and stopped at random moments, and goes on each time on another
number of workers and controller.

Exits with 1 unless all runs of an experiment end with one hash, and all audits succeed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.evidence.trials import Training
from hvdtrain.evidence.verify_resume import InterruptedTrial
from tests.hosts.namespaces import Cluster
from tests.parallel.launching import CONTROLLERS, hvdtrain, run

PLUGINS = "tests.parallel.plugins"
SMALL = "--data=synthetic:1x8x8,samples=250"
MODELS = {
    "lenet": [f"--model={PLUGINS}:lenet_with_dropout", SMALL],
    "resnet": [f"--model={PLUGINS}:resnet18_with_dropout", SMALL],
    "batch norm": [f"--model={PLUGINS}:dropout_everywhere", SMALL],
    "transformer": ["--task=examples.language_model:WithDropout"],
}
OPTIMIZERS = {"sgd": ["--lr=0.05", "--weight-decay=1e-3"], "adamw": ["--opt=adamw", "--lr=0.003"]}
BATCHES = (96, 100, 101)  # 250 samples: the last batches hold 58, 50 and 48
STEPS = {"resnet": 4}  # of others: 7
COMMON = ["--seed=7", "--audit-every=2", "--audit=exact", "--log-interval=100"]
SHARED = "from tests.parallel.shared import main; main()"
END_S = 1200.0
LONG = [*MODELS["batch norm"], "--global-batch-size=101", "--max-steps=400", "--opt=adamw"]
LONG += ["--lr=0.003", "--checkpoint-interval=5", "--eval-interval=20", "--virtual-workers=5"]
ALONE = Training(LONG, "gloo")


def experiments() -> Iterator[tuple[str, int, list[str]]]:
    """Yield the name, the number of virtual workers and the flags of each experiment."""
    settings = (tuple(OPTIMIZERS), (1, 3), BATCHES, (4, 5, 8))
    kinds = itertools.product(MODELS, itertools.product(*map(enumerate, settings)))
    for model, chosen in kinds:
        places, (optimizer, accumulation, batch, virtual) = zip(*chosen, strict=True)
        if model == "resnet" and sum(places) % 3:
            continue  # the slowest: a third, with each pair of settings
        if model == "resnet" and accumulation == 3 and virtual == 8:
            continue  # of 48 samples, three times 16 in 8 shares; some would be of one sample
        flags = [*MODELS[model], *OPTIMIZERS[optimizer], f"--grad-accum-steps={accumulation}"]
        flags += [f"--global-batch-size={batch}", f"--virtual-workers={virtual}"]
        flags += [f"--max-steps={STEPS.get(model, 7)}", *COMMON]
        yield f"{model} {optimizer} x{accumulation} {batch} V{virtual}", virtual, flags


def starts(sizes: list[int]) -> Iterator[tuple[int, str]]:
    """Yield each number of workers with each way to start them."""
    for size in sizes:
        yield from [(size, how) for how in ("alone",) if size == 1]
        yield from [(size, controller) for controller in CONTROLLERS if size > 1]
    yield from [(size, "launch") for size in (1, 3) if size in sizes]
    yield from [(size, "three hosts") for size in (4,) if size in sizes]


def run_start(size: int, how: str, folder: Path) -> str:
    """Run the experiments of FOLDER/experiments.json; return the output if the job failed."""
    worker = [sys.executable, "-c", SHARED, str(folder)]
    launch = hvdtrain("launch", f"--log-dir={folder / 'logs'}", "--controller=gloo")
    commands = {
        "alone": worker,
        "launch": [*launch, f"-np={size}", "--", *worker],
        **{it: [*hvdtrain_run(size, it), *worker] for it in CONTROLLERS},
    }
    if how == "three hosts":
        with Cluster([1, 2, 1], folder / "hosts", visible=[folder]) as cluster:
            command = [*launch, f"--hostfile={cluster.hostfile}", "--", *worker]
            done = cluster.run(command, END_S)
    else:
        done = run(commands[how], END_S)
    return done.output if done.exit_code else ""


def hvdtrain_run(size: int, controller: str) -> list[str]:
    """Return the beginning of a command of horovodrun."""
    return Training([], controller).argv(size, {})[:4]


def run_grid(every: int, sizes: list[int], folder: Path) -> int:
    """Run the grid and return the number of problems."""
    chosen = list(experiments())[::every]
    hashes: dict[str, dict[str, str]] = {name: {} for name, _, _ in chosen}
    problems, runs = 0, 0
    for size, how in starts(sizes):
        own = {name: flags for name, virtual, flags in chosen if size <= virtual}
        if not own:
            continue
        place, began_s = folder / f"{size} {how}".replace(" ", "-"), time.monotonic()
        place.mkdir()
        (place / "experiments.json").write_text(json.dumps(own))
        output = run_start(size, how, place)
        if output:
            problems += 1
            print(f"FAILED {size} {how}\n{output}", flush=True)
        for name in own:
            found = summary_of(place / name)
            if found.get("status") != "finished" or found["audit"]["failed"]:
                problems += 1
                error = place / f"{name}.rank-0"
                print(f"FAILED {name} on {size} {how}", error.exists() and error.read_text())
                continue
            runs += 1
            hashes[name][f"{size} {how}"] = found["params_sha256"]
        seconds = time.monotonic() - began_s
        print(f"N={size} {how}: {len(own)} experiments, {seconds:.0f} s", flush=True)
    for name, of_starts in hashes.items():
        if len(set(of_starts.values())) > 1:
            problems += 1
            print(f"DIFFERENT {name}: {of_starts}")
    print(f"{runs} runs of {len(chosen)} experiments, {problems} problems", flush=True)
    return problems


def summary_of(folder: Path) -> dict:
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_schedule(number: int, seed: int, expected: str, folder: Path) -> int:
    """Run one schedule; return whether it ended otherwise than the undisturbed run."""
    dice = random.Random(f"{seed} {number}")

    def chosen() -> tuple[Training, int]:
        size = dice.randint(1, 5)
        return Training(LONG, dice.choice(CONTROLLERS)), size

    trial, cuts = InterruptedTrial(*chosen(), folder, f"schedule-{number}"), 0
    while trial.cut(dice.choice((signal.SIGKILL, signal.SIGTERM)), dice, dice.random() < 0.75):
        cuts += 1
        trial.start(*(chosen() if cuts < 6 else (ALONE, 1)))
        if cuts == 6:
            break
    trial.wait_for_success()
    found = trial.summary()["params_sha256"]
    print(f"schedule {number}: {cuts} cuts, {'ok' if found == expected else found}", flush=True)
    return found != expected


def run_schedules(count: int, seed: int, folder: Path) -> int:
    """Run the schedules and return the number of problems."""
    undisturbed = InterruptedTrial(ALONE, 1, folder, "undisturbed")
    undisturbed.wait_for_success()
    expected = undisturbed.summary()["params_sha256"]
    problems = sum(run_schedule(number, seed, expected, folder) for number in range(count))
    print(f"{count} schedules, {problems} problems", flush=True)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=list(range(1, 9)))
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-same-bits-") as scratch:
        problems = run_grid(arguments.every, arguments.sizes, Path(scratch))
        problems += run_schedules(arguments.schedules, arguments.seed, Path(scratch))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
