"""`hvdtrain export`: plain weights for any PyTorch script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology

HELP = "write plain weights that any PyTorch script loads"
DESCRIPTION = (
    "Write the weights of a run (its best checkpoint), of a checkpoint, or of a file saved from "
    "DataParallel, DistributedDataParallel or torch.compile, as plain safetensors, under the "
    "parameter names of the unwrapped model."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="read this run, checkpoint or weights file"
    )
    parser.add_argument("out", metavar="OUT.safetensors", help="write this file")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--keep-names", action="store_true", help="keep wrappers' prefixes")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Export and return the exit code. Raises UsageError."""
    if problems:
        raise UsageError(*problems)
    from hvdtrain.weights.export import export

    return export(
        Path(arguments["source"]),
        Path(arguments["out"]),
        force=arguments["force"],
        keep_names=arguments["keep_names"],
    )
