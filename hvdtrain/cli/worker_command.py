"""The command that workers run: what `hvdtrain launch` has after `--`, checked and completed."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.cli import COMMANDS
from hvdtrain.cli.flags import read_train_flags
from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import SCHEME
from hvdtrain.errors import UsageError, attempt, closest
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import search_path
from hvdtrain.log import counted
from hvdtrain.records.folders import CONFIG, free_folder, numbering

OWN_COMMANDS = ("train", "evaluate", "predict", "verify", "bench")  # those that run on every worker
LONGEST_NAME = 100  # of a job, whose record is a file
BATCH_FLAGS = ("--batch-size", "--batch_size", "--global-batch-size", "--global_batch_size")


def read_command(words: list[str]) -> list[str]:
    """Return the command after `--`; `hvdtrain train` is `train`, as typed without `launch`."""
    command = words[1:] if words[:1] == ["--"] else [*words]
    is_own = command[:1] == ["hvdtrain"] and command[1:2] and command[1] in OWN_COMMANDS
    return command[1:] if is_own else command


def check_command(command: list[str], elsewhere: bool = False) -> list[str]:
    """Return the problem of a command that workers cannot run.

    `elsewhere`: another machine has the command's file.
    """
    if not command:
        return ["nothing to launch: give `-- train ...` or `-- python SCRIPT ...`"]
    name = command[0]
    if re.fullmatch(r"(python|pypy)[\d.]*", Path(name).name) and _reads_stdin(command[1:]):
        return [
            f"{shlex.join(command)}: reads its code from standard input, which only the launcher "
            "has: save it as a script, and launch that"
        ]
    if name in OWN_COMMANDS or shutil.which(name, path=search_path(os.environ)):
        return []
    if Path(name).suffix == ".py":
        return [f"{name}: is not a command; launch a Python script with `-- python {name} ...`"]
    reason = "is not executable" if Path(name).is_file() else "no such command"
    hint = "give `-- train ...`, `-- python SCRIPT ...`, or a command that is on PATH"
    if name in COMMANDS:
        return [f"{name}: does not run on workers; use `hvdtrain {shlex.join(command)}` alone"]
    if near := closest(name, OWN_COMMANDS):
        hint = f"did you mean {near}?"
    elif elsewhere and name:
        return []
    return [f"{name or repr(name)}: {reason}; {hint}"]


def job_name(command: list[str], config: TrainConfig | None) -> str:
    """Return the name of a job in the background: that of its run, its script or its command."""
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    name = config.folder.name if config else (*scripts, Path(command[0]).name)[0]
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:LONGEST_NAME] or "job"


def _reads_stdin(words: Sequence[str]) -> bool:
    """Return whether Python, given these words, has no script, module or code."""
    for index, word in enumerate(words):
        if word == "-" or not word.startswith("-"):
            return word == "-"
        if word[1] in "cmVh?" or word.startswith("--"):  # -c CODE, -m MODULE, or only information
            return False
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            return _reads_stdin(words[index + 2 :])
    return True


def read_train(command: list[str]) -> TrainConfig | None:
    """Return the configuration of a `train` command; None for another. Raises UsageError."""
    if command[:1] != ["train"]:
        return None
    try:
        return read_train_flags("hvdtrain train", command[1:])
    except UsageError as error:
        raise UsageError(*(f"train: {problem}" for problem in error.problems)) from None


def check_train(config: TrainConfig, workers: int, min_np: int | None, restarts: int) -> list[str]:
    """Return the problems of a `train` command on this many workers, with restarts."""
    problems: list[str] = []
    weights, resume = config.batch.rank_weights, config.run.resume
    if workers > 0:
        attempt(problems, lambda: config.batch.weights(workers))
    if weights not in (None, "auto") and (min_np or workers) != workers:
        problems.append(
            f"--min-np={min_np}: --rank-weights={weights} are for {counted(workers, 'worker')}; "
            "give only one of them"
        )
    if restarts and resume not in (None, "auto"):
        problems.append(
            f"train: --resume={resume}: a restart continues from the newest checkpoint. "
            "Resume from this one without --restarts first, then use --resume auto"
        )
    return problems


def numbered(command: list[str], config: TrainConfig) -> tuple[list[str], TrainConfig, str]:
    """Return both with a name that no run has, unless one is resumed, and a note if it is another.

    All starts of a job must be given the same name, as the later ones resume the first.
    """
    folder = config.folder
    free = folder if config.run.resume else free_folder(folder)
    if free == folder:
        return command, config, ""
    config = replace(config, run=replace(config.run, experiment=free.name))
    command = [*_without(command, ("--experiment",)), "--experiment", free.name]
    return command, config, numbering(folder, free)


def worker_commands(
    command: list[str], config: TrainConfig | None, workers: int
) -> tuple[list[str], list[str]]:
    """Return the first command and that of restarts."""
    entry_point = module_argv("hvdtrain.cli") if command[0] in OWN_COMMANDS else []
    first, flags = [*entry_point, *command], command[1:]
    if config is None:
        return first, first
    # The global batch stays on any number of workers; a run to resume, perhaps from storage, has
    # its own.
    in_storage = SCHEME in config.run.output
    resumes = config.run.resume is not None and (in_storage or (config.folder / CONFIG).exists())
    if config.batch.batch_size is not None and not resumes:
        batch = str(config.batch.resolve(workers))
        flags = [*_without(flags, BATCH_FLAGS), "--global-batch-size", batch]
    # In storage another run may have the name: a restart looks there for the run of its job.
    resume = () if in_storage else ("--resume", "auto")
    return first, [*entry_point, "train", *flags, *resume]


def _without(flags: list[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those in `names`, which take a value each."""
    kept, skip = [], False
    for part in flags:
        if not skip and part.partition("=")[0] not in names:
            kept.append(part)
        skip = not skip and part in names
    return kept


def log_folder(log_dir: Path | None, config: TrainConfig | None) -> Path:
    """Return the folder of logs, by default that of the run. Raises UsageError for a link."""
    if log_dir is not None:
        return log_dir
    log_dir = config.folder / "logs" if config else Path("logs")
    if log_dir.is_symlink():
        raise UsageError(
            f"{log_dir}: is a symbolic link, which is not followed; give --log-dir DIR"
        )
    return log_dir
