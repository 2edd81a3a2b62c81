"""What Open MPI must be told to start on other hosts when it lives in the Python environment."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def mpi_environment() -> dict[str, str]:
    """Variables for mpirun. A shell that ssh starts has no such folder on PATH, and pip's Open MPI
    looks for its own files where it was built; the system's MPI needs neither.
    """
    mpirun = shutil.which("mpirun")
    tools = Path(sys.executable).parent
    daemon = tools / "orted"
    if mpirun is None or Path(mpirun).parent != tools or not daemon.exists():
        return {}
    return {"OMPI_MCA_orte_launch_agent": str(daemon), "OPAL_PREFIX": str(tools.parent)}
