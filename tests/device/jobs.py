"""The jobs of the checks on the device: of one process, of two workers, and what compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.device.running import DEVICES
from tests.device.together import EXPERIMENTS
from tests.parallel.launching import BIN

MODULE = [sys.executable, "-W", "error::UserWarning", "-m"]


def alone(folder: Path, *names: str) -> list[str]:
    """Return the command of the checks of one process."""
    return [*MODULE, "tests.device.alone", str(folder), *names]


def of_two_workers(folder: Path) -> list[list[str]]:
    """Return the commands of two workers: the experiments, and a script with its own loop."""
    two = folder / "two"
    two.mkdir()
    (two / "experiments.json").write_text(json.dumps(EXPERIMENTS))
    script = str(Path(__file__).with_name("own_loop.py"))
    launcher = [str(BIN / "horovodrun"), "-np", "2", "--gloo", *MODULE]
    return [
        [*launcher, "tests.device.together", str(two)],
        [*launcher, "tests.device.command", script, str(two), "loop-", *DEVICES],
    ]


def problem_of(name: str, folder: Path, messages: Mapping[str, str]) -> str | None:
    """Return what is wrong with how an experiment of two workers ended, on any rank."""
    for rank in range(2):
        path = folder / "two" / f"{name}.rank-{rank}"
        found = path.read_text() if path.exists() else "was not reached"
        expected = messages.get(name)
        if found if expected is None else expected not in found:
            return f"rank {rank}: {found or 'no error'}"
    return None
