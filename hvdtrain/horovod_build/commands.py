"""Commands that are run to their end, with a message that says why one failed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hvdtrain.errors import PreflightError

SHOWN_LINES = 15


def run(
    command: list[str],
    what: str,
    environment: dict[str, str] | None = None,
    timeout_s: float | None = None,
    shown: bool = False,
) -> str:
    """Return the standard output of a command; `shown`: print it instead, as it comes. Raises
    PreflightError, with the last lines, when the command fails or exceeds `timeout_s`. `what`: the
    action, for the message.
    """
    with started(command, what, environment, shown) as finish:
        return finish(timeout_s)


@contextmanager
def started(
    command: list[str],
    what: str,
    environment: dict[str, str] | None = None,
    shown: bool = False,
) -> Iterator[Callable[..., str]]:
    """Start a command, and yield `finish`, which waits for its end and returns its standard output,
    as `run` does; it is killed if the block raises.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise PreflightError(f"could not {what}: {command[0]}: {error.strerror}") from error
    try:
        yield partial(_finish, process, what)
    finally:
        end(process)


def _finish(process: subprocess.Popen[str], what: str, timeout_s: float | None = None) -> str:
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PreflightError(f"could not {what}: timed out after {timeout_s:g} s") from error
    if code := process.returncode:
        tail = "\n".join(((output or "") + errors).strip().splitlines()[-SHOWN_LINES:])
        raise PreflightError(f"could not {what} (exit code {code}):\n{tail}")
    return output or ""


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children, which have a session of their own, unless it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
