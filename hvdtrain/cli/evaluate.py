"""`hvdtrain evaluate`: exact metrics of a checkpoint, on one device, without Horovod."""

from typing import Any

from hvdtrain.cli.flags import TRUST_CODE, Command, Flag, replacements
from hvdtrain.config.options import MAY_NAME_CODE
from hvdtrain.errors import refuse
from hvdtrain.topology import Topology

VALUES = (
    *MAY_NAME_CODE,
    *("data_dir", "image_size", "max_image_pixels", "valid_split", "workers", "device"),
    "skip_bad_samples",
)
FLAGS = (
    Flag("source", "evaluate this run or checkpoint", metavar="RUN_OR_CHECKPOINT"),
    *replacements(VALUES),
    TRUST_CODE,
    Flag("--json", "write all figures to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Evaluate and return the exit code. Raises UsageError."""
    refuse(problems)
    from hvdtrain.run.trained import evaluate

    return evaluate(arguments, VALUES)


COMMAND = Command(
    "compute exact metrics of a checkpoint, on one device",
    "Evaluate a run (its best checkpoint) or a checkpoint on its validation data.",
    FLAGS,
    run,
)
