"""Python processes of this package's own, which import nothing from the folder they start in.

`python -m` and `python -c` search that folder before the standard library: a user's `secrets.py`
beside a job, or in the home folder of another host, would take the place of Python's. An option
against this, -P, exists from Python 3.11 on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Under -c the folder is the empty entry; those of PYTHONPATH are absolute by now.
WITHOUT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"
# One line without single quotes, as login shells pass on unchanged.
_RUN_MODULE = (
    WITHOUT_FOLDER.rstrip() + "; from runpy import run_module; "
    'run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)
_NAME = "PYTHONPATH"


def module_argv(module: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module, as `python -m` does, without the folder."""
    return [python, "-c", _RUN_MODULE, module]


def python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH without what names the folder: relative entries, and the empty one of
    "/lib:$PYTHONPATH". Empty if nothing is left.
    """
    kept = filter(os.path.isabs, environment.get(_NAME, "").split(os.pathsep))
    text = os.pathsep.join(kept)
    return {_NAME: text} if text else {}


@contextmanager
def started_elsewhere() -> Iterator[None]:
    """Change to / within the context: `multiprocessing` starts its servers by `python -c`, and each
    process that it then starts changes to the folder of whoever asks.
    """
    here = os.open(".", os.O_RDONLY)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes (VmHWM, which an exec resets)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
