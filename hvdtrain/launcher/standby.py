"""A process kept ready on a host: it has imported what workers import, and is forked to be one.

    guard -- environment, streams --> standby --fork--> agent --fork--> worker
      |<---- its id, at last its exit code ---------------|

Most of the start of a worker is the import of its libraries. In a job that may be restarted, each
host imports them once, for all its workers and all starts. The guard of a host's first worker (see
hvdtrain/launcher/guard.py) starts this process, which ends with the job's folder on the host.

Some variables are read by libraries when they are loaded: workers for which one of them differs
have another standby. Nothing of a GPU is touched before the fork.
"""

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.errors import EXIT_FAILED, EXIT_OK
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher import agent
from hvdtrain.launcher.guard import OWN_COMMAND, STREAMS, end_with_guard
from hvdtrain.launcher.job_folder import is_in_use
from hvdtrain.launcher.processes import ARGUMENTS, descendants, reap, send_signal, stat_of
from hvdtrain.launcher.protocol import Orders
from hvdtrain.launcher.worker import (
    WorkerProcess,
    become_subreaper,
    die_with,
    kill_descendants,
)
from hvdtrain.pulse import PULSE_FD

# With what they import, all that `train` needs until its first step.
MODULES = (
    *("hvdtrain.run.training", "hvdtrain.train.loop", "hvdtrain.exchange.horovod"),
    *("torch.utils.tensorboard", "yaml"),
)
TICK_S, BACKLOG = 0.5, 1024
REQUEST_S = 3.0  # for a guard to send its request

Role = Callable[[], int]  # what a fork does; returns its exit code


def import_all() -> bool:
    """Import the modules of workers; return whether this process may be forked now."""
    gc.disable()  # no garbage arises
    for name in MODULES:
        import_module(name)
    import_module(OWN_COMMAND[-1]).make_parser()  # imports every command
    gc.collect()
    gc.freeze()  # the memory of all this stays shared with forks
    gc.enable()
    return threading.active_count() == 1 and not sys.modules["torch"].cuda.is_initialized()


class Standby:
    """The process in which everything is imported, and its forks."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        """`folder`: that of the job, with which this process ends."""
        self._listener, self._folder = listener, folder
        self._agents: set[int] = set()

    def wait(self) -> Role:
        """Fork an agent and its worker for each guard; return what a fork does, and in this process
        at the end of the job.
        """
        while True:
            arrived, _, _ = select.select([self._listener], [], [], TICK_S)
            self._reap()
            if not is_in_use(self._folder):
                return lambda: EXIT_OK
            if arrived and (role := self._fork()):
                return role

    def _fork(self) -> Role | None:
        """Take a guard's request; return the role of a fork, and None in this process."""
        guard, _ = self._listener.accept()
        streams: Sequence[int] = ()
        try:
            guard.settimeout(REQUEST_S)
            _, streams, _, _ = socket.recv_fds(guard, 1, len(STREAMS))
            with guard.makefile("rb") as file:
                conditions = json.loads(file.readline())
            pid = os.fork()
        except (OSError, ValueError):  # it is gone, or no process could be made
            pid = -1
        if not pid:
            self._listener.close()
            return _fork_worker(guard, streams, conditions)
        if pid > 0:
            self._agents.add(pid)
        guard.close()
        for stream in streams:
            os.close(stream)
        return None

    def _reap(self) -> None:
        """Forget agents that have ended; kill what one that was killed has left."""
        codes: dict[int, int] = {}
        reap(codes)
        self._agents -= codes.keys()
        if any(codes.values()):
            kept = [*self._agents, *(pid for each in self._agents for pid in descendants(each))]
            send_signal(signal.SIGKILL, {*descendants(os.getpid())}.difference(kept))


def _fork_worker(guard: socket.socket, streams: Sequence[int], conditions: dict[str, Any]) -> Role:
    """Fork the worker before the agent has anything that it must not have; return their roles."""
    for stream, number in zip(streams, STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(conditions["umask"])
    with contextlib.suppress(OSError):  # cores that this process may not use
        os.sched_setaffinity(0, conditions["affinity"])
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        guard.close()
        ours.close()
        return partial(_be_worker, theirs, parent)
    theirs.close()
    return partial(_be_agent, guard, conditions, ForkedWorker(pid, ours))


@dataclass(frozen=True)
class ForkedWorker:
    """A fork that waits to become a worker."""

    pid: int
    instructions: socket.socket

    def start(
        self, orders: Orders, variables: dict[str, str], output: int, pulse: int
    ) -> WorkerProcess:
        """Let it become the worker. Raises OSError."""
        text = json.dumps([orders.command, orders.folder, variables])
        with self.instructions as instructions:
            socket.send_fds(instructions, [b"\n"], [output, pulse])
            instructions.sendall(text.encode())
        return WorkerProcess(self.pid)


def _be_agent(guard: socket.socket, conditions: dict[str, Any], worker: ForkedWorker) -> NoReturn:
    """Be the agent in the place of a child of the guard, to its end."""
    os.setsid()
    become_subreaper()
    _take_environment(conditions["environment"])
    os.chdir("/")
    show_command([*module_argv("hvdtrain.launcher.agent"), conditions["job"]])
    code = EXIT_FAILED
    with contextlib.suppress(OSError):  # the guard is gone
        guard.settimeout(None)
        guard.sendall(f"{os.getpid()}\n".encode())
        end_with_guard(guard)
        code = agent.run(conditions["job"], worker.start)
    kill_descendants()  # the fork as well, if it never became a worker
    with contextlib.suppress(OSError):
        guard.sendall(f"{code}\n".encode())
    os._exit(code)  # the end of all that it has imported would take longer


def _be_worker(instructions: socket.socket, parent: int) -> int:
    """Wait to become the worker; run its command, and return the exit code."""
    die_with(parent)
    _, pipes, _, _ = socket.recv_fds(instructions, 1, 2)
    if not pipes:  # the agent has not joined the job
        os._exit(EXIT_FAILED)
    output, pulse = pipes
    with instructions, instructions.makefile("rb") as file:
        command, folder, variables = json.loads(file.read())
    os.setsid()
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), STREAMS[0])
    for stream in STREAMS[1:]:
        os.dup2(output, stream)
    os.close(output)
    os.chdir(folder)
    _take_environment(variables | {PULSE_FD: str(pulse)})
    sys.modules["numpy"].random.seed()  # else all workers would draw the same numbers
    show_command([*command, f"[rank {variables['RANK']}]"])
    sys.argv = command[len(OWN_COMMAND) - 1 :]
    runpy.run_module(OWN_COMMAND[-1], run_name="__main__", alter_sys=True)
    return 0


def _take_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def show_command(words: Sequence[str]) -> None:
    """Let `ps` show these words as the command of this process, as far as its own one was long."""
    start, end = map(int, stat_of("self")[ARGUMENTS])
    text = os.fsencode("\0".join(words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """Listen within the context at a socket in the job's folder, which only its user reaches."""
    with socket.socket(socket.AF_UNIX) as listener:
        beside = f"{address}.{os.getpid()}"
        listener.bind(beside)
        listener.listen(BACKLOG)
        Path(beside).rename(address)
        yield listener


def main() -> int:
    """Import everything, then be forked until the job ends; return the exit code of a fork."""
    address = sys.argv[1]
    become_subreaper()
    with listening(address) as listener:  # guards wait for the imports
        if not import_all():
            return EXIT_FAILED
        role = Standby(listener, Path(address).parent).wait()
    return role()


if __name__ == "__main__":
    sys.exit(main())
