"""The process that horovodrun starts for a worker. It starts the agent, and outlives it.

    horovodrun -- guard -- agent -- worker (often a shell) -- what that has started

Both are subreapers: a process whose parent has ended becomes a child of the agent, or of the guard
once the agent is gone. So whichever of the two is killed, the other one finds all that the worker
has started, also in sessions of its own, and kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from hvdtrain.errors import EXIT_FAILED
from hvdtrain.launcher.processes import descendants, reap

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
KILL_S = 5.0  # a process that the kernel holds in a system call may take longer: it is left to it
ROUND_S = 0.02


def run_guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process. Returns its exit code, when nothing it has started is left."""
    become_subreaper()
    guard = os.getpid()
    agent = os.fork()
    if not agent:
        os.setsid()  # mpirun kills the guard's whole group
        become_subreaper()
        _end_with(guard)
        return work()

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)
            os.kill(agent, signal.SIGCONT)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    codes: dict[int, int] = {}
    while agent not in codes:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        reap(codes)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    kill_descendants()
    return codes[agent] if codes[agent] >= 0 else 128 - codes[agent]


def become_subreaper() -> None:
    """Make this process the parent of those below it whose parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill all processes below this one, and wait for their ends."""
    deadline = time.monotonic() + KILL_S
    while reap({}) and time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)


def _end_with(guard: int) -> None:
    """End this process, and all below it, as soon as its parent has ended.

    By SIGCONT: it also reaches a process that has been stopped.
    """

    def look(*_: object) -> None:
        if os.getppid() != guard:
            kill_descendants()
            os._exit(EXIT_FAILED)

    signal.signal(signal.SIGCONT, look)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    look()  # it may have ended already
