"""A worker's beginning: `python -m hvdtrain.lab.bench.stamp PIPE COMMAND...`, started in its place.

On rank 0 it writes the time into a named pipe, and hands the pipe on as the one by which `train`
tells an agent where it stands (hvdtrain/pulse.py). On all ranks it then becomes the command.
"""

from __future__ import annotations

import os
import sys
import time

from hvdtrain.pulse import PULSE_FD
from hvdtrain.topology import Topology

STARTED = "@"  # before the monotonic time, in seconds


def main() -> None:
    """Does not return."""
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
