"""Printing without waiting: a terminal that was stopped (Ctrl-S), or a pipe that nobody reads,
holds up the thread that prints, and nobody else.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path
from typing import Protocol, TextIO

from hvdtrain.launcher.supervise import Watch
from hvdtrain.log import counted, discard

REFRESH_S = 0.5


class View(Protocol):
    """Shows a job."""

    most_waiting: int  # characters that may wait for the terminal

    def label(self, rank: int, text: str) -> str | None:
        """A worker's line as it is shown; None: it is not."""

    def show(self, text: str) -> None:
        """Write lines."""

    def update(self, watch: Watch) -> None:
        """Where the job stands."""

    def close(self) -> None: ...


class Output:
    """Writes to a stream's file at once, with no lock that would keep the process from ending."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._terminal = stream.isatty()
        self.encoding, self._errors = stream.encoding, stream.errors or "strict"

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self._errors)
        while data:
            data = data[os.write(self._fd, data) :]
        return len(text)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._terminal


class SteadyView:
    """Another view, in a thread. Lines that find no room are left out, and counted; once the
    terminal or pipe is gone all are: the job goes on, or saves and ends.
    """

    def __init__(self, view: View, stream: TextIO, logs: Path) -> None:
        """`logs`: where whoever misses lines finds them."""
        self.view, self._stream, self._logs = view, stream, logs
        self._lines: list[str] = []
        self._waiting = self._left_out = 0
        self._frame: Watch | None = None
        self._framed_s = 0.0
        self._gone = self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._print_all, name="terminal", daemon=True)
        self._thread.start()

    def tell(self, text: str) -> None:
        """A line of the launcher's: they are few, and all are kept."""
        self._put(f"hvdtrain launch: {text}")

    def line(self, rank: int, text: str) -> None:
        """A line of a worker's."""
        shown = self.view.label(rank, text)
        if shown is None:
            return
        if self._waiting and self._waiting + len(shown) > self.view.most_waiting:
            with self._changed:
                self._left_out += 1
        else:
            self._put(shown)

    def update(self, watch: Watch) -> None:
        """Where the job stands; called several times a second."""
        now = time.monotonic()
        if now - self._framed_s >= REFRESH_S:
            self._framed_s = now
            ranks = [copy.copy(rank) for rank in watch.ranks]
            with self._changed:
                self._frame = Watch(ranks, dict(watch.figures), watch.started_s)
                self._changed.notify()

    def close(self) -> None:
        """Wait until all is printed."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, text: str) -> None:
        with self._changed:
            if not self._gone:
                self._lines.append(text)
                self._waiting += len(text) + 1
                self._changed.notify()

    def _print_all(self) -> None:
        try:
            while self._print():
                pass
            self.view.close()
        except OSError:
            discard(self._stream)
        finally:
            with self._changed:
                self._gone, self._lines = True, []

    def _print(self) -> bool:
        """What has come; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._lines or self._left_out or self._frame or self._closing
            )
            lines, left_out, frame = self._lines, self._left_out, self._frame
            self._lines, self._left_out, self._frame, self._waiting = [], 0, None, 0
            closing = self._closing
        if left_out:
            what = counted(left_out, "line")
            lines.append(f"... {what} not shown; all are in {self._logs}")
        if lines:
            self.view.show("\n".join(lines))
        if frame:
            self.view.update(frame)
        return bool(lines or frame or not closing)
