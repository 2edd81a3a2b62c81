"""The processes of one system: started, watched, and ended whatever happens.

All but horovodrun's are forked from one server process that has imported torch, each into a
session of its own.
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
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.launcher.command import Engine, engine_environment, horovodrun_argv
from hvdtrain.launcher.processes import marked
from hvdtrain.strategies.contract import Spec, Strategy
from hvdtrain.strategies.process import run_forked

PRELOADED = ["hvdtrain.strategies.process", "torch._dynamo"]  # the latter is any optimizer's
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MARK = "HVDTRAIN_COMPARE_MARK"
POLL_S = 0.02
GRACE_S = 3.0  # for the others to say what they met, once one has failed
START_TIMEOUT_S = 60
LINES_SHOWN = 12

Result = dict[str, Any]


class SystemFailure(Exception):
    """A system did not come to its end; the text says why."""


class Child(Protocol):
    """A process that was started here."""

    def exit_code(self) -> int | None:
        """None: it is still running."""

    def end(self) -> None:
        """It, and all that it has started, are gone on return."""


class Forked:
    """A process of the fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.exitcode

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class Commanded:
    """horovodrun, which starts processes in sessions of their own: they bear a mark."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        """Raises SystemFailure where it is not installed."""
        self._mark = secrets.token_hex(8)
        environment = engine_environment(os.environ, {}, None) | {MARK: self._mark}
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise SystemFailure(
                    f"{error.filename} is not there. Run launch/setup, or install "
                    "hvdtrain[distributed]"
                ) from error

    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        while left := marked(MARK, self._mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def fork_server() -> ForkServerContext:
    """Starts it; it imports while we go on. Whatever is forked computes with one thread."""
    os.environ.update(ONE_THREAD)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


def run_system(
    spec: Spec, strategy: type[Strategy], controller: str, context: ForkServerContext
) -> list[Result]:
    """What each process of the system has measured. Raises SystemFailure."""
    folder = Path(spec.folder)
    folder.mkdir(mode=0o700)
    path = folder / "spec.json"
    path.write_text(spec.as_text(), "utf-8")
    deadline = time.monotonic() + spec.time_limit_s
    children: list[Child] = []
    try:
        if strategy.under_horovodrun:
            command = [sys.executable, "-m", "hvdtrain.strategies.process", str(path)]
            argv = horovodrun_argv(_engine(spec, controller), command)
            children.append(Commanded(argv, folder / "process-0.log"))
        else:
            for number in range(len(strategy.processes(spec))):
                children.append(_fork(context, path, number))
        _watch(children, folder, deadline, spec.time_limit_s)
    finally:
        for child in children:
            child.end()
    numbers = range(len(strategy.processes(spec)))
    return [_read(folder / f"process-{number}.json") for number in numbers]


def _engine(spec: Spec, controller: str) -> Engine:
    hosts = (("localhost", spec.workers),)
    return Engine(spec.workers, controller, hosts, None, START_TIMEOUT_S)


def _fork(context: ForkServerContext, spec_path: Path, number: int) -> Forked:
    log = spec_path.parent / f"process-{number}.log"
    process = context.Process(target=run_forked, args=(str(spec_path), number, str(log)))
    process.start()
    return Forked(process)


def _watch(children: Sequence[Child], folder: Path, deadline: float, limit_s: float) -> None:
    """Until all have ended well. Raises SystemFailure when one has not, or time is over."""
    while True:
        codes = [child.exit_code() for child in children]
        if any(codes):
            _wait_for_the_others(children)
            raise SystemFailure(explain(folder, codes))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise SystemFailure(f"no end after {limit_s:g} s (--time-limit-s)")
        time.sleep(POLL_S)


def _wait_for_the_others(children: Sequence[Child]) -> None:
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(child.exit_code() is None for child in children):
        time.sleep(POLL_S)


def explain(folder: Path, codes: Sequence[int | None]) -> str:
    """What the first process to fail has said; of one that could not speak, its last lines."""
    told = [_read(path) for path in folder.glob("process-*.json")]
    failed = [content for content in told if "error" in content]
    if failed:
        return str(min(failed, key=lambda content: content["failed_at"])["error"])
    number, code = next((n, code) for n, code in enumerate(codes) if code)
    log = folder / f"process-{number}.log"
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"process {number} ended with code {code}", *lines[-LINES_SHOWN:]])


def _read(path: Path) -> Result:
    content: Result = json.loads(path.read_text("utf-8"))
    return content
