"""`hvdtrain predict`: the likeliest classes of images, on one device, without Horovod."""

from __future__ import annotations

import argparse
from typing import Any

from hvdtrain.cli.flags import add_trust_code, refuse_unknown
from hvdtrain.config.options import train_options
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology

HELP = "the likeliest classes of images, on one device"
DESCRIPTION = "Tell what a trained model takes images for."


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="files, or folders, with all below them"
    )
    parser.add_argument("--top", type=int, default=3, help="classes to tell (default: 3)")
    parser.add_argument("--model", help="as in train (default: as it was trained)")
    most = train_options()["max_image_pixels"]
    parser.add_argument("--max-image-pixels", type=most.type, help=most.help)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="images that cannot be read are no failure, as long as one can",
    )
    add_trust_code(parser)
    parser.add_argument("--json", metavar="FILE", help="write the scores of all classes")


def run(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    """Predict. Returns the exit code. Raises UsageError."""
    refuse_unknown(unknown, "predict")
    if arguments["top"] < 1:
        raise UsageError(f"--top={arguments['top']}: must be at least 1")
    from hvdtrain.run.trained import predict

    return predict(arguments)
