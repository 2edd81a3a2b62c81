"""Training runs of commands that verify a configuration: started as commands, in a scratch folder.

A command such as verify-resume chooses folder, name and resumption of its runs itself; the other
flags of `train`, or options of a script's loop, are the user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.options import LOOP_OPTIONS
from hvdtrain.errors import EXIT_USAGE, TrainingError
from hvdtrain.evidence.children import CommandProcess, guarded
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import search_path
from hvdtrain.launcher.processes import marked

MARK = "HVDTRAIN_TRIAL"
POLL_S = 0.02
VANISH_S = 30.0
LINES_SHOWN = 15
CHOSEN = ("--output", "--experiment", "--resume")
# horovodrun and mpirun put the rank before each line of a worker.
RANK = r"\[[\d,]+\]<std(?:out|err)>:"
REFUSED = re.compile(rf"({RANK})?hvdtrain: error(?: on [^:]+)?: ")
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
            flags = (f"--{name.replace('_', '-')}={value}" for name, value in options.items())
            command = [*module_argv("hvdtrain.cli"), "train", *self.words, *flags]
        if workers == 1:
            return command
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        return [horovodrun, "-np", str(workers), f"--{self.controller}", *command]

    def environment(self, options: Mapping[str, object]) -> dict[str, str]:
        """Return the variables of a run."""
        if not self.is_script:
            return {}
        loop_options = json.loads(os.environ.get(LOOP_OPTIONS, "{}"))
        return {LOOP_OPTIONS: json.dumps({**loop_options, **options})}


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Yield a folder for runs. At the end it is removed, after the processes started meanwhile."""
    prefix = f"hvdtrain-{command}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as scratch, guarded():
        yield Path(scratch)


class Trial:
    """A run directory and the job that writes to it, which is started at once."""

    def __init__(
        self, training: Training, workers: int, folder: Path, name: str, **options: object
    ) -> None:
        """`options`: further ones. The run is continued if `folder` has one of this name."""
        self.path = folder / name
        self._log = folder / f"{name}.log"
        self._mark = f"{os.getpid()}-{name}"
        chosen = {"resume": "auto", "output": str(folder), "experiment": name}
        self._options = chosen | options
        variables = {MARK: self._mark, "PATH": search_path(os.environ)}
        # As `hvdtrain launch` does: sets have one order in all processes.
        self._environment = {"PYTHONHASHSEED": "0"} | os.environ | variables
        self.start(training, workers)

    def start(self, training: Training, workers: int) -> None:
        """Start or resume the job, in a session of its own."""
        self._training = training
        environment = self._environment | training.environment(self._options)
        self._job = CommandProcess(training.argv(workers, self._options), self._log, environment)

    def is_running(self) -> bool:
        return self._job.exit_code() is None

    def end(self) -> None:
        """End launcher and workers at once."""
        self._job.end()

    def wait(self) -> None:
        """Wait until launcher and workers have ended."""
        while self.is_running():
            time.sleep(POLL_S)
        self._wait_until_gone()

    def wait_for_success(self) -> None:
        """Wait for the job. Raises TrainingError, with its last lines, unless the run finished."""
        self.wait()
        if not self.is_finished():
            raise TrainingError(f"the training itself fails:\n{self.last_lines()}")

    def is_finished(self) -> bool:
        return self.summary().get("status") == "finished"

    def summary(self) -> dict[str, str]:
        """Return the content of the run's summary.json; empty if it has none, or is cut off."""
        summary: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((self.path / "summary.json").read_text("utf-8"))
        return summary

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
        lines = log.splitlines()
        for number, line in enumerate(lines):
            if match := REFUSED.match(line):
                text, prefix = [line[match.end() :]], match[1] or ""
                for further in lines[number + 1 :]:
                    if not further.startswith(prefix):
                        break
                    text.append(further.removeprefix(prefix))
                return "\n".join(text)
        return self.last_lines()

    def _wait_until_gone(self) -> None:
        """Wait until launcher and workers have ended; end those left after VANISH_S."""
        deadline = time.monotonic() + VANISH_S
        while marked(MARK, self._mark) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._job.end()
