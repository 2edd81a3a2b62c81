"""`hvdtrain verify-n -np 1,2,3 -- train ...`: a check that every N learns the same."""

from typing import Any

from hvdtrain.cli.flags import TRIAL_FLAGS, Command, Flag, read_training
from hvdtrain.config.fields import whole_number
from hvdtrain.errors import refuse
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

FLAGS = (
    Flag("-np", "run on these numbers of workers, such as 1,2,3", metavar="A,B"),
    Flag("--json", "write runs, difference and causes to FILE", metavar="FILE"),
    *TRIAL_FLAGS,
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Verify and return the exit code. Raises UsageError."""
    counts = _counts(arguments["np"], problems)
    problems += json_problems(arguments["json"])
    training, config = read_training(arguments, problems, "verify-n", "-np 1,2,3")
    from hvdtrain.evidence.verify_n.certificate import unfit_for_every_n, verify_n

    if config is not None:
        problems += unfit_for_every_n(config, counts)
    refuse(problems)
    return verify_n(training, config, counts, arguments["json"])


def _counts(text: str | None, problems: list[str]) -> tuple[int, ...]:
    """Return the numbers of workers, ascending; add to `problems` unless there are two or more."""
    parts = [] if text is None else text.split(",")
    wrong = [part for part in parts if not whole_number(part)]
    problems += [f"-np={text}: {part!r} is not a number of workers, 1 or more" for part in wrong]
    counts = {whole_number(part) for part in parts if part not in wrong}
    if len(counts) < 2:
        problems.append("-np: give two or more different numbers of workers, such as -np 1,2,3")
    return tuple(sorted(counts))


COMMAND = Command(
    "verify that a configuration learns the same on every N: -- train ...",
    """\
Train once on each number of workers, in float64, and compare the final parameters: every tensor
must agree to 1e-9 of its largest magnitude. With --virtual-workers nothing is changed, and the
parameters must be the same bit for bit.

Exit code 17: they differ. The first step and the parameter are named, and the likely cause, found
by experiment on that step's batch.
""",
    FLAGS,
    run,
)
