"""`hvdtrain`, or a script of one's own, on the device for tests.

`python -m tests.device.command train ...`, or `... script.py ...`. With FAKE_GPU_REPORT, a folder:
writes there, by rank, how many operations were started, and how often the host has waited.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.device.fake_gpu import let_train


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    compiled = let_train()
    if folder := os.environ.get("FAKE_GPU_REPORT"):
        rank = os.environ.get("HOROVOD_RANK", "0")
        atexit.register(_report, compiled, Path(folder) / f"rank-{rank}.json")
    if arguments[0].endswith(".py"):
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    from hvdtrain.cli import main as run

    sys.argv[:] = ["hvdtrain", *arguments]
    return run()


def _report(compiled: Any, path: Path) -> None:
    operations, waits = compiled.counts()
    path.write_text(json.dumps({"operations": operations, "waits": waits}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
