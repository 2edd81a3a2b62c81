"""`hvdtrain verify-resume -- train ...`: a check that a configuration resumes exactly."""

from typing import Any

from hvdtrain.cli.flags import TRIAL_FLAGS, Command, Flag, read_training, train_flag, wrong_flags
from hvdtrain.config.fields import POSITIVE
from hvdtrain.errors import refuse
from hvdtrain.topology import Topology

FLAGS = (
    Flag("-np", "run N workers (default: 1)", int, 1, "N", check=POSITIVE),
    Flag("--cuts", "interrupt so many times (default: 6)", int, 6, check=POSITIVE),
    train_flag("seed", "seed the random moments"),
    *TRIAL_FLAGS,
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Verify and return the exit code. Raises UsageError."""
    problems += wrong_flags(FLAGS, arguments)
    training, _ = read_training(arguments, problems, "verify-resume", "[-np N] [--cuts K]")
    refuse(problems)
    from hvdtrain.evidence.verify_resume import verify_resume

    return verify_resume(
        training,
        workers=arguments["np"],
        cuts=arguments["cuts"],
        seed=arguments["seed"],
    )


COMMAND = Command(
    "verify that a configuration resumes exactly: -- train ...",
    "Train once without and once with interruptions, and compare the parameters.",
    FLAGS,
    run,
)
