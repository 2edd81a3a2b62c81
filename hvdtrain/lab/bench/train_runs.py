"""Runs of `hvdtrain train` that benches start as a user does, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.lab.children import ONE_THREAD, Commanded, watch
from hvdtrain.launcher.command import Engine, engine_environment, horovodrun_argv, settings_for
from hvdtrain.run.records import METRICS

HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
START_TIMEOUT_S = 60
WATCHDOG_S = 600.0  # as `launch` has it; it sets nothing for `train`
EXPERIMENT = "run"


class Logged(NamedTuple):
    """A step that a process has told of: its number, and when it had ended (seconds since 1970)."""

    step: int
    at_s: float


def train_argv(folder: Path, flags: Sequence[str]) -> list[str]:
    """`hvdtrain train`, which leaves its run in `folder`/run."""
    return [*HVDTRAIN, "train", *flags, "--output", str(folder), "--experiment", EXPERIMENT]


def on_workers(
    argv: Sequence[str], workers: int, controller: str
) -> tuple[list[str], dict[str, str]]:
    """The command that runs `argv` on so many workers of this machine, and its environment: with
    horovodrun as `hvdtrain launch` calls it, and with its settings; for one worker, alone.
    """
    if workers == 1:
        return [*argv], dict(os.environ)
    settings = settings_for(controller, os.environ, WATCHDOG_S, ours=True)
    hosts = (("localhost", workers),)
    engine = Engine(workers, controller, hosts, None, START_TIMEOUT_S)
    values = {setting.name: setting.value for setting in settings}
    return horovodrun_argv(engine, argv), engine_environment(os.environ, values, None)


def run_command(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, time_limit_s: float
) -> None:
    """To its end, with one compute thread a process; its output goes into `folder`. Raises
    ChildFailure.
    """
    deadline = time.monotonic() + time_limit_s
    child = Commanded(argv, folder / "process-0.log", {**environment, **ONE_THREAD})
    try:
        watch([child], folder, deadline, time_limit_s)
    finally:
        child.end()


def logged_steps(folder: Path) -> list[Logged]:
    """When the logged steps of the run in `folder` ended, by the times of its scalars."""
    found = EventAccumulator(str(folder / EXPERIMENT / "tensorboard"))
    found.Reload()
    return [Logged(event.step, event.wall_time) for event in found.Scalars("train/loss")]


def log_of(folder: Path) -> Path:
    """The file that grows by a line with each logged step of the run in `folder`."""
    return folder / EXPERIMENT / METRICS


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl of one kind: step or epoch."""
    text = log_of(folder).read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["kind"] == kind]
