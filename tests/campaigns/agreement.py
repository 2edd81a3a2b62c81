"""Comparison of the parameters that the same experiments end with on 1 to 4 workers.

    python -m tests.campaigns.agreement [--controllers gloo mpi] [--cases TEXT]

Prints one line per run, with max |difference| / max |w| to the run on one worker. Exits with 1 if
a float64 run differs by more than 1e-9, or a float32 run by more than 1e-5 after 10 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.parallel.experiments import largest_difference, summary_and_weights, train
from tests.parallel.launching import CONTROLLERS

FLOAT64_LIMIT = 1e-9  # the promise of the README
FLOAT32_LIMIT = 1e-5  # after 10 steps; later, rounding differences grow with the training
COMMON = ["--lr=0.05", "--weight-decay=1e-3", "--warmup-epochs=1", "--sched=cosine", "--seed=3"]
LONG = [*COMMON, "--dtype=float64", "--max-steps=120"]
RESNET = "--model=tests.parallel.plugins:small_resnet"
WEIGHTS = {2: "1,3", 3: "0,1,2", 4: "3,0,1,2"}

CASES = {
    f"{model} batch {batch} accumulation {accum}": (
        [*LONG, f"--model={model}", f"--global-batch-size={batch}", f"--grad-accum-steps={accum}"],
        FLOAT64_LIMIT,
    )
    for model in ("lenet", "mlp")
    for batch in (96, 100)
    for accum in (1, 2, 3)
}
CASES |= {
    "lenet rank weights, one of them 0": (
        [*LONG, "--global-batch-size=100", "--rank-weights"],
        FLOAT64_LIMIT,
    ),
    "lenet adamw, clipping, average of weights": (
        [*LONG, "--global-batch-size=100", "--opt=adamw", "--lr=0.002", "--clip-grad=0.5"]
        + ["--model-ema", "--model-ema-decay=0.95"],
        FLOAT64_LIMIT,
    ),
    "resnet sync-bn": (
        [*COMMON, "--dtype=float64", "--max-steps=20", "--global-batch-size=100", RESNET]
        + ["--sync-bn", "--rank-weights"],
        FLOAT64_LIMIT,
    ),
    "lenet float32, 10 steps": (
        [*COMMON, "--max-steps=10", "--global-batch-size=100"],
        FLOAT32_LIMIT,
    ),
    "mlp float32, 10 steps": (
        [*COMMON, "--max-steps=10", "--global-batch-size=100", "--model=mlp"],
        FLOAT32_LIMIT,
    ),
}


def flags_for(flags: list[str], size: int) -> list[str]:
    """Return the flags of a case, with unequal rank weights where it requires them."""
    if size not in WEIGHTS:
        return [flag for flag in flags if flag != "--rank-weights"]
    own = f"--rank-weights={WEIGHTS[size]}"
    return [own if flag == "--rank-weights" else flag for flag in flags]


def differences(name: str, size: int, controller: str, folder: Path) -> float:
    """Return the largest relative difference between `size` workers and one.

    The run on one worker is made once per folder.
    """
    flags, _ = CASES[name]
    alone, together = folder / "alone", folder / f"{size}-{controller}"
    for path, workers in ((alone, 1), (together, size)):
        if not path.exists():
            finished = train(flags_for(flags, workers), path, workers, controller)
            assert finished.exit_code == 0, finished.output
    (expected_summary, expected), (summary, weights) = map(summary_and_weights, (alone, together))
    assert summary["samples_seen"] == expected_summary["samples_seen"]
    return largest_difference(weights, expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-agreement-") as scratch:
        for number, name in enumerate(CASES):
            if arguments.cases not in name:
                continue
            for controller in arguments.controllers:
                for size in arguments.sizes:
                    off = differences(name, size, controller, Path(scratch) / str(number))
                    ok = off <= CASES[name][1]
                    failures += not ok
                    verdict = "ok" if ok else "FAIL"
                    print(f"{verdict:5} {off:9.2e}  N={size} {controller:4}  {name}", flush=True)
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
