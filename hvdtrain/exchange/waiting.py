"""Scheduling of waiting threads, so that they leave the cores to computing threads."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdtrain.errors import PeerFailure

# If one thread spins in sched_yield(), as Open MPI's does while it waits, and another one of the
# same session or container wakes up every 0.1 ms, Linux 6.18 gives the two of them several times
# their share of the cores, and the other workers starve for minutes. Every 1 ms it is fair.
SHORTEST_REST_S, LONGEST_REST_S = 1e-4, 2e-3
SHORT_WAIT_S = 0.02  # typical with a core for each worker: poll at the shortest interval
REST_OF_WAIT = 0.05  # after that, poll at intervals of this fraction of the time waited

LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
TRAIN_LIMIT_S = 1800  # default of `train`; others may load or save for long while a rank waits
_LOOK_S = 0.5

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def thread_ids() -> set[int]:
    """Return the ids of this process's threads."""
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


def do_not_push(threads: Iterable[int]) -> set[int]:
    """Give threads of this process the scheduling class SCHED_BATCH (sched(7)); return those that
    have got it: a class chosen by the user is kept.

    Such a thread does not preempt others when it wakes up. Horovod's thread wakes up every cycle.
    If workers occupy all cores, it would preempt a computing thread each time, and then wait for
    the threads of other ranks, which are rarely running at that moment. Its share of the core stays
    the same, and on a free core nothing changes.
    """
    return {thread for thread in threads if _reschedule(thread, os.SCHED_OTHER, os.SCHED_BATCH)}


def push(threads: Iterable[int]) -> None:
    """Undo `do_not_push` for the threads that it has returned."""
    for thread in threads:
        _reschedule(thread, os.SCHED_BATCH, os.SCHED_OTHER)


def _reschedule(thread: int, before: int, after: int) -> bool:
    with contextlib.suppress(OSError):  # the thread has ended, or the call is not permitted
        if os.sched_getscheduler(thread) == before:
            os.sched_setscheduler(thread, after, os.sched_param(0))
            return True
    return False


def rest_until(done: Callable[[], bool]) -> None:
    """Wait for a condition, polling at intervals that grow with the time waited."""
    began_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - began_s
        rest_s = SHORTEST_REST_S if waited_s < SHORT_WAIT_S else REST_OF_WAIT * waited_s
        time.sleep(min(rest_s, LONGEST_REST_S))


class StallWatch:
    """The time that this process has been waiting in its current collective."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._give_up: Callable[[PeerFailure], None] | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a collective, which may be part of another one."""
        before, self._since_s = self._since_s, time.monotonic()
        try:
            yield
        finally:
            self._since_s = None if before is None else time.monotonic()

    def start(self, give_up: Callable[[PeerFailure], None]) -> None:
        """Call `give_up`, in a thread, when a collective exceeds the limit; without one, return.

        A later call replaces it.
        """
        is_watching, self._give_up = self._give_up is not None, give_up
        limit_s = _seconds(LIMIT, 0.0)
        if limit_s <= 0 or os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return
        # Leave Horovod, which can name the ranks, time for its up to three periodic checks.
        patience_s = limit_s + 3 * _seconds(WARNING, 60.0)  # Horovod's default

        def watch() -> None:
            while (since_s := self._since_s) is None or time.monotonic() - since_s < patience_s:
                time.sleep(_LOOK_S)
            assert self._give_up is not None
            self._give_up(
                PeerFailure(
                    f"nothing was received from the other ranks for {patience_s:g} s "
                    f"({LIMIT}={limit_s:g}): one of them has stopped, or its host is frozen"
                )
            )

        if not is_watching:
            threading.Thread(target=watch, name="stall-watch", daemon=True).start()


def waits(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Decorate a method that waits for other ranks, so that its object's `stalls` times it."""

    @functools.wraps(method)
    def counted(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.stalls.waiting():
            return method(self, *args, **kwargs)

    return counted


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    return float(text) if text.isdigit() else default
