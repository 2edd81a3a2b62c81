"""Finds what a run goes on from: its folder, its configuration, its newest good checkpoint."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import Option, as_flat_dict, train_options
from hvdtrain.data.fingerprint import difference
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.log import say
from hvdtrain.pulse import RESTART
from hvdtrain.run.directory import RunDirectory
from hvdtrain.run.tasks import Source
from hvdtrain.train.checkpoint import (
    MANIFEST_FILE,
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
    name_of,
)
from hvdtrain.train.finite import find_not_finite

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
    checkpoint: Path | None = None  # that it goes on from

    def make_ready(self) -> None:
        """Bring the folder to where the run goes on: no records of later steps, true pointers."""
        state, folder = self.resumed.state, self.directory.path / "checkpoints"
        self.directory.forget_after(state["step"] if state else 0)
        best = state["progress"]["summary"].get("best") if state else None
        own = self.checkpoint and self.checkpoint.resolve().parent == folder.resolve()
        Checkpoints(folder, keep=1).repair(
            resumed=self.checkpoint.name if self.checkpoint and own else None,
            best=name_of(best["step"]) if best else None,
        )


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
        return _read(config, directory)
    except BaseException:
        directory.close()
        raise


def refuse_changed_data(config: TrainConfig, found: Resumable | None, source: Source) -> None:
    """Rank 0: raise UsageError, saying what has changed, unless the data are the run's.

    Their order follows from their number, so that other data would repeat and lose samples.
    """
    state = found.resumed.state if found else None
    if state is None:
        return
    old, new = state.get("data"), source.fingerprints
    if not old:
        say("resume: a checkpoint of an older version: whether its data are these is not known")
        return
    if len(old) != len(new):
        problems = [f"parts of {len(old)} hosts then, of {len(new)} now"]
    else:
        whole = len(new) == 1  # else each host's rank has its own part at hand only
        problems = [
            f"{part} split{f' of host {host}' if not whole else ''}: {changed}"
            for host in range(len(new))
            for part, split in (("train", source.data.train), ("valid", source.data.valid))
            if (changed := difference(old[host][part], new[host][part], split if whole else None))
        ]
    if problems:
        task = config.model.task
        given = f"--task={task}" if task else f"--data={config.data.data}"
        problems = [f"{given}: the data have changed since the checkpoint: {p}" for p in problems]
        problems[-1] += (
            ". Resume with the data as they were, or start another --experiment, with --pretrained "
            f"{config.folder} to take over its weights"
        )
        raise UsageError(*problems)


def _way_to(path: Path) -> str:
    """How to go on with the run that `path` is, or is a checkpoint of."""
    for run in (path, path.parent, path.parent.parent):
        if (run / "config.yaml").is_file():
            return f"To go on with {run}: --config {run / 'config.yaml'} --resume auto"
    return "Give those of the run to go on with, and --resume auto"


def _read(config: TrainConfig, directory: RunDirectory) -> Resumable:
    stored = _read_config(directory.path / "config.yaml")
    _refuse_another_experiment(config, stored, directory.path)
    finished = _finished_summary(config, stored, directory.path)
    batch_size: int = stored["global_batch_size"]
    if finished:
        return Resumable(directory, Resumed(batch_size, None, finished))
    checkpoint, state = _load_state(config, directory.path / "checkpoints")
    return Resumable(directory, Resumed(batch_size, state, None), checkpoint)


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


def _load_state(
    config: TrainConfig, folder: Path
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The newest good checkpoint and its state, saying which ones were passed over."""
    Checkpoints(folder, keep=1).put_back()
    if config.run.resume != "auto":
        path = Path(str(config.run.resume))
        if not (path / MANIFEST_FILE).is_file():
            example = next(iter(Checkpoints(folder, keep=1).complete()), folder / "step-00000100")
            raise UsageError(
                f"--resume={path}: is no checkpoint. Give auto, for the newest good one, or the "
                f"folder of one, such as {example}"
            )
        try:
            return path, _load_good(path)
        except DamagedCheckpoint as error:
            raise UsageError(f"--resume={config.run.resume}: {error}") from error
    for path in Checkpoints(folder, keep=1).complete():
        try:
            state = _load_good(path)
        except DamagedCheckpoint as error:
            say(f"resume: passing over a damaged checkpoint: {error}")
            continue
        say(f"resume: going on from {path}")
        return path, state
    say(f"resume: no good checkpoint in {folder}: starting afresh")
    return None, None


def _load_good(path: Path) -> dict[str, Any]:
    """Raises DamagedCheckpoint also for a state that training could not go on from."""
    state = load_checkpoint(path)[1]
    problem = find_not_finite(state)
    if problem:
        raise DamagedCheckpoint(f"{path}: {problem}")
    return state
