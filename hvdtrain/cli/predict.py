"""`hvdtrain predict`: the most likely classes of images, on one device, without Horovod."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.cli.flags import add_trust_code
from hvdtrain.config.options import train_options
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology

HELP = "predict the classes of images, on one device"
DESCRIPTION = "Print the most likely classes of images, by a trained model."


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="use this trained model")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="classify files, or all files below folders"
    )
    parser.add_argument("--top", type=int, default=3, help="print this many classes (default: 3)")
    parser.add_argument("--model", help="replace the model used in training, as in train")
    most = train_options()["max_image_pixels"]
    parser.add_argument("--max-image-pixels", type=most.type, help=most.help)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="compute on this device")
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="skip images that cannot be read; fail only if there is no other",
    )
    add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write the scores of all classes to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Predict and return the exit code. Raises UsageError."""
    if problems:
        raise UsageError(*problems)
    if arguments["top"] < 1:
        raise UsageError(f"--top={arguments['top']}: must be at least 1")
    from hvdtrain.run.trained import predict

    return predict(arguments)
