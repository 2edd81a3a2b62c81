"""`hvdtrain jobs`: list the jobs that `hvdtrain launch --detach` has started."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Command, Flag
from hvdtrain.errors import EXIT_OK, refuse
from hvdtrain.files import json_problems, write_json
from hvdtrain.launcher.background import list_jobs
from hvdtrain.log import say
from hvdtrain.topology import Topology

JOB = Flag("job", "the name of a job, or how it begins", metavar="JOB")
FLAGS = (Flag("--json", "write the list to FILE", Path, metavar="FILE"),)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Print the list and return the exit code. Raises UsageError."""
    refuse([*problems, *json_problems(arguments["json"])])
    jobs = list_jobs()
    for job in jobs:
        say(f"{job.name}: {job.describe()}\n  {job.command}\n  logs: {job.logs}")
    if not jobs:
        say("no jobs: `hvdtrain launch --detach ...` starts one")
    write_json(arguments["json"], [{**asdict(job), "state": job.state} for job in jobs])
    return EXIT_OK


COMMAND = Command(
    "list the jobs in the background, running and ended",
    """\
List the jobs that you have started on this machine by `hvdtrain launch --detach`: name, state,
command and folder of logs. A job is lost if it was killed, or the machine was restarted.

`hvdtrain attach JOB` shows a job, `hvdtrain stop JOB` ends it.
""",
    FLAGS,
    run,
)
