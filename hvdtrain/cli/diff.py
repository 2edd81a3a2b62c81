"""`hvdtrain diff RUN_A RUN_B`: the first difference between two runs."""

from typing import Any

from hvdtrain.cli.flags import TRUST_CODE, Command, Flag
from hvdtrain.errors import refuse
from hvdtrain.files import json_problems
from hvdtrain.topology import Topology

FLAGS = (
    Flag("one", "compare this run", metavar="RUN_A"),
    Flag("other", "with this one", metavar="RUN_B"),
    Flag("--bisect", "compute steps again, to name the first tensor", bool),
    TRUST_CODE,
    Flag("--json", "write the differences to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Compare and return the exit code. Raises UsageError."""
    refuse([*problems, *json_problems(arguments["json"])])
    from hvdtrain.evidence.diff import diff

    return diff(arguments)


COMMAND = Command(
    "find the first difference between two runs",
    """\
Compare two runs by their files: the options that decide what is learned, versions, hardware, data,
and the traces of runs that were trained with --trace-every: the first step that differs, and what
parted first there (order of the data, data, gradient, reduction, update). No code of a run is run.

With --bisect, steps around that step are computed again on one process, as in hvdtrain replay, to
name the very first step, and the first sample, or tensor of the forward and backward pass, that
differs; or the run whose trace is not what its replay gives.

Exit code 0: the same. 17: different.
""",
    FLAGS,
    run,
)
