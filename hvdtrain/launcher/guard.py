"""The process that horovodrun or mpirun starts for a rank: it guards the agent, and ends with it.

    horovodrun --> guard --> agent --> worker

The agent is a child of the guard or, in a job that may be restarted, a fork of the host's standby
(hvdtrain/launcher/standby.py), which the guard of its first worker starts. Whichever of guard and
agent ends, the other one and the worker end as well.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.errors import EXIT_FAILED, shell_code
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import HOROVODRUN_PREFIXES
from hvdtrain.launcher.processes import reap, send_signal
from hvdtrain.launcher.protocol import Orders
from hvdtrain.launcher.worker import PR_SET_PDEATHSIG, become_subreaper, kill_descendants
from hvdtrain.pulse import MEMORY_DIR, RESTART, RING_TOKEN

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
BEGINNING_S = 10.0  # for a standby to listen, after which it imports
ANSWER_S = 60.0  # for it to import and to fork; then the agent is started as usual
ROUND_S = 0.02
LONGEST_ADDRESS_BYTES = 90  # of a socket 107, and the standby adds to it while it begins
OWN_COMMAND = module_argv("hvdtrain.cli")
ROOM_BYTES = 4096
# The beginnings of the names of variables that libraries read when they are loaded.
READ_AT_LOAD = (
    *("ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "HIP_", "KMP_", "LANG", "LC_", "LD_"),
    *("MALLOC_", "MKL", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TZ"),
)
OF_START = (
    *HOROVODRUN_PREFIXES,
    *("LOCAL_", "MASTER_", "RANK", "WORLD_SIZE", RESTART, RING_TOKEN, "HVDTRAIN_MASTER_"),
)
STREAMS = (0, 1, 2)
F_SETSIG = 10  # linux/fcntl.h, which Python's fcntl does not name before 3.14


def run_guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process; return its exit code once all its descendants are gone."""
    become_subreaper()
    guard = os.getpid()
    agent = os.fork()
    if not agent:
        os.setsid()  # mpirun kills the guard's whole group
        become_subreaper()
        _end_with(guard)
        return work()
    _pass_on_signals(agent)
    codes: dict[int, int] = {}
    while agent not in codes:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        reap(codes)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    kill_descendants()
    return shell_code(codes[agent])


def is_of_standby(orders: Orders, environment: Mapping[str, str]) -> bool:
    """Return whether a standby may become this worker: a command of hvdtrain, in a job that may be
    restarted.
    """
    is_own = orders.command[: len(OWN_COMMAND)] == OWN_COMMAND
    return MEMORY_DIR in environment and is_own and Path(orders.folder).is_dir()


def run_in_standby(job: str, environment: Mapping[str, str]) -> int | None:
    """Let the host's standby run the agent of a job; return its exit code.

    `environment`: the worker's. None: there is no standby, and nothing is started.
    """
    address = socket_of(environment)
    with socket.socket(socket.AF_UNIX) as standby:
        try:
            _connect(standby, address, environment)
            standby.settimeout(ANSWER_S)
            socket.send_fds(standby, [b"\n"], STREAMS)
            standby.sendall(json.dumps(_conditions(job)).encode() + b"\n")
            answers = standby.makefile("rb")
            agent = int(answers.readline())  # once it has imported everything
        except (OSError, ValueError):
            Path(address).unlink(missing_ok=True)  # not to be waited for again
            return None
        standby.settimeout(None)
        _pass_on_signals(agent)
        with suppress(OSError, ValueError):
            return int(answers.readline())
        return shell_code(-signal.SIGKILL)  # it has not left an exit code


def _connect(standby: socket.socket, address: str, environment: Mapping[str, str]) -> None:
    """Connect to the standby; the first worker of a host starts it. Raises OSError."""
    deadline, is_first = time.monotonic() + BEGINNING_S, environment["LOCAL_RANK"] == "0"
    if len(os.fsencode(address)) > LONGEST_ADDRESS_BYTES or not Path(address).parent.is_dir():
        raise OSError(errno.ENAMETOOLONG, address)
    while True:
        try:
            standby.connect(address)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        if is_first:
            is_first = False
            start_apart(standby_argv(environment), without_rank(environment))
        time.sleep(ROUND_S)


def socket_of(environment: Mapping[str, str]) -> str:
    """Return the socket of the standby that has loaded its libraries as this worker would."""
    loaded = [item for item in sorted(environment.items()) if item[0].startswith(READ_AT_LOAD)]
    digest = hashlib.sha256(json.dumps(loaded).encode()).hexdigest()
    return str(Path(environment[MEMORY_DIR]).with_name(f"standby-{digest[:16]}"))


def standby_argv(environment: Mapping[str, str]) -> list[str]:
    """Return the command of a standby, with room for that of a worker, which takes its place."""
    argv = module_argv("hvdtrain.launcher.standby")
    return [*argv, socket_of(environment), " " * ROOM_BYTES]


def start_apart(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a process that is no descendant of this one, which horovodrun would end with it."""
    pid = os.fork()
    if not pid:
        with suppress(OSError):
            os.setsid()
            nothing = subprocess.DEVNULL
            subprocess.Popen(
                argv, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/"
            )
        os._exit(0)
    os.waitpid(pid, 0)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are neither of one rank nor of one start."""
    return {name: text for name, text in environment.items() if not name.startswith(OF_START)}


def _conditions(job: str) -> dict[str, Any]:
    """Return what a process inherits from its parent, for a fork of another process."""
    umask = os.umask(0)
    os.umask(umask)
    affinity = sorted(os.sched_getaffinity(0))
    return {"job": job, "environment": dict(os.environ), "umask": umask, "affinity": affinity}


def end_with_guard(connection: socket.socket) -> None:
    """End this process and its descendants as soon as the guard closes the connection."""

    def is_closed() -> bool:
        with suppress(BlockingIOError):
            return not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        return False

    look = _end_if(is_closed)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, F_SETSIG, signal.SIGCONT)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    look()


def _end_with(guard: int) -> None:
    """End this process and its descendants as soon as its parent `guard` has ended."""
    look = _end_if(lambda: os.getppid() != guard)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    look()  # the guard may have ended already


def _end_if(is_alone: Callable[[], bool]) -> Callable[..., None]:
    """Return a function that ends this process and its descendants if the guard is gone; SIGCONT,
    which reaches a suspended process too, calls it.
    """

    def look(*_: object) -> None:
        if is_alone():
            kill_descendants()
            os._exit(EXIT_FAILED)

    signal.signal(signal.SIGCONT, look)
    return look


def _pass_on_signals(agent: int) -> None:
    """Pass on the signals that stop a job; ignore that of a closed terminal."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send_signal(number, [agent])
        send_signal(signal.SIGCONT, [agent])

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
