"""How the kernel shares a core between threads that compute and threads that exchange."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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


def _threads() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}
