"""Jobs of benches: their commands, and the steps that they log."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain.evidence.children import ChildFailure, run_command
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import (
    horovodrun_argv,
    horovodrun_environment,
    in_own_session,
    settings_for,
)
from hvdtrain.log import say
from hvdtrain.records.folders import METRICS, TENSORBOARD

HVDTRAIN = module_argv("hvdtrain.cli")
EXPERIMENT = "run"


class Logged(NamedTuple):
    """A logged step: its number, and the time of its end in seconds since 1970."""

    step: int
    at_s: float


def train_argv(folder: Path, flags: Sequence[str]) -> list[str]:
    """Return the command of `hvdtrain train` that writes its run to `folder`/run."""
    return [*HVDTRAIN, "train", *flags, "--output", str(folder), "--experiment", EXPERIMENT]


def launch_argv(workers: int, controller: str, train: Sequence[str]) -> list[str]:
    """Return the command of `hvdtrain launch` for what `train_argv` returns."""
    flags = ("-np", str(workers), "--controller", controller)
    return [*HVDTRAIN, "launch", *flags, "--", *train[len(HVDTRAIN) :]]


def on_workers(
    argv: Sequence[str], workers: int, controller: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `argv` on local workers, and its environment.

    Horovodrun is called as by `hvdtrain launch`, with its settings; one worker runs without it.
    """
    if workers == 1:
        return [*argv], dict(os.environ)
    command = horovodrun_argv(in_own_session(argv), workers, controller)
    return command, launch_environment(controller, os.environ)


def launch_environment(controller: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of horovodrun with the settings of `hvdtrain launch -- train`."""
    # The watchdog has no effect on `train`.
    settings = settings_for(controller, environment, watchdog_timeout_s=0, command="train")
    return horovodrun_environment(environment, settings, None)


def log_of(folder: Path) -> Path:
    """Return the file that grows by a line with each logged step of the run in `folder`."""
    return folder / EXPERIMENT / METRICS


def logged_steps(folder: Path) -> list[Logged]:
    """Return the logged steps of the run in `folder`, with the times of its scalars."""
    accumulator = EventAccumulator(str(folder / EXPERIMENT / TENSORBOARD))
    accumulator.Reload()
    return [Logged(event.step, event.wall_time) for event in accumulator.Scalars("train/loss")]


def read_steps(path: Path) -> list[Logged]:
    """Read lines of a step's number and time; text after the last line break is ignored."""
    *lines, _ = path.read_text("utf-8").split("\n")
    return [Logged(int(step), float(at_s)) for step, at_s in map(str.split, lines)]


def steps_per_s(steps: Sequence[Logged]) -> float:
    """Return the rate between the first and the last; NaN for fewer than two."""
    if len(steps) < 2:
        return math.nan
    first, *_, last = steps
    return (last.step - first.step) / (last.at_s - first.at_s)


def run_peer_command(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    time_limit_s: float,
    has_noted: Callable[[], bool],
) -> None:
    """Run a command as `run_command`, and report a failure after it has noted what is measured.

    A process of DDP over Gloo may abort (SIGABRT) or hang as it ends, even after
    destroy_process_group: DDP's reducer keeps the group, one of whose threads frees the last
    exchange and needs the interpreter for it (torch 2.13). Raises ChildFailure for all others.
    """
    try:
        run_command(argv, environment, folder, time_limit_s)
    except ChildFailure as failure:
        if not has_noted():
            raise
        say(f"measured, though it failed as it ended: {failure}")
