"""`hvdtrain verify-resume -- train ...`: a check that a configuration resumes exactly."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.cli.flags import add_trial_flags, read_training
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology

HELP = "verify that a configuration resumes exactly: -- train ..."
DESCRIPTION = "Train once without and once with interruptions, and compare the parameters."


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-np", type=int, default=1, metavar="N", help="run N workers (default: 1)")
    parser.add_argument("--cuts", type=int, default=6, help="interrupt so many times (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed the random moments (default: 0)")
    add_trial_flags(parser)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Verify and return the exit code. Raises UsageError."""
    if arguments["np"] < 1 or arguments["cuts"] < 1:
        problems.append(f"-np={arguments['np']}, --cuts={arguments['cuts']}: must be above 0")
    training, _ = read_training(arguments, problems, "verify-resume", "[-np N] [--cuts K]")
    if problems:
        raise UsageError(*problems)
    from hvdtrain.evidence.verify_resume import verify_resume

    return verify_resume(
        training,
        workers=arguments["np"],
        cuts=arguments["cuts"],
        seed=arguments["seed"],
    )
