"""How a failure is told: once where all ranks met the same, else by the rank that met it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from hvdtrain.errors import EXIT_FAILED, HvdtrainError, UsageError
from hvdtrain.log import complain
from hvdtrain.topology import Topology

# horovodrun ends all workers when the first one ends: the others give rank 0 time to speak.
GRACE_S = 2.0


def is_common(error: BaseException) -> bool:
    """Whether every rank meets this error: all see the same flags, or they have agreed on it."""
    return isinstance(error, HvdtrainError) and (
        error.on_all_ranks or isinstance(error, UsageError)
    )


def tell(error: Exception, topology: Topology) -> int:
    """Print the error for the user; returns the exit code. Only surprises show a traceback."""
    place = "" if topology.size == 1 or is_common(error) else f" on {topology.place}"
    if not isinstance(error, HvdtrainError):
        trace = "".join(traceback.format_exception(error)).rstrip()
        complain(f"hvdtrain: failed{place}: {type(error).__name__}: {error}\n{trace}")
        return EXIT_FAILED
    if topology.rank == 0 or not is_common(error):
        complain(f"hvdtrain: error{place}: {error}")
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(GRACE_S)
    return error.exit_code


def leave_at_once(exit_code: int) -> None:
    """End without waiting for ranks that know nothing of this failure.

    An orderly end would ask them to agree on Horovod's shutdown, or on MPI's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
