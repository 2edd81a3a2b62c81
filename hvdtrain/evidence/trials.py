"""Training runs of commands that verify a configuration: started as commands, in a scratch folder.

A command such as verify-resume chooses folder, name and resumption of its runs itself; the other
flags of `train`, or options of a script's loop, are the user's.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.fields import flag_of
from hvdtrain.config.options import LOOP_OPTIONS
from hvdtrain.documents import read_json
from hvdtrain.errors import EXIT_USAGE, TrainingError
from hvdtrain.evidence.children import CommandProcess, guarded, wait_while
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import horovodrun_argv, search_path
from hvdtrain.launcher.processes import marked
from hvdtrain.records.folders import SUMMARY

MARK = "HVDTRAIN_TRIAL"
VANISH_S = 30.0
LINES_SHOWN = 15
CHOSEN = ("--output", "--experiment", "--resume")
# horovodrun and mpirun put the rank before each line of a worker.
RANK = r"\[[\d,]+\]<std(?:out|err)>:"
# The message goes on in lines of the same rank; of a single process, to the end.
REFUSED = re.compile(rf"^({RANK}|)hvdtrain: error(?: on [^:\n]+)?: (.*(?:\n\1.*)*)", re.MULTILINE)
ENDED = re.compile(rf"Exit code: +{EXIT_USAGE}$", re.MULTILINE)  # under Gloo horovodrun gives 1


def chosen_flags(train_flags: Sequence[str], command: str) -> list[str]:
    """Return a problem for each of the user's train flags that `command` chooses itself."""
    return [
        f"{flag} is chosen by {command}: leave it out"
        for flag in CHOSEN
        if any(part == flag or part.startswith(flag + "=") for part in train_flags)
    ]


@dataclass(frozen=True)
class Training:
    """The training that is verified: `train` with its flags, or a script with its own loop."""

    words: Sequence[str]  # flags of `train`, or the command of the script
    controller: str  # gloo or mpi
    is_script: bool = False

    @property
    def mark(self) -> str:
        """Return what the command of each worker contains."""
        scripts = [word for word in self.words if word.endswith(".py")]
        return (scripts or [*self.words])[0] if self.is_script else "hvdtrain.cli"

    def argv(self, workers: int, options: Mapping[str, object]) -> list[str]:
        """Return the command of a run: one process without Horovod, or several under horovodrun."""
        command = [*self.words]
        if not self.is_script:
            flags = (f"{flag_of(name)}={value}" for name, value in options.items())
            command = [*module_argv("hvdtrain.cli"), "train", *self.words, *flags]
        if workers == 1:
            return command
        return horovodrun_argv(command, workers, self.controller)

    def environment(self, options: Mapping[str, object]) -> dict[str, str]:
        """Return the variables of a run."""
        if not self.is_script:
            return {}
        loop_options = json.loads(os.environ.get(LOOP_OPTIONS, "{}"))
        return {LOOP_OPTIONS: json.dumps({**loop_options, **options})}


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Yield a folder for runs. At the end it is removed, after the processes started meanwhile."""
    with tempfile.TemporaryDirectory(prefix=f"hvdtrain-{command}-") as scratch, guarded():
        yield Path(scratch)


class Trial:
    """A run directory and the job that writes to it, which is started at once."""

    def __init__(
        self, training: Training, workers: int, folder: Path, name: str, **options: object
    ) -> None:
        """`options`: further ones. The run is continued if `folder` has one of this name."""
        self.path, self._log = folder / name, folder / f"{name}.log"
        self._mark = f"{os.getpid()}-{name}"
        self._options = {"resume": "auto", "output": str(folder), "experiment": name} | options
        self._environment = {
            "PYTHONHASHSEED": "0",  # as of `hvdtrain launch`: sets have one order in all processes
            **os.environ,
            MARK: self._mark,
            "PATH": search_path(os.environ),
        }
        self.start(training, workers)

    def start(self, training: Training, workers: int) -> None:
        """Start or resume the job, in a session of its own."""
        self._training, argv = training, training.argv(workers, self._options)
        environment = self._environment | training.environment(self._options)
        self._job = CommandProcess(argv, self._log, environment)

    def is_running(self) -> bool:
        return self._job.exit_code() is None

    def end(self) -> None:
        """End launcher and workers at once."""
        self._job.end()

    def wait(self) -> None:
        """Wait until launcher and workers have ended."""
        wait_while(self.is_running)
        self._wait_until_gone()

    def wait_for_success(self) -> dict[str, Any]:
        """Wait for the job; return the run's summary. Raises TrainingError, with the last lines of
        the job, unless the run finished.
        """
        self.wait()
        if not self.is_finished():
            raise TrainingError(f"the training itself fails:\n{self.last_lines()}")
        return self.summary()

    def is_finished(self) -> bool:
        return self.summary().get("status") == "finished"

    def summary(self) -> dict[str, Any]:
        """Return the content of the run's summary.json; empty if it has none, or is cut off."""
        with contextlib.suppress(OSError, ValueError):
            return read_json(self.path / SUMMARY)
        return {}

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def last_lines(self) -> str:
        """Return the end of the output: of the workers, if any has written, else of the launcher.

        horovodrun ends a failed job with a long traceback of its own.
        """
        lines = self.log().splitlines()
        of_workers = [line for line in lines if re.match(RANK, line)]
        return "\n".join((of_workers or lines)[-LINES_SHOWN:])

    def refusal(self) -> str | None:
        """Return the message of an ended job that refused its configuration; else None."""
        log = self.log()
        if self._job.exit_code() != EXIT_USAGE and not ENDED.search(log):
            return None
        if match := REFUSED.search(log):
            return "\n".join(line.removeprefix(match[1]) for line in match[2].splitlines())
        return self.last_lines()

    def _wait_until_gone(self) -> None:
        """Wait until launcher and workers have ended; end those left after VANISH_S."""
        wait_while(lambda: bool(marked(MARK, self._mark)), VANISH_S)
        self._job.end()
