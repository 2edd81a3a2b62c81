"""`hvdtrain export`: plain weights for any PyTorch script."""

from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Command, Flag
from hvdtrain.errors import refuse
from hvdtrain.topology import Topology

FLAGS = (
    Flag("source", "read this run, checkpoint or weights file", metavar="SOURCE"),
    Flag("out", "write this file", metavar="OUT.safetensors"),
    Flag("--force", "replace OUT if it exists", bool),
    Flag("--keep-names", "keep wrappers' prefixes", bool),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Export and return the exit code. Raises UsageError."""
    refuse(problems)
    from hvdtrain.records.storage import local_copy
    from hvdtrain.weights.export import export

    with local_copy(arguments["source"]) as source:
        return export(
            Path(source),
            Path(arguments["out"]),
            force=arguments["force"],
            keep_names=arguments["keep_names"],
        )


COMMAND = Command(
    "write plain weights that any PyTorch script loads",
    "Write the weights of a run (its best checkpoint), of a checkpoint, or of a file saved from "
    "DataParallel, DistributedDataParallel or torch.compile, as plain safetensors, under the "
    "parameter names of the unwrapped model.",
    FLAGS,
    run,
)
