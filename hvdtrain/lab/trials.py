"""Training runs of commands that verify a configuration: started as commands, in a scratch folder.

A command such as verify-resume chooses folder, name and resumption of its runs itself; the other
flags of `train` are the user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.errors import EXIT_USAGE, TrainingError
from hvdtrain.lab.children import Commanded, guarded
from hvdtrain.launcher.command import search_path
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


def train_argv(train_flags: Sequence[str], workers: int, controller: str) -> list[str]:
    """Return the command of a run: one process without Horovod, or several under horovodrun."""
    command = [sys.executable, "-m", "hvdtrain.cli", "train", *train_flags]
    if workers == 1:
        return command
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    return [horovodrun, "-np", str(workers), f"--{controller}", *command]


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Yield a folder for runs. At the end it is removed, after the processes started meanwhile."""
    prefix = f"hvdtrain-{command}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as scratch, guarded():
        yield Path(scratch)


class Trial:
    """A run directory and the job that writes to it, which is started at once."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        """`command`: of `train_argv`. The run is continued if `folder` has one of this name."""
        self.path = folder / name
        self._log = folder / f"{name}.log"
        self._mark = f"{os.getpid()}-{name}"
        self._place = ["--output", str(folder), "--experiment", name]
        self._environment = os.environ | {MARK: self._mark, "PATH": search_path(os.environ)}
        self.start(command)

    def start(self, command: Sequence[str]) -> None:
        """Start or resume the job, in a session of its own; `command`: of `train_argv`."""
        resume = [] if "--resume" in command else ["--resume", "auto"]
        argv = [*command, *resume, *self._place]
        self._job = Commanded(argv, self._log, self._environment)

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
        found: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.path / "summary.json").read_text("utf-8"))
        return found

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
            if found := REFUSED.match(line):
                text, prefix = [line[found.end() :]], found[1] or ""
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
