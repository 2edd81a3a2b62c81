"""Several experiments in one start of N workers, each assembled and run as `hvdtrain train` does.

    horovodrun -np N python -c 'from tests.parallel.shared import main; main()' FOLDER

FOLDER/experiments.json maps names to flags of `train`. Each rank writes the error of an experiment,
or nothing, to FOLDER/NAME.rank-R.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hvdtrain.cli.flags import read_train_flags
from hvdtrain.errors import HvdtrainError
from hvdtrain.run.process import quick_imports
from hvdtrain.topology import Topology


def main(
    context: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
) -> None:
    """Run all experiments, each within `context(name)`."""
    folder, topology = Path(sys.argv[1]), Topology.from_environment()
    experiments = json.loads((folder / "experiments.json").read_text())
    configs = {}
    for name, flags in experiments.items():
        place = ["--output", str(folder), "--experiment", name]
        configs[name] = read_train_flags("train", [*flags, *place])
    with quick_imports():
        from hvdtrain.run.training import join_session, training_run
        from hvdtrain.train.loop import TrainingLoop, train
    with join_session(next(iter(configs.values())), topology) as session:
        for name, config in configs.items():
            error = ""
            try:
                with context(name), training_run(config, session) as ready:
                    assert ready is not None
                    loop = TrainingLoop(ready.job, ready.state, session.exchange, ready.hooks)
                    ready.finish(train(loop))
            except HvdtrainError as found:
                error = f"exit code {found.exit_code}: {found}"
            (folder / f"{name}.rank-{topology.rank}").write_text(error)
