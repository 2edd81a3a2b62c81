"""The likely cause of a difference between numbers of workers, found by experiments.

They run in a child process, so that user code cannot harm the command, on the batch and with the
parameters of the first step that differs. A second process repeats what both must have alike: the
data and the initial parameters.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import dump_yaml
from hvdtrain.evidence.children import CommandProcess, read_json, wait_while
from hvdtrain.evidence.verify_n.parting import Parting
from hvdtrain.interpreter import module_argv

LIMIT_S = 600.0
LINES_SHOWN = 8
NOTHING = "no cause was found by experiment"


@dataclass(frozen=True)
class Cause:
    """A cause that an experiment has shown."""

    kind: str
    text: str  # with the names of the modules, and what the experiment has shown
    advice: str
    modules: Sequence[str] = ()


# What two processes with the same seed must have alike, and the cause if they have not.
ALIKE = {
    "data": Cause(
        "data",
        "random numbers in the data: two processes read different values for the same samples of "
        "the same epoch",
        "draw them from a generator that is seeded by the run's seed, the epoch and the sample's "
        "number, never by the process or the time",
    ),
    "parameters": Cause(
        "initial parameters",
        "the initial parameters: two processes with the same seed build different ones",
        "draw them from torch's global generator, which is seeded before the model exists",
    ),
}


def likely_causes(
    config: TrainConfig, parting: Parting, workers: int, exact: bool, scratch: Path
) -> tuple[list[Cause], str | None]:
    """Return the causes that experiments in child processes show; without any, a note on why.

    `parting`: where the run on `workers` workers parts from the reference. `exact`: with virtual
    workers, so that dropout and batch norm cannot be the cause.
    """
    in_one_process = replace(
        config,
        model=replace(config.model, dtype="float64"),
        data=replace(config.data, workers=0),
        precision=replace(config.precision, amp="none", compression="none"),
        run=replace(config.run, resume=None),
    )
    config_file = scratch / "causes.yaml"
    config_file.write_text(dump_yaml(in_one_process), "utf-8")
    request = {
        "config_file": str(config_file),
        "step": parting.last_equal + 1,
        "before": str(parting.before) if parting.before else None,
        "shares": max(workers, 2),
        "exact": exact,
    }
    children = [
        _start(request | {"only_digests": second}, scratch / f"causes-{int(second)}")
        for second in (False, True)
    ]
    wait_while(lambda: any(child.exit_code() is None for child, _ in children), LIMIT_S)
    failed = [folder for child, folder in children if child.exit_code() != 0]
    for child, _ in children:
        child.end()
    if failed:
        lines = (failed[0] / "log").read_text("utf-8", errors="replace").splitlines()
        return [], "\n".join([f"{NOTHING}: the experiments failed:", *lines[-LINES_SHOWN:]])
    report, other = (read_json(folder / "report.json") for _, folder in children)
    # Where two processes differ, gradients of other data or parameters were compared.
    causes = causes_of_processes(report["digests"], other["digests"])
    causes = causes or [Cause(**cause) for cause in report["causes"]]
    return causes, None if causes else NOTHING


def _start(request: dict[str, Any], folder: Path) -> tuple[CommandProcess, Path]:
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    argv = [*module_argv("hvdtrain.evidence.verify_n.experiments"), str(folder)]
    return CommandProcess(argv, folder / "log", os.environ), folder


def causes_of_processes(one: Mapping[str, str], other: Mapping[str, str]) -> list[Cause]:
    """Return what two processes with the same seed do not have alike, by their digests."""
    return [cause for name, cause in ALIKE.items() if one[name] != other[name]]
