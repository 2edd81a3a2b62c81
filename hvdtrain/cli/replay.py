"""`hvdtrain replay RUN`: recorded steps, computed again on one process."""

from typing import Any

from hvdtrain.cli.flags import TRUST_CODE, Command, Flag, replacements, train_flag, wrong_flags
from hvdtrain.config.fields import at_least, step_range
from hvdtrain.errors import UsageError
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

VALUES = ("data", "data_dir", "task", "model", "device", "workers")


ALL = (1, 2**62)  # steps
FLAGS = (
    Flag("source", "check this run", metavar="RUN"),
    Flag("--steps", "compute these (default: all recorded)", metavar="A-B"),
    Flag(
        "--sample",
        "compute so many recorded steps, chosen at random",
        int,
        metavar="K",
        check=at_least(1),
    ),
    train_flag("seed", "choose them by this seed"),
    *replacements(VALUES),
    TRUST_CODE,
    Flag("--json", "write the steps and the difference to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Replay and return the exit code. Raises UsageError."""
    problems += [*json_problems(arguments["json"]), *wrong_flags(FLAGS, arguments)]
    if arguments["seed"] and arguments["sample"] is None:
        problems.append(f"--seed={arguments['seed']}: has no effect without --sample: leave it out")
    text = arguments["steps"]
    steps = ALL if text is None else step_range(text if "-" in text else f"{text}-{text}")
    if steps is None:
        hint = "give one step, or the first and the last, such as 100-200"
        problems.append(f"--steps={text}: {hint}")
    if problems or steps is None:
        raise UsageError(*problems)
    from hvdtrain.evidence.replay import replay

    return replay(arguments, VALUES, range(steps[0], steps[1] + 1))


COMMAND = Command(
    "compute recorded steps of a run again, on one process",
    """\
Check a run that was trained with --trace-every: its chain of records, its checkpoints and its data,
and the recorded steps, which are computed again from the nearest checkpoint, on one process.

With --virtual-workers, and of one worker, every bit must agree, whatever the number of workers was.

Exit code 17: a difference. The step, the share, the parameter are named, and whether the order of
the data, the data, a gradient, the reduction or the update differs.
""",
    FLAGS,
    run,
)
