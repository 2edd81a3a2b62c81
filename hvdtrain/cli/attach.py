"""`hvdtrain attach JOB`: show the output of a job in the background until it ends."""

import signal
from typing import Any

from hvdtrain.cli.flags import Command
from hvdtrain.cli.jobs import JOB
from hvdtrain.errors import EXIT_FAILED, refuse
from hvdtrain.launcher.background import find_job, follow, newest
from hvdtrain.log import complain
from hvdtrain.topology import Topology


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Show the job and return its exit code, or that of Ctrl-C. Raises UsageError."""
    refuse(problems)
    job = find_job(arguments["job"])
    try:
        follow(job.output, job.begin, lambda: job.runs)
    except KeyboardInterrupt:
        complain(f"hvdtrain attach: {job.name} goes on; hvdtrain stop {job.name} ends it")
        return 128 + signal.SIGINT
    job = newest(job)
    if job.exit_code is None:
        complain(f"hvdtrain attach: {job.name}: {job.describe()}")
        return EXIT_FAILED
    return job.exit_code


COMMAND = Command(
    "show the output of a job in the background until it ends",
    "Show the output of a job of `hvdtrain launch --detach` from its start until it ends, and end "
    "with its exit code. Ctrl-C leaves the job running.",
    (JOB,),
    run,
)
