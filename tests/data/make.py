"""`python -m tests.data.make`: train the small run of the version that is installed, and keep it.

Run it once for each release, when its version is set, on a clean checkout of it. It needs Horovod.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import hvdtrain
from tests.data.small import arithmetic

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Of a run's folder; the others are for viewers.
KEPT = ("config.yaml", "summary.json", "metrics.jsonl", "audit.jsonl", "trace.jsonl")
KEPT_FOLDER = "checkpoints"
ARITHMETIC = "arithmetic.sha256"  # see small.arithmetic
CODE = ("--model=tests.data.small:Net", "--data=tests.data.small:pictures")
STEPS, INTERVAL = 8, 4
FLAGS = (
    *CODE,
    *("--virtual-workers=2", "--global-batch-size=20", f"--max-steps={STEPS}", "--workers=0"),
    *(f"--checkpoint-interval={INTERVAL}", "--keep-checkpoints=9", "--trace-every=2"),
    *("--audit-every=4", "--log-interval=2", "--opt=adamw", "--lr=0.05", "--experiment=small"),
)


def main() -> None:
    """Train in an empty folder, and move what is kept of the run to the folder of the version."""
    target = HERE / hvdtrain.__version__
    if target.exists():
        raise SystemExit(f"{target} is there already: a release's run is made once")
    with tempfile.TemporaryDirectory() as folder:
        command = ["horovodrun", "-np", "2", "--gloo", "hvdtrain", "train", *FLAGS]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=environment, check=True)
        run = Path(folder, "runs", "small")
        without_origin(run / "summary.json")
        target.mkdir()
        for name in KEPT:
            shutil.copy(run / name, target)
        shutil.copytree(run / KEPT_FOLDER, target / KEPT_FOLDER, copy_function=shutil.copyfile)
        (target / ARITHMETIC).write_text(arithmetic() + "\n")


def without_origin(path: Path) -> None:
    """Remove from a summary what names the machine and the folder where the run was made."""
    summary = json.loads(path.read_text("utf-8"))
    summary |= {"hosts": {"host": "0-1"}, "git": None}
    path.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
