"""`hvdtrain logs JOB`: show what a job in the background, or one of its ranks, has printed."""

import signal
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Command, Flag, wrong_flags
from hvdtrain.cli.jobs import JOB
from hvdtrain.config.fields import at_least
from hvdtrain.errors import EXIT_OK, refuse
from hvdtrain.launcher.background import find_job, follow
from hvdtrain.topology import Topology

FLAGS = (
    JOB,
    Flag("-f --follow", "go on until the job ends", bool),
    Flag(
        "--rank",
        "show the log of this rank, with those of earlier jobs in the same folder",
        int,
        metavar="R",
        check=at_least(0),
    ),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Show the output and return the exit code. Raises UsageError."""
    refuse([*problems, *wrong_flags(FLAGS, arguments)])
    job, rank = find_job(arguments["job"]), arguments["rank"]
    path, begin = job.output, job.begin
    if rank is not None:
        path, begin = Path(job.logs, f"rank.{rank}.log"), 0
    try:
        follow(path, begin, lambda: arguments["follow"] and job.runs)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return EXIT_OK


COMMAND = Command(
    "show what a job in the background, or one of its ranks, has printed",
    "Show what a job of `hvdtrain launch --detach` has printed so far; the logs of its ranks hold "
    "every byte that they printed.",
    FLAGS,
    run,
)
