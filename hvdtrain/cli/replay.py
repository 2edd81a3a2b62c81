"""`hvdtrain replay RUN`: recorded steps, computed again on one process."""

from __future__ import annotations

import argparse
import re
from typing import Any

from hvdtrain.cli.flags import add_replacements, add_trust_code
from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

HELP = "compute recorded steps of a run again, on one process"
DESCRIPTION = """\
Check a run that was trained with --trace-every: its chain of records, its checkpoints and its data,
and the recorded steps, which are computed again from the nearest checkpoint, on one process.

With --virtual-workers, and of one worker, every bit must agree, whatever the number of workers was.

Exit code 17: a difference. The step, the share, the parameter are named, and whether the order of
the data, the data, a gradient, the reduction or the update differs.
"""
VALUES = ("data", "data_dir", "task", "model", "device", "workers")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="check this run")
    parser.add_argument("--steps", metavar="A-B", help="compute these (default: all recorded)")
    parser.add_argument(
        "--sample", metavar="K", type=int, help="compute so many recorded steps, chosen at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="choose them by this seed (default: 0)")
    add_replacements(parser, VALUES)
    add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write the steps and the difference to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Replay and return the exit code. Raises UsageError."""
    problems += json_problems(arguments["json"])
    first, last = _range(arguments["steps"], problems)
    sample = arguments["sample"]
    if sample is not None and sample < 1:
        problems.append(f"--sample={sample}: must be at least 1")
    if problems:
        raise UsageError(*problems)
    from hvdtrain.evidence.replay import StepChoice, replay

    return replay(arguments, VALUES, StepChoice(first, last, sample, arguments["seed"]))


def _range(text: str | None, problems: list[str]) -> tuple[int, int]:
    """Return the first and the last step of a range; all without one. Adds to `problems`."""
    if text is None:
        return 1, 2**62
    if re.fullmatch(r"[0-9]+(-[0-9]+)?", text):
        first, _, last = text.partition("-")
        if 1 <= int(first) <= int(last or first):
            return int(first), int(last or first)
    problems.append(f"--steps={text}: give one step, or the first and the last, such as 100-200")
    return 1, 2**62
