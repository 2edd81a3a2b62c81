"""Search for the run to resume: its folder, its configuration and its newest good checkpoint."""

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.config import TrainConfig
from hvdtrain.config.effects import without_idle
from hvdtrain.config.fields import flag_of
from hvdtrain.config.options import (
    Option,
    as_flat_dict,
    known_options,
    read_recorded,
    train_options,
)
from hvdtrain.data.sketch import SKETCH
from hvdtrain.data.splits import Fingerprint, Split, difference
from hvdtrain.documents import read_json
from hvdtrain.errors import UsageError, refuse
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.log import counted, say
from hvdtrain.pulse import RESTART
from hvdtrain.records.directory import RunDirectory
from hvdtrain.records.folders import CHECKPOINTS, CONFIG, SUMMARY
from hvdtrain.run.same_data import changed_values
from hvdtrain.run.script import Script
from hvdtrain.run.tasks import TaskData
from hvdtrain.train.built import built_of, refuse_another_base, refuse_other_build
from hvdtrain.train.checkpoint import (
    MANIFEST_FILE,
    Checkpoints,
    DamagedCheckpoint,
    load_checkpoint,
    load_state,
    name_of,
    read_manifest,
)
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.state import (
    completed,
    evaluation_in,
    find_not_finite,
    load_model,
    load_optimizers,
)

LOCK_WAIT_S = 120.0
# The parts of the state of a finished run that its script goes on with.
NEEDED_AT_END = {
    "optimizer_order",
    "optimizer",
    "further_optimizers",
    "further_state",
    "evaluation",
}
COUNTED_BY_PATIENCE = {"eval_interval", "eval_every"}  # how often evaluations are made
# Without which the summary is not that of a finished run.
FIGURES = {"epochs", "steps", "samples_seen", "samples_per_s", "params_sha256"}


@dataclass(frozen=True)
class Resumed:
    """The part of a resumed run that every rank needs; by default there is none."""

    global_batch_size: int | None = None
    state: dict[str, Any] | None = None  # None: no checkpoint, so start from the beginning
    finished: dict[str, Any] | None = None  # the summary, if the run has already finished
    rank_weights: str | None = None  # those that it was started with
    grad_accum_steps: int | None = None


@dataclass(frozen=True)
class Resumable:
    """A resumed run on rank 0, with its locked folder."""

    directory: RunDirectory
    resumed: Resumed
    checkpoint: Path | None = None  # the one to resume from

    def make_ready(self) -> None:
        """Drop records of later steps and correct the pointers to checkpoints."""
        state, folder = self.resumed.state, self.directory.path / CHECKPOINTS
        self.directory.forget_after(state["step"] if state else 0)
        self.directory.reopen_summary(state["progress"].get("trace") if state else None)
        best = state["progress"]["summary"].get("best") if state else None
        path = self.checkpoint
        Checkpoints(folder, keep=1).repair(
            resumed=path.name if path and path.resolve().parent == folder.resolve() else None,
            best=name_of(best["step"]) if best else None,
        )


def find_resumable(config: TrainConfig, exchange: Exchange) -> Resumable | None:
    """Return, on rank 0, the run that `--resume` selects; None elsewhere, or if there is none.

    Raises UsageError for another experiment, a damaged checkpoint named by the user, or a live job.
    """
    folder = config.folder
    if exchange.rank != 0 or config.run.resume is None:
        return None
    if not (folder / CONFIG).exists() and not Checkpoints(folder / CHECKPOINTS, 1).complete():
        if config.run.resume == "auto":
            return None
        raise UsageError(
            f"--resume={config.run.resume}: there is no run in {folder}, which --output and "
            f"--experiment name. {_way_to(Path(config.run.resume))}"
        )
    directory = RunDirectory(folder, reopen=True, wait_s=lock_wait_s())
    try:
        return _resumable_in(directory, config, exchange.size)
    except BaseException:
        directory.close()
        raise


def lock_wait_s() -> float:
    """Return the seconds to wait for the lock of a run: if the launcher has restarted the job, an
    earlier, disconnected rank 0 may still be ending.
    """
    return LOCK_WAIT_S if os.environ.get(RESTART, "0") != "0" else 0.0


