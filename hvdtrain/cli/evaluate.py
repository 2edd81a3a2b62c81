"""`hvdtrain evaluate`: exact metrics of a checkpoint, in one process without Horovod, or shared by
N workers.
"""

from typing import Any

from hvdtrain.cli.flags import TRUST_CODE, Command, Flag, replacements
from hvdtrain.config.options import MAY_NAME_CODE
from hvdtrain.errors import EXIT_OK, refuse
from hvdtrain.topology import Topology

VALUES = (
    *MAY_NAME_CODE,
    *("data_dir", "image_size", "max_image_pixels", "valid_split", "workers", "device"),
    *("skip_bad_samples", "eval_batch_size"),
)
FLAGS = (
    Flag("source", "evaluate this run or checkpoint", metavar="RUN_OR_CHECKPOINT"),
    *replacements(VALUES),
    TRUST_CODE,
    Flag("--json", "write all figures to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Collective: evaluate and return the exit code. Raises UsageError."""
    refuse(problems)
    from hvdtrain.records.storage import local_copy
    from hvdtrain.run.joined import joined_workers
    from hvdtrain.run.trained import evaluate

    with joined_workers(topology) as workers, local_copy(arguments["source"]) as source:
        evaluate(arguments | {"source": source}, VALUES, workers)
    return EXIT_OK


COMMAND = Command(
    "compute exact metrics of a checkpoint, in one process or on N workers",
    "Evaluate a run (its best checkpoint) or a checkpoint on its validation data, in this process, "
    "without Horovod. N workers share the samples, for the same figures: `hvdtrain launch -np N -- "
    "evaluate ...`, or `horovodrun -np N hvdtrain evaluate ...`.",
    FLAGS,
    run,
)
