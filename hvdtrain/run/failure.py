"""Report of a failure: rank 0 prints first, so that a failure of all ranks is printed once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import EXIT_FAILED, HvdtrainError
from hvdtrain.files import open_to_read
from hvdtrain.log import complain
from hvdtrain.topology import Topology

# horovodrun ends all workers when the first one ends. Rank 0 prints and ends at once, so that other
# ranks with the same failure are ended before they print it again.
GRACE_S = 2.0


def report_failure(error: Exception, topology: Topology) -> int:
    """Print the error, with a traceback unless it is an HvdtrainError; return the exit code.

    Ranks other than 0 wait for GRACE_S first.
    """
    if topology.rank > 0:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
        time.sleep(GRACE_S)
    place = f" on {topology.place}" if topology.size > 1 else ""
    if isinstance(error, HvdtrainError):
        complain(f"hvdtrain: error{place}: {error}")
        return error.exit_code
    trace = "".join(traceback.format_exception(error)).rstrip()
    complain(f"hvdtrain: failed{place}: {type(error).__name__}: {error}\n{trace}")
    return EXIT_FAILED


def leave_at_once(exit_code: int) -> None:
    """End the process without exit handlers, which would wait for the other ranks.

    Horovod's and MPI's shutdown need all ranks to take part.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


CAUSE = ".failed"  # in the run directory: the failure of a rank other than 0


def leave_cause(folder: Path, text: str) -> None:
    """Write the cause of a failure to the run directory, for rank 0's summary; the first one stays.

    On rank 0 the failure only shows as a collective that ended early.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with suppress(OSError), os.fdopen(os.open(folder / CAUSE, flags, 0o644), "w") as stream:
        stream.write(text)


def take_cause(folder: Path) -> str | None:
    """Return the text of `leave_cause` and remove its file; None if there is none."""
    path, text = folder / CAUSE, None
    with suppress(OSError), open_to_read(path) as stream:
        text = stream.read()
    with suppress(OSError):
        path.unlink()
    return text


def describe(error: BaseException) -> str:
    """Return type and text of an error, as in summaries."""
    return f"{type(error).__name__}: {error}"
