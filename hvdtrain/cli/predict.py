"""`hvdtrain predict`: the most likely classes of images, in one process without Horovod, or shared
by N workers.
"""

from typing import Any

from hvdtrain.cli.flags import TRUST_CODE, Command, Flag, replacements, train_flag, wrong_flags
from hvdtrain.config.fields import at_least
from hvdtrain.errors import EXIT_OK, refuse
from hvdtrain.topology import Topology

FLAGS = (
    Flag("source", "use this trained model", metavar="RUN_OR_CHECKPOINT"),
    Flag(
        "images",
        "classify files, or all files below folders",
        metavar="IMAGE",
        more={"nargs": "+"},
    ),
    Flag("--top", "print this many classes (default: 3)", int, default=3, check=at_least(1)),
    *replacements(["model"]),
    train_flag("max_image_pixels"),
    train_flag("device"),
    train_flag(
        "skip_bad_samples", "skip images that cannot be read; fail only if there is no other"
    ),
    TRUST_CODE,
    Flag("--json", "write the scores of all classes to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Collective: predict and return the exit code. Raises UsageError."""
    refuse([*problems, *wrong_flags(FLAGS, arguments)])
    from hvdtrain.records.storage import local_copy
    from hvdtrain.run.joined import joined_workers
    from hvdtrain.run.prediction import predict

    with joined_workers(topology) as workers, local_copy(arguments["source"]) as source:
        predict(arguments | {"source": source}, workers)
    return EXIT_OK


COMMAND = Command(
    "predict the classes of images, in one process or on N workers",
    "Print the most likely classes of images, by a trained model, in this process, without "
    "Horovod. N workers share the images, and rank 0 prints and writes for all: `hvdtrain launch "
    "-np N -- predict ...`, or `horovodrun -np N hvdtrain predict ...`.",
    FLAGS,
    run,
)
