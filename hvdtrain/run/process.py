"""The process of a worker: a quick start, memory kept between steps, reports of failures."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from hvdtrain import cgroups
from hvdtrain.errors import EXIT_FAILED, HvdtrainError, Stopped
from hvdtrain.log import complain
from hvdtrain.pulse import Pulse
from hvdtrain.topology import Topology

if TYPE_CHECKING:  # without torch, for a quick start
    from hvdtrain.exchange import Exchange

# horovodrun ends all workers when the first one ends. Rank 0 prints and ends at once, so that other
# ranks with the same failure are ended before they print it again.
GRACE_S = 3.0
LAST_S = 1.5  # less than the time before the deadline at which a stop is given up

IMPORTING = (100_000, 50, 100)  # thresholds of the garbage collector
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h, described in mallopt(3)
NEVER, NONE = -1, 0
CHOSEN_BY_USER = (
    *("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"),
)

# Called with the error before a process ends in the middle of a script.
observers_of_failure: list[Callable[[Exception], None]] = []


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch within the context: the garbage collector hardly looks for what is not there.

    Imported modules stay until the end, so collections neither then nor at the end of the process
    free anything of them. A process with torch starts and ends with a quarter less computing.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*IMPORTING)
    yield
    gc.freeze()
    gc.set_threshold(*usual)
    atexit.register(gc.freeze)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; return whether that was possible.

    A training step frees its activations and gradients, and the next allocates as much. glibc
    returns large blocks, and the free end of its heap, to the kernel, which must then clear and map
    every page again. With this setting the process keeps its peak memory until it ends. Nothing is
    changed if the user has set glibc's own variables, or with another C library.
    """
    if any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_TRIM_THRESHOLD, NEVER) and mallopt(M_MMAP_MAX, NONE))


def report_failure(error: Exception, topology: Topology) -> int:
    """Print the error, with a traceback unless it is an HvdtrainError; return the exit code.

    Ranks other than 0 wait for GRACE_S first, so that a failure of all ranks is printed once.
    """
    pulse = Pulse.from_environment()
    pulse.end(error)
    for observer in observers_of_failure:
        observer(error)
    # Under the launcher workers end one by one.
    if topology.rank > 0 and not (pulse.is_watched and isinstance(error, Stopped)):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
        time.sleep(GRACE_S)
    location = f" on {topology.rank_and_host}" if topology.size > 1 else ""
    if isinstance(error, HvdtrainError):
        kind = "" if isinstance(error, Stopped) else ": error"
        complain(f"hvdtrain{kind}{location}: {error}")
        return error.exit_code
    # A new process (EAGAIN) or thread was refused.
    refused = isinstance(error, BlockingIOError) or "can't start new thread" in str(error)
    if refused and (reason := cgroups.explain_full()):
        complain(f"hvdtrain: error{location}: {type(error).__name__}: {error}: {reason}")
        return EXIT_FAILED
    trace = "".join(traceback.format_exception(error)).rstrip()
    complain(f"hvdtrain: failed{location}: {type(error).__name__}: {error}\n{trace}")
    return EXIT_FAILED


def leave_together(error: Exception, exchange: Exchange, topology: Topology) -> NoReturn:
    """Print the error of one of several workers, and end it at once with its exit code.

    Rank 0 fails too, once another rank is gone, and then writes what is to be kept of a run.
    """
    exit_code = report_failure(error, topology)
    if exchange.rank > 0:
        exchange.abandon()
    leave_at_once(exit_code)


def leave_at_once(exit_code: int, last: Callable[[], None] | None = None) -> NoReturn:
    """End the process without exit handlers: Horovod's and MPI's would wait for other ranks.

    `last`: called first, in a thread that has LAST_S: a disk that hangs must not keep the process.
    """
    if last:
        thread = threading.Thread(target=last, name="last", daemon=True)
        thread.start()
        thread.join(LAST_S)
        if thread.is_alive():  # it may hold the locks of these streams
            os._exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
