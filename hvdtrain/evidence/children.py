"""Child processes of measurements: started, watched, and ended on every way out.

Commands, such as horovodrun, are identified by a mark in their environment.
"""

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import horovodrun_environment
from hvdtrain.launcher.processes import kill_all, marked

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MARK = "HVDTRAIN_CHILD_MARK"  # identifies one command
GROUP_MARK = "HVDTRAIN_GROUP_MARK"  # identifies everything started within `guarded`
ALL_IS_WELL = b"."
POLL_S = 0.02
GRACE_S = 3.0  # for the others to report their errors, once one has failed
LINES_SHOWN = 12
LATE = "no end after {:g} s (--time-limit-s)"

Result = dict[str, Any]


class ChildFailure(Exception):
    """The failure of a child to finish, with the reason as its text."""


class Child(Protocol):
    """A process that was started, with those that it has started."""

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process is running."""

    def processes(self) -> list[int]:
        """Return the ids of this process and of all that it has started."""

    def end(self) -> None:
        """End this process and all that it has started; return once they are gone."""


class CommandProcess:
    """A command and the processes that it starts, identified by a mark in their environment.

    They may be in sessions of their own, as those of horovodrun.
    """

    def __init__(
        self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the command. Raises ChildFailure where it is not installed.

        `environment`: by default the one that horovodrun is given.
        """
        self._mark = secrets.token_hex(8)
        environment = environment or horovodrun_environment(os.environ, {}, None)
        group = {name: os.environ[name] for name in (GROUP_MARK,) if name in os.environ}
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    argv,
                    env={**environment, **group, MARK: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise ChildFailure(
                    f"{error.filename} is not installed. Run hvdtrain install-horovod"
                ) from error

    def exit_code(self) -> int | None:
        return self._process.poll()

    def processes(self) -> list[int]:
        return list(marked(MARK, self._mark))

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the command itself, if it runs."""
        self._process.terminate()

    def end(self) -> None:
        end_marked(MARK, self._mark)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Ensure that whatever is started in this context ends with this process.

    A separate guard process ends them, also where this one is killed or stopped.
    """
    mark = secrets.token_hex(8)
    with subprocess.Popen(
        [*module_argv(__name__), mark], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        assert guard.stdin is not None
        os.environ[GROUP_MARK] = mark
        try:
            yield
            guard.stdin.write(ALL_IS_WELL)
        finally:
            os.environ.pop(GROUP_MARK, None)  # another thread may have removed it
            guard.stdin.close()  # after an error, without ALL_IS_WELL, the guard ends the rest


def run_command(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    time_limit_s: float,
    late: str = LATE,
) -> None:
    """Run a command to its end, with one compute thread per process and its log in `folder`.

    `late`: says that the seconds are over. Raises ChildFailure.
    """
    deadline = time.monotonic() + time_limit_s
    child = CommandProcess(argv, folder / "process-0.log", {**environment, **ONE_THREAD})
    try:
        watch([child], folder, deadline, late.format(time_limit_s))
    finally:
        child.end()


def watch(children: Sequence[Child], folder: Path, deadline: float, late: str) -> None:
    """Wait until all have exited with 0. Raises ChildFailure on a failure, and with the text `late`
    at `deadline`.
    """
    while not all_ended(children, folder):
        if time.monotonic() > deadline:
            raise ChildFailure(late)
        time.sleep(POLL_S)


def wait_while(condition: Callable[[], bool], limit_s: float = math.inf) -> None:
    """Wait while the condition holds, at most for `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and condition():
        time.sleep(POLL_S)


def all_ended(children: Sequence[Child], folder: Path) -> bool:
    """Return whether all have exited with 0. Raises ChildFailure when one has failed."""
    codes = [child.exit_code() for child in children]
    if any(codes):
        wait_while(lambda: any(child.exit_code() is None for child in children), GRACE_S)
        raise ChildFailure(explain(folder, codes))
    return all(code == 0 for code in codes)


def explain(folder: Path, codes: Sequence[int | None]) -> str:
    """Return the first error reported; where there is none, exit code and end of a log."""
    reports = map(read_json, folder.glob("process-*.json"))
    failed = [content for content in reports if "error" in content]
    if failed:
        return str(min(failed, key=lambda content: content["failed_at"])["error"])
    number, code = next((n, code) for n, code in enumerate(codes) if code)
    log = folder / f"process-{number}.log"
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"process {number} ended with code {code}", *lines[-LINES_SHOWN:]])


def read_json(path: Path) -> Result:
    content: Result = json.loads(path.read_text("utf-8"))
    return content


def end_marked(name: str, mark: str) -> None:
    """Kill all processes with this mark; return once they are gone."""
    began_s = time.monotonic()
    while left := marked(name, mark):
        kill_all([*left], began_s)
        time.sleep(POLL_S)


if __name__ == "__main__":  # the guard, which waits for the end of the guarded process
    if sys.stdin.buffer.read() != ALL_IS_WELL:
        end_marked(GROUP_MARK, sys.argv[1])
