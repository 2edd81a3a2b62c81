"""How a failure is told: rank 0 first, so that what all ranks meet is said once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from hvdtrain.errors import EXIT_FAILED, HvdtrainError
from hvdtrain.log import complain
from hvdtrain.topology import Topology

# horovodrun ends all workers when the first one ends. Rank 0 speaks and ends at once; where it has
# met the same failure, the others are gone before they would say it again.
GRACE_S = 2.0


def tell(error: Exception, topology: Topology) -> int:
    """Print the error for the user; returns the exit code. Only surprises show a traceback."""
    if topology.rank > 0:
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
