"""`hvdtrain train`: one training run, as a single process or one of N workers."""

import sys
from typing import Any

from hvdtrain.cli.flags import TRAIN_FLAGS, Command
from hvdtrain.config.options import build_config, dump_yaml
from hvdtrain.errors import EXIT_OK
from hvdtrain.log import say
from hvdtrain.run.process import quick_imports
from hvdtrain.topology import Topology


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Collective: train and return the exit code. Raises UsageError."""
    config = build_config(arguments, problems)
    if arguments["print_config"]:
        if topology.rank == 0:
            say(dump_yaml(config))
        return EXIT_OK
    with quick_imports():  # of torch: only for a valid configuration
        from hvdtrain.run.recall import of_this_job
        from hvdtrain.run.training import join_session, training_run
        from hvdtrain.train.loop import TrainingLoop, train

    joined = join_session(config, topology, ["hvdtrain", *sys.argv[1:]])
    with joined as session, training_run(of_this_job(config, session.exchange), session) as ready:
        if ready is not None:
            loop = TrainingLoop(ready.job, ready.state, session.exchange, ready.hooks)
            ready.finish(train(loop))
    return EXIT_OK


COMMAND = Command(
    "train a model in one process, or on N workers under hvdtrain launch -np N",
    "Train one model in this process. For N workers use `hvdtrain launch -np N -- train ...`, or "
    "`horovodrun -np N hvdtrain train ...`, which works wherever Horovod does.",
    TRAIN_FLAGS,
    run,
)
