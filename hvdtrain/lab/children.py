"""Processes that measurements start: watched, and ended whatever happens.

Those that compute here are forked from one server process that has imported torch, each into a
session of its own; commands, such as horovodrun, are recognised by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.launcher.command import engine_environment
from hvdtrain.launcher.processes import marked

PRELOADED = ["hvdtrain.lab.systems.process", "torch._dynamo"]  # the latter is any optimizer's
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MARK = "HVDTRAIN_CHILD_MARK"  # each command's own
GROUP_MARK = "HVDTRAIN_GROUP_MARK"  # of all that is started while they are guarded
ALL_IS_WELL = b"."
POLL_S = 0.02
GRACE_S = 3.0  # for the others to say what they met, once one has failed
LINES_SHOWN = 12

Result = dict[str, Any]


class ChildFailure(Exception):
    """A child did not come to its end; the text says why."""


class Child(Protocol):
    """A process that was started here."""

    def exit_code(self) -> int | None:
        """None: it is still running."""

    def processes(self) -> list[int]:
        """The ids of it, and of all that it has started."""

    def end(self) -> None:
        """It, and all that it has started, are gone on return."""


class Forked:
    """A process of the fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.exitcode

    def processes(self) -> list[int]:
        return [self._process.pid] if self._process.pid else []

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class Commanded:
    """A command that may start processes in sessions of their own, as horovodrun does: they bear
    a mark.
    """

    def __init__(
        self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: horovodrun's, unless given. Raises ChildFailure where the command is not
        installed.
        """
        self._mark = secrets.token_hex(8)
        environment = environment or engine_environment(os.environ, {}, None)
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    argv,
                    env={**environment, **_group(), MARK: self._mark},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise ChildFailure(
                    f"{error.filename} is not there. Run launch/setup, or install "
                    "hvdtrain[distributed]"
                ) from error

    def exit_code(self) -> int | None:
        return self._process.poll()

    def processes(self) -> list[int]:
        return list(marked(MARK, self._mark))

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        end_marked(MARK, self._mark)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Whatever is started within ends with this process, also where it is killed, and also if it is
    stopped and could not notice: another process looks after that.
    """
    mark = secrets.token_hex(8)
    argv = [sys.executable, "-m", __name__, mark]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin is not None
        os.environ[GROUP_MARK] = mark
        try:
            yield
            guard.stdin.write(ALL_IS_WELL)
        finally:
            del os.environ[GROUP_MARK]
            guard.stdin.close()  # without that word it ends what was left when an error came


def guard(mark: str) -> None:
    """Until the other process ends, or tells that all is well."""
    if sys.stdin.buffer.read() != ALL_IS_WELL:
        end_marked(GROUP_MARK, mark)


def _group() -> dict[str, str]:
    return {name: os.environ[name] for name in (GROUP_MARK,) if name in os.environ}


def fork_server() -> ForkServerContext:
    """Starts it; it imports while we go on. Whatever is forked computes with one thread."""
    os.environ.update(ONE_THREAD)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


def watch(children: Sequence[Child], folder: Path, deadline: float, limit_s: float) -> None:
    """Until all have ended well. Raises ChildFailure when one has not, or time is over."""
    while not all_ended(children, folder):
        if time.monotonic() > deadline:
            raise ChildFailure(f"no end after {limit_s:g} s (--time-limit-s)")
        time.sleep(POLL_S)


def all_ended(children: Sequence[Child], folder: Path) -> bool:
    """Whether all have ended well. Raises ChildFailure when one has not."""
    codes = [child.exit_code() for child in children]
    if any(codes):
        _wait_for_the_others(children)
        raise ChildFailure(explain(folder, codes))
    return all(code == 0 for code in codes)


def _wait_for_the_others(children: Sequence[Child]) -> None:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(child.exit_code() is None for child in children):
        time.sleep(POLL_S)


def explain(folder: Path, codes: Sequence[int | None]) -> str:
    """What the first process to fail has said; of one that could not speak, its last lines."""
    told = [read_json(path) for path in folder.glob("process-*.json")]
    failed = [content for content in told if "error" in content]
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
    """They are gone on return."""
    while left := marked(name, mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    guard(sys.argv[1])
