"""`hvdtrain diff RUN_A RUN_B`: the first difference between two runs."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.cli.flags import add_trust_code
from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

HELP = "find the first difference between two runs"
DESCRIPTION = """\
Compare two runs by their files: the options that decide what is learned, versions, hardware, data,
and the traces of runs that were trained with --trace-every: the first step that differs, and what
parted first there (order of the data, data, gradient, reduction, update). No code of a run is run.

With --bisect, steps around that step are computed again on one process, as in hvdtrain replay, to
name the very first step, and the first sample, or tensor of the forward and backward pass, that
differs; or the run whose trace is not what its replay gives.

Exit code 0: the same. 17: different.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN_A", help="compare this run")
    parser.add_argument("other", metavar="RUN_B", help="with this one")
    parser.add_argument(
        "--bisect", action="store_true", help="compute steps again, to name the first tensor"
    )
    add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write the differences to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Compare and return the exit code. Raises UsageError."""
    problems += json_problems(arguments["json"])
    if problems:
        raise UsageError(*problems)
    from hvdtrain.evidence.diff import diff

    return diff(arguments)