def refuse_changed_data(
    config: TrainConfig, resumable: Resumable | None, source: TaskData, chooser: str
) -> None:
    """Raise UsageError on rank 0, naming the differences, unless the data are those of the run.

    The order of samples depends on their number, so other data would repeat and skip samples.
    `chooser`: what has chosen the data.
    """
    state = resumable.resumed.state if resumable else None
    if state is None:
        return
    old, new = state.get("data"), source.fingerprints
    if not old:
        say("resume: the checkpoint of an earlier version has no record of its data to compare")
        return
    if len(old) != len(new):
        problems = [f"parts of {len(old)} hosts then, of {len(new)} now"]
    else:
        whole = len(new) == 1  # otherwise rank 0 has only the part of its own host
        problems = [
            f"{part} split{f' of host {host}' if not whole else ''}: {changed}"
            for host in range(len(new))
            for part, split in (("train", source.data.train), ("valid", source.data.valid))
            if (changed := _change(old[host][part], new[host][part], split if whole else None))
        ]
    advice = ". Resume with the data as they were, or start another --experiment"
    if chooser.startswith("--"):  # a command: scripts load weights themselves
        advice += f", with --pretrained {config.folder} to take over its weights"
    problems = [f"{chooser}: the data have changed since the checkpoint: {p}" for p in problems]
    refuse(problems, advice)


def _change(old: Fingerprint, new: Fingerprint, split: Split | None) -> str | None:
    """Return a description of the change of a split, or None. `split`: the new one, if known."""
    if change := difference(old, new, split):
        return change
    change = changed_values(old.get(SKETCH), new.get(SKETCH), split)
    return f"{counted(new['samples'], 'sample')} as before, which now {change}" if change else None


def refuse_changed_build(
    state: Mapping[str, Any], model: torch.nn.Module, built: Mapping[str, Any]
) -> None:
    """Raise UsageError, with all differences, unless a captured state is one of this model, and of
    optimizers and further objects that are built so. Ranks have the same as rank 0.

    Checkpoints may leave the base, the frozen parameters, to the script.
    """
    refuse_other_build(state, model, built)
    refuse_another_base(state, model)


def take_last_state(script: Script, folder: Path, exchange: Exchange) -> Evaluation | None:
    """Collective: load a finished run's last checkpoint, which rank 0 reads: the weights, and the
    state of optimizers and schedules. Returns the run's last evaluation.
    """

    def read() -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        if exchange.rank != 0:
            return None
        newest = Checkpoints(folder / CHECKPOINTS, keep=1).complete()
        if not newest:
            raise UsageError(f"--resume: {folder}: the run has finished, but has no checkpoint")
        weights, state = load_checkpoint(newest[0])
        refuse_changed_build(state, script.model, built_of(script.optimizers, script.further_state))
        needed = state.keys() & NEEDED_AT_END
        return completed(weights, state, script.model), {name: state[name] for name in needed}

    loaded = run_on_all(exchange, "last_state", read)
    weights, state = exchange.broadcast_object(loaded, "hvdtrain.last_state")
    load_model(script.model, weights)
    load_optimizers(state, script.model, script.optimizers, script.further_state)
    return evaluation_in(state)


