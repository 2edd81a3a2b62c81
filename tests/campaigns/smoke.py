"""Short audited runs of each model on each kind of data, on 1 and 2 workers.

    python -m tests.campaigns.smoke [--sizes 1 2] [--controllers gloo mpi]

Exits with 1 unless every run finishes, the audit of every step agrees, and runs on several workers
end with the loss of one worker. (Batch norm is synchronised, so that the loss does not depend on
the number of workers.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

from tests.parallel.experiments import train
from tests.parallel.launching import CONTROLLERS
from tests.unit.folders import make_folder

MODELS = ("lenet", "mlp", "resnet18-small", "resnet18", "mobilenet_v3_small", "regnet_y_400mf")
DATA = ("digits", "synthetic:1x28x28,samples=64", "synthetic:3x32x32,samples=64", "png")
STEPS = ["--max-steps", "3", "--global-batch-size", "9", "--audit-every", "1", "--sync-bn"]
# In float32, batch norm over nine samples of 1x1 pixels amplifies rounding (6e-3 was observed).
STEPS += ["--dtype", "float64"]
SAME_LOSS = 1e-6


def run_all(sizes: list[int], controllers: list[str], folder: Path) -> int:
    """Run all combinations, and return the number of failures."""
    pictures = make_folder(folder / "pictures", 8, 3)
    failures = 0
    for model in MODELS:
        for data in DATA:
            source = f"imagefolder:{pictures}" if data == "png" else data
            flags = ["--model", model, "--data", source, "--lr", "0.001", *STEPS]
            flags += ["--image-size", "32", "-j", "1"] if data == "png" else []
            losses: list[float] = []
            for size in sizes:
                for controller in controllers if size > 1 else ["none"]:
                    place = folder / f"{len(list(folder.iterdir()))}"
                    finished = train(flags, place, size, controller)
                    problem = judge(place, finished.exit_code, losses)
                    failures += bool(problem)
                    print(f"{model:20} {data:30} N={size} {controller:4} {problem or 'right'}")
                    if problem:
                        print(finished.output)
    return failures


def judge(place: Path, exit_code: int, losses: list[float]) -> str:
    """Return the problem of a run (empty: none), and append its validation loss to `losses`."""
    if exit_code != 0:
        return f"ended with {exit_code}"
    summary = json.loads((place / "summary.json").read_text())
    losses.append(summary["valid_loss"])
    audit = summary["audit"]
    if audit["failed"] or (summary["world_size"] > 1 and audit["checked"] != 3):
        return f"audit: {audit}"
    if not math.isclose(losses[-1], losses[0], rel_tol=SAME_LOSS):
        return f"losses {losses}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--controllers", nargs="+", default=list(CONTROLLERS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failures = run_all(arguments.sizes, arguments.controllers, Path(folder))
    print(f"{failures} failures", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
