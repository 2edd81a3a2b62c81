"""Runs a script with a loop of its own, and kills one worker of each start in the middle of a step.

killed_loop.py SCRIPT STEPS: by start (0, 1, ...), the step at which it is killed
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from hvdtrain.pulse import RESTART
from hvdtrain.topology import Topology
from hvdtrain.train.step import Step

path, steps = sys.argv[1], [int(text) for text in sys.argv[2].split(",")]
start, topology = int(os.environ[RESTART]), Topology.from_environment()


def update(step: Step, honest: Any = Step.update) -> None:
    """Make the update, unless it is the step and the rank to kill."""
    last = start < len(steps) and step.number >= steps[start]
    if last and topology.rank == start % topology.size:
        os.kill(os.getpid(), signal.SIGKILL)
    honest(step)


Step.update = update  # type: ignore[method-assign]
sys.argv[:] = [path]
runpy.run_path(path, run_name="__main__")
