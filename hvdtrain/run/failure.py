"""How a failure is told: rank 0 first, so that what all ranks meet is said once."""

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

# horovodrun ends all workers when the first one ends. Rank 0 speaks and ends at once; where it has
# met the same failure, the others are gone before they would say it again.
GRACE_S = 2.0


def tell(error: Exception, topology: Topology) -> int:
    """Print the error for the user; returns the exit code. Only surprises show a traceback."""
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
    """End without waiting for ranks that know nothing of this failure.

    An orderly end would ask them to agree on Horovod's shutdown, or on MPI's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


CAUSE = ".failed"  # in the run directory: what another rank than 0 has failed with


def leave_cause(folder: Path, text: str) -> None:
    """Leave, for rank 0's summary, why it will see a collective break off. The first one counts."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with suppress(OSError), os.fdopen(os.open(folder / CAUSE, flags, 0o644), "w") as stream:
        stream.write(text)


def take_cause(folder: Path) -> str | None:
    """Return what `leave_cause` has left, and remove it; None where there is nothing."""
    path, text = folder / CAUSE, None
    with suppress(OSError), open_to_read(path) as stream:
        text = stream.read()
    with suppress(OSError):
        path.unlink()
    return text


def describe(error: BaseException) -> str:
    """The kind and the text of an error, as summaries have it."""
    return f"{type(error).__name__}: {error}"
