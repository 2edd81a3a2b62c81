"""A time stamp before a worker's start: `python -m hvdtrain.lab.bench.stamp PIPE COMMAND...`.

On rank 0 it writes the time to a named pipe, and passes the pipe on as the one through which
`train` reports its progress to an agent (hvdtrain/pulse.py). All ranks then execute the command.
"""

import os
import sys
import time

from hvdtrain.pulse import PULSE_FD
from hvdtrain.topology import Topology

STARTED = "@"  # before the monotonic time, in seconds


def main() -> None:
    """Write the time stamp and replace this process by the command."""
    pipe, *command = sys.argv[1:]
    if Topology.from_environment().rank == 0:
        started_s = time.monotonic()
        fd = os.open(pipe, os.O_WRONLY)
        os.write(fd, f"{STARTED}{started_s:.6f}\n".encode())
        os.set_inheritable(fd, True)
        os.environ[PULSE_FD] = str(fd)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
