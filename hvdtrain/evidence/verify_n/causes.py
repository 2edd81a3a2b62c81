"""The likely cause of a difference between numbers of workers, found by experiments.

They run in a child process, so that user code cannot harm the command, on the batch and with the
parameters of the first step that differs. A second process repeats what both must have alike: the
data and the initial parameters.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import dump_yaml
from hvdtrain.evidence.children import CommandProcess
from hvdtrain.evidence.trials import POLL_S
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
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """The causes found; without any, a note that says why."""

    causes: list[Cause]
    note: str | None


@dataclass(frozen=True)
class Question:
    """The step to look into, at which `workers` workers part from the reference."""

    config: TrainConfig
    step: int  # counted from 1
    before: Path | None  # the checkpoint before it; None: the start of the run
    workers: int
    exact: bool  # virtual workers: dropout and batch norm cannot be the cause

    def configuration(self) -> TrainConfig:
        """Return the configuration of the experiments."""
        config = self.config
        return replace(
            config,
            model=replace(config.model, dtype="float64"),
            data=replace(config.data, workers=0),
            precision=replace(config.precision, amp="none", compression="none"),
            run=replace(config.run, resume=None),
        )

    def request(self) -> dict[str, Any]:
        """Return what else the child processes receive."""
        return {
            "step": self.step,
            "before": str(self.before) if self.before else None,
            "shares": max(self.workers, 2),
            "exact": self.exact,
        }


def likely_causes(question: Question, scratch: Path) -> Findings:
    """Return the causes that experiments in child processes show."""
    config = scratch / "causes.yaml"
    config.write_text(dump_yaml(question.configuration()), "utf-8")
    request = question.request() | {"config_file": str(config)}
    reports = []
    children = [
        _start(request | {"only_digests": second}, scratch / f"causes-{int(second)}")
        for second in (False, True)
    ]
    deadline = time.monotonic() + LIMIT_S
    for child, folder in children:
        while child.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        failed = child.exit_code() != 0
        child.end()
        if failed:
            lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-LINES_SHOWN:])
            return Findings([], f"{NOTHING}: the experiments failed:\n{shown}")
        reports.append(json.loads((folder / "report.json").read_text("utf-8")))
    causes = causes_of_processes(reports[0]["digests"], reports[1]["digests"])
    if not causes:  # otherwise gradients of other data or parameters were compared
        causes = [
            Cause(**{**cause, "modules": tuple(cause["modules"])}) for cause in reports[0]["causes"]
        ]
    return Findings(causes, None if causes else NOTHING)


def _start(request: dict[str, Any], folder: Path) -> tuple[CommandProcess, Path]:
    folder.mkdir()
    file = folder / "request.json"
    file.write_text(json.dumps(request), "utf-8")
    argv = [*module_argv("hvdtrain.evidence.verify_n.experiments"), str(file)]
    return CommandProcess(argv, folder / "log", os.environ), folder


def causes_of_processes(one: Mapping[str, str], other: Mapping[str, str]) -> list[Cause]:
    """Return what two processes with the same seed do not have alike."""
    causes = []
    if one["data"] != other["data"]:
        causes.append(
            Cause(
                "data",
                "random numbers in the data: two processes read different values for the same "
                "samples of the same epoch",
                "draw them from a generator that is seeded by the run's seed, the epoch and the "
                "sample's number, never by the process or the time",
            )
        )
    if one["parameters"] != other["parameters"]:
        causes.append(
            Cause(
                "initial parameters",
                "the initial parameters: two processes with the same seed build different ones",
                "draw them from torch's global generator, which is seeded before the model exists",
            )
        )
    return causes
