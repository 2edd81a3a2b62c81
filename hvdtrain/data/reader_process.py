"""Processes of readers, which only SIGKILL ends (`hvdtrain.data.reading`)."""

from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from typing import Any


class ReaderPopen(Popen):
    """A started reader. SIGTERM, by which torch and multiprocessing end processes, has no effect on
    it.
    """

    terminate = Popen.kill


class ReaderProcess(ForkServerProcess):
    """A reader."""

    @staticmethod
    def _Popen(process_obj: Any) -> ReaderPopen:  # noqa: N802  (multiprocessing's name)
        return ReaderPopen(process_obj)


class ReaderContext(ForkServerContext):
    """What torch's DataLoader starts readers by."""

    Process = ReaderProcess
