"""`hvdtrain stop JOB`: let a job in the background save and end."""

from typing import Any

from hvdtrain.cli.flags import Command
from hvdtrain.cli.jobs import JOB
from hvdtrain.errors import EXIT_FAILED, EXIT_OK, refuse
from hvdtrain.launcher.background import find_job, stop
from hvdtrain.launcher.verdict import is_of_stop
from hvdtrain.log import say
from hvdtrain.topology import Topology


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Stop the job and return the exit code: 1 if it did not end well. Raises UsageError."""
    refuse(problems)
    job = find_job(arguments["job"])
    if not job.runs:
        say(f"{job.name} does not run: {job.describe()}")
        return EXIT_OK
    say(f"{job.name} is asked to save and end (a second hvdtrain stop ends it at once)")
    job = stop(job)
    say(f"{job.name}: {job.describe()}")
    return EXIT_OK if job.exit_code == EXIT_OK or is_of_stop(job.exit_code) else EXIT_FAILED


COMMAND = Command(
    "let a job in the background save and end",
    "Let all workers of a job of `hvdtrain launch --detach` save and end, as SIGTERM to `launch` "
    "does, and wait until they have. Exit code 1: the job failed. Ctrl-C only ends the waiting.",
    (JOB,),
    run,
)