def recorded_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, from its newest checkpoint if its own file is damaged.

    Raises UsageError if neither can be read.
    """
    path = folder / CONFIG
    try:
        return read_recorded(path)
    except (OSError, ValueError) as error:
        reason = f"{path}: {getattr(error, 'strerror', None) or error}"
    for checkpoint in Checkpoints(folder / CHECKPOINTS, keep=1).complete():
        with suppress(DamagedCheckpoint, LookupError, ValueError):
            recorded = known_options(read_manifest(checkpoint)["takeaway"]["config"])
            say(f"resume: {reason}; taken from {checkpoint.name}, and written again")
            return recorded
    raise UsageError(f"--resume: {reason}, and no checkpoint has the configuration")


def _way_to(path: Path) -> str:
    """Return how to resume the run that `path` is, or is a checkpoint of."""
    for run in (path, path.parent, path.parent.parent):
        if (run / CONFIG).is_file():
            return f"To resume {run}: --config {run / CONFIG} --resume auto"
    return "Give those of the run to resume, and --resume auto"


def _resumable_in(directory: RunDirectory, config: TrainConfig, size: int) -> Resumable:
    stored = recorded_config(directory.path)
    if not isinstance(stored.get("global_batch_size"), int):
        raise UsageError(f"--resume: {directory.path / CONFIG} has no global_batch_size")
    directory.refuse_newer()
    _refuse_another_experiment(config, stored, directory.path)
    batch_size: int = stored["global_batch_size"]
    if finished := _finished_summary(config, stored, directory.path):
        return Resumable(directory, Resumed(batch_size, finished=finished))
    checkpoint, state = _load_state(config, directory.path / CHECKPOINTS)
    before, now = stored.get("bucket_bytes"), config.precision.bucket_bytes
    if state and size > 2 and config.batch.virtual_workers is None and str(before) != now:
        say(
            f"resume: --bucket-bytes {now}, and {before or 'another size'} before: gradients are "
            "added in another order, so the last bits are not those of an uninterrupted run"
        )
    resumed = Resumed(
        batch_size,
        state,
        rank_weights=stored.get("rank_weights"),
        grad_accum_steps=stored.get("grad_accum_steps"),
    )
    return Resumable(directory, resumed, checkpoint)


def _refuse_another_experiment(config: TrainConfig, stored: dict[str, Any], path: Path) -> None:
    defaults = {name: option.default for name, option in train_options().items()}
    wanted = without_idle(as_flat_dict(config), defaults)
    # An option that is newer than the run had its default value.
    stored = without_idle(defaults | stored, defaults)
    if config.batch.global_batch_size is None:  # a resumed run keeps its global batch
        wanted["global_batch_size"] = stored.get("global_batch_size")
    if config.batch.micro_batch is not None:  # nor are its passes chosen again
        wanted["grad_accum_steps"] = stored["grad_accum_steps"]
    problems = [
        f"{flag_of(option.name)}{_shown(wanted[option.name], ' is not given', '=')}: the run in "
        f"{path} was started {_shown(stored[option.name], 'without it', 'with ')}; a resumed run "
        f"is the same experiment: {_as_flag(option, stored[option.name])}"
        for option in train_options().values()
        if option.learns or (wanted["patience"] and option.name in COUNTED_BY_PATIENCE)
        if wanted[option.name] != stored[option.name]
    ]
    refuse(problems, f"; or give all its options: --config {path / CONFIG}")


def _shown(value: Any, absent: str, prefix: str) -> str:
    return absent if value is None else f"{prefix}{value}"


def _as_flag(option: Option, value: Any) -> str:
    """Return the instruction for giving an option this value on the command line."""
    flag = flag_of(option.name)
    if value is None:
        return f"leave {flag} out"
    if isinstance(value, bool):
        return f"give {flag if value else flag_of(f'no_{option.name}')}"
    return f"give {flag} {shlex.quote(str(value))}"


def _finished_summary(
    config: TrainConfig, stored: dict[str, Any], path: Path
) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        summary, wanted = read_json(path / SUMMARY), config.schedule
        is_whole = summary.keys() >= FIGURES and summary.get("status") == "finished"
        if is_whole and summary.get("end_reason"):  # which a longer run would have met as well
            return summary
        length = (stored.get("epochs"), stored.get("max_steps"))
        if is_whole and length == (wanted.epochs, wanted.max_steps):
            return summary
    return None


def _load_state(
    config: TrainConfig, folder: Path
) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """Return the newest good checkpoint and its state; print the damaged ones that are skipped."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.put_back()
    if config.run.resume != "auto":
        path = Path(str(config.run.resume))
        if not (path / MANIFEST_FILE).is_file():
            example = next(iter(checkpoints.complete()), folder / "step-00000100")
            raise UsageError(
                f"--resume={path}: is not a checkpoint. Give auto, for the newest good one, or the "
                f"folder of one, such as {example}"
            )
        try:
            return path, _load_good(path)
        except DamagedCheckpoint as error:
            raise UsageError(f"--resume={config.run.resume}: {error}") from error
    damaged = []
    for path in checkpoints.complete():
        try:
            state = _load_good(path)
        except DamagedCheckpoint as error:
            damaged.append(f"a damaged checkpoint: {error}")
            continue
        for text in damaged:
            say(f"resume: skipping {text}")
        say(f"resume: continuing from {path}")
        return path, state
    refuse(
        (f"--resume: {text}" for text in damaged),
        ". None of them can be read. Restore one, or start another --experiment; to begin this run "
        f"again, remove {folder}",
    )
    say(f"resume: no checkpoint in {folder}: starting from the beginning")
    return None, None


def _load_good(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raises DamagedCheckpoint also if it is not finite."""
    state = load_state(path)
    if problem := find_not_finite(state):
        raise DamagedCheckpoint(f"{path}: {problem}")
    return state
