"""The folder of a job in memory on one host, which lasts over all starts of the job.

It holds the sockets of standbys (hvdtrain/launcher/standby.py), and what workers keep in memory
from one start to the next. The host's probe makes it, and removes it however the job ends.
"""

import shutil
import tempfile
from pathlib import Path
from typing import IO

from hvdtrain.files import hold
from hvdtrain.launcher.processes import is_writable, remove_abandoned

PREFIX = "hvdtrain-job-"
MEMORY = "/dev/shm"
LOCK = "lock"  # held while the folder is in use


class JobFolder:
    """The folder of one job, for its maker."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock: IO[str] | None = None

    def make(self) -> str:
        """Return the path of the folder, which is made once, and again if a login's end has removed
        it (systemd's RemoveIPC). Raises OSError.
        """
        if self._path is None or not (self._path / LOCK).exists():
            parent = MEMORY if is_writable(MEMORY) else tempfile.gettempdir()
            remove_abandoned(Path(parent), PREFIX, LOCK)
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            self._lock = (self._path / LOCK).open("w", encoding="utf-8")
            hold(self._lock)
            Path(memory_in(str(self._path))).mkdir()
        return str(self._path)

    def remove(self) -> None:
        if self._path and self._lock:
            shutil.rmtree(self._path, ignore_errors=True)
            self._lock.close()


def memory_in(folder: str) -> str:
    """Return the folder of workers in that of a job."""
    return f"{folder}/memory"


def is_in_use(folder: Path) -> bool:
    """Return whether the maker of a job's folder still runs."""
    try:
        with (folder / LOCK).open("a") as file:
            hold(file)
    except BlockingIOError:
        return True
    except OSError:  # it is removed
        pass
    return False
