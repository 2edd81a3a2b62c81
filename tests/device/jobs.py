"""The jobs of the checks on the device: of one process, of two workers, and what compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.device.running import DEVICES
from tests.device.together import EXPERIMENTS
from tests.parallel.launching import BIN

MODULE = [sys.executable, "-W", "error::UserWarning", "-m"]


class Job(NamedTuple):
    """A command, and whether two workers run it."""

    command: list[str]
    is_parallel: bool = False

    @property
    def started(self) -> list[str]:
        """Return the command with what starts its workers."""
        launcher = [str(BIN / "horovodrun"), "-np", "2", "--gloo"] if self.is_parallel else []
        return [*launcher, *self.command]


def jobs(folder: Path, first: bool = False) -> Iterator[Job]:
    """Yield all jobs in order; `first`: end a job at its first error."""
    option = ["--first"] if first else []
    yield Job([*MODULE, "tests.device.alone", str(folder), *option])
    two = folder / "two"
    two.mkdir()
    (two / "experiments.json").write_text(json.dumps(EXPERIMENTS))
    yield Job([*MODULE, "tests.device.together", str(two)], is_parallel=True)
    script = str(Path(__file__).with_name("own_loop.py"))
    for device in DEVICES:
        own = [script, device, f"loop-{device}", str(two)]
        yield Job([*MODULE, "tests.device.command", *own], is_parallel=True)
    yield Job([*MODULE, "tests.device.alone", str(folder), "two_workers"])


def problem_of(name: str, folder: Path, messages: Mapping[str, str]) -> str | None:
    """Return what is wrong with how an experiment of two workers ended, on any rank."""
    for rank in range(2):
        path = folder / "two" / f"{name}.rank-{rank}"
        found = path.read_text() if path.exists() else "was not reached"
        expected = messages.get(name)
        if found if expected is None else expected not in found:
            return f"rank {rank}: {found or 'no error'}"
    return None
