"""`hvdtrain evaluate`: exact metrics of a checkpoint, on one device, without Horovod."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.cli.flags import add_replacements, add_trust_code
from hvdtrain.config.options import MAY_NAME_CODE
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology

HELP = "compute exact metrics of a checkpoint, on one device"
DESCRIPTION = "Evaluate a run (its best checkpoint) or a checkpoint on its validation data."
VALUES = (
    *MAY_NAME_CODE,
    *("data_dir", "image_size", "max_image_pixels", "valid_split", "workers", "device"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `train` that may differ from training."""
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", help="evaluate this run or checkpoint"
    )
    add_replacements(parser, VALUES)
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        default=None,
        help="skip and count images that cannot be read (default: as in training)",
    )
    add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Evaluate and return the exit code. Raises UsageError."""
    if problems:
        raise UsageError(*problems)
    from hvdtrain.run.trained import evaluate

    return evaluate(arguments, (*VALUES, "skip_bad_samples"))
