"""Finds what a run goes on from: its folder, its configuration, its newest good checkpoint."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.checkpoint import MANIFEST_FILE, Checkpoints, DamagedCheckpoint, load_checkpoint
from hvdtrain.cli.config_file import Option
from hvdtrain.cli.options import as_flat_dict, train_options
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.finite import find_not_finite
from hvdtrain.log import say
from hvdtrain.pulse import RESTART
from hvdtrain.run_directory import RunDirectory

LOCK_WAIT_S = 120.0
LENGTHS = ("epochs", "max_steps")


@dataclass(frozen=True)
class Resumed:
    """What every rank needs to know to go on."""

    global_batch_size: int
    state: dict[str, Any] | None  # None: no good checkpoint, so it starts afresh
    finished: dict[str, Any] | None  # the summary of a run that needs nothing more


@dataclass(frozen=True)
class Resumable:
    """Rank 0's: the same, with the folder, whose lock it holds."""

    directory: RunDirectory
    resumed: Resumed


def find_resumable(config: TrainConfig, exchange: Exchange) -> Resumable | None:
    """Rank 0: the run that `--resume` means. None elsewhere, and where there is none to go on.

    Raises UsageError when the configuration is another experiment's, when a checkpoint that was
    named is damaged, or when a live job is using the folder.
    """
    folder = config.folder
    if exchange.rank != 0 or config.run.resume is None:
        return None
    if not (folder / "config.yaml").is_file():
        if config.run.resume == "auto":
            return None
        raise UsageError(
            f"--resume={config.run.resume}: there is no run in {folder}, which --output and "
            f"--experiment name. {_way_to(Path(config.run.resume))}"
        )
    # Started again by the launcher: an earlier rank 0, cut off, may still be ending.
    wait_s = LOCK_WAIT_S if os.environ.get(RESTART, "0") != "0" else 0.0
    directory = RunDirectory(folder, reopen=True, wait_s=wait_s)
    try:
        return Resumable(directory, _read(config, directory))
    except BaseException:
        directory.close()
        raise


def _way_to(path: Path) -> str:
    """How to go on with the run that `path` is, or is a checkpoint of."""
    for run in (path, path.parent, path.parent.parent):
        if (run / "config.yaml").is_file():
            return f"To go on with {run}: --config {run / 'config.yaml'} --resume auto"
    return "Give those of the run to go on with, and --resume auto"


def _read(config: TrainConfig, directory: RunDirectory) -> Resumed:
    stored = _read_config(directory.path / "config.yaml")
    _refuse_another_experiment(config, stored, directory.path)
    finished = _finished_summary(config, stored, directory.path)
    if finished:
        return Resumed(stored["global_batch_size"], None, finished)
    state = _load_state(config, directory.path / "checkpoints")
    directory.forget_after(state["step"] if state else 0)
    return Resumed(stored["global_batch_size"], state, None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        stored = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--resume: {path} cannot be read: {error}") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("global_batch_size"), int):
        raise UsageError(f"--resume: {path} is not the configuration of a run")
    return stored


def _refuse_another_experiment(config: TrainConfig, stored: dict[str, Any], path: Path) -> None:
    wanted = as_flat_dict(config)
    # An option that came after the run was started had no effect on it.
    stored = {name: option.default for name, option in train_options().items()} | stored
    if config.batch.global_batch_size is None:  # a resumed run keeps its global batch
        wanted["global_batch_size"] = stored.get("global_batch_size")
    problems = [
        f"--{option.name.replace('_', '-')}={wanted[option.name]}: the run in {path} was started "
        f"with {stored[option.name]}; a resumed run is the same experiment: "
        f"{_as_flag(option, stored[option.name])}"
        for option in train_options().values()
        if option.learns and wanted[option.name] != stored[option.name]
    ]
    if problems:
        problems[-1] += f"; or give all its options: --config {path / 'config.yaml'}"
        raise UsageError(*problems)


def _as_flag(option: Option, value: Any) -> str:
    """How to say it on the command line."""
    flag = option.name.replace("_", "-")
    if value is None:
        return f"leave --{flag} out"
    if isinstance(value, bool):
        return f"give --{'' if value else 'no-'}{flag}"
    return f"give --{flag} {shlex.quote(str(value))}"


def _finished_summary(
    config: TrainConfig, stored: dict[str, Any], path: Path
) -> dict[str, Any] | None:
    try:
        summary = json.loads((path / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    wanted = as_flat_dict(config)
    longer = any(wanted[name] != stored.get(name) for name in LENGTHS)
    return summary if summary.get("status") == "finished" and not longer else None


def _load_state(config: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """The state of the newest good checkpoint, saying which ones were passed over."""
    if config.run.resume != "auto":
        path = Path(str(config.run.resume))
        if not (path / MANIFEST_FILE).is_file():
            example = next(iter(Checkpoints(folder, keep=1).complete()), folder / "step-00000100")
            raise UsageError(
                f"--resume={path}: is no checkpoint. Give auto, for the newest good one, or the "
                f"folder of one, such as {example}"
            )
        try:
            return _load_good(path)
        except DamagedCheckpoint as error:
            raise UsageError(f"--resume={config.run.resume}: {error}") from error
    for path in Checkpoints(folder, keep=1).complete():
        try:
            state = _load_good(path)
        except DamagedCheckpoint as error:
            say(f"resume: passing over a damaged checkpoint: {error}")
            continue
        say(f"resume: going on from {path}")
        return state
    say(f"resume: no good checkpoint in {folder}: starting afresh")
    return None


def _load_good(path: Path) -> dict[str, Any]:
    """Raises DamagedCheckpoint also for a state that training could not go on from."""
    state = load_checkpoint(path)[1]
    problem = find_not_finite(state)
    if problem:
        raise DamagedCheckpoint(f"{path}: {problem}")
    return state
