"""How the kernel shares a core between threads that compute and threads that exchange."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Where a thread spins in sched_yield(), as Open MPI's does while it waits, and another one of the
# same session or container wakes up every 0.1 ms, Linux 6.18 gives the two of them several times
# their share of the cores, and the other workers starve, for minutes. Every 1 ms it is fair.
SHORTEST_REST_S, LONGEST_REST_S = 1e-4, 2e-3
SHORT_WAIT_S = 0.02  # as with a core for each worker: it may be looked at often
REST_OF_WAIT = 0.05  # a longer wait is looked at less often: this much of it may be lost
COARSE_S = 1e-3
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30  # linux/prctl.h


@contextlib.contextmanager
def new_threads_do_not_push() -> Iterator[None]:
    """Threads that start within wait for their turn when they wake up (SCHED_BATCH, sched(7)).

    Horovod's thread wakes up every cycle. Where workers fill the cores it would push the one aside
    that computes each time, and the other ranks' threads with which it must agree are seldom
    running then: it waits for them on the time of computing. Its share of the core stays the same,
    and on a free core nothing changes. Where the user has chosen another class, that stays.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # it has ended, or this is not allowed here
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def rest_until(done: Callable[[], bool]) -> None:
    """Wait for a condition, looking at it seldom enough to leave the cores to others."""
    began_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began_s
        rest_s = SHORTEST_REST_S if waited_s < SHORT_WAIT_S else REST_OF_WAIT * waited_s
        time.sleep(min(rest_s, LONGEST_REST_S))


@contextlib.contextmanager
def coarse_timer() -> Iterator[None]:
    """Let each sleep of this thread take up to COARSE_S more, for loops of others that poll."""
    library = ctypes.CDLL(None)
    before_ns = library.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    library.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(round(COARSE_S * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(max(before_ns, 1)), 0, 0, 0)


def _threads() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}
