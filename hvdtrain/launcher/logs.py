"""The output of each worker: one file a rank, and its lines for whoever looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hvdtrain.errors import UsageError
from hvdtrain.files import open_kept

NOTE = "--- "  # before lines of the launcher's own
START = f"{NOTE}start "


class Logs:
    """rank.N.log for each rank, and horovodrun.log; a restart goes on in the same files."""

    def __init__(self, folder: Path, show: Callable[[int, str], None]) -> None:
        """`show` is called with rank and line. Raises UsageError when nothing can be written."""
        self.folder = folder
        self._show = show
        self._files: dict[int, IO[str]] = {}
        self._partial: dict[int, str] = {}
        self._ended: dict[int, bool] = {}  # whether the file ends with a whole line
        self._lossy = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.engine = open_kept(folder / "horovodrun.log")
        except OSError as error:
            raise UsageError(
                f"{folder}: logs cannot be written: {error.strerror}. Choose another --log-dir, "
                "or another --output of `train`"
            ) from error

    def path(self, rank: int) -> Path:
        return self.folder / f"rank.{rank}.log"

    def write(self, rank: int, text: str) -> list[str]:
        """Returns the lines that are whole by now."""
        with self._tolerating():
            if rank not in self._files:
                path = self.path(rank)
                self._files[rank] = open_kept(path, errors="surrogateescape", newline="")
            self._files[rank].write(text)
            self._files[rank].flush()
        self._ended[rank] = text.endswith("\n")
        *lines, self._partial[rank] = (self._partial.get(rank, "") + text).split("\n")
        return self._shown(rank, lines)

    def finish(self, rank: int) -> list[str]:
        """A worker has ended: its last line is whole now, though nothing ends it."""
        rest = self._partial.pop(rank, "")
        return self._shown(rank, [rest] if rest else [])

    def _shown(self, rank: int, lines: list[str]) -> list[str]:
        # Of a progress bar that rewrites its line only the last state is of interest.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        # Letters of more bytes than one may have come in two pieces.
        raw = [line.encode("utf-8", "surrogateescape") for line in lines]
        lines = [line.decode("utf-8", "replace") for line in raw]
        for line in lines:
            self._show(rank, line)
        return lines

    def note(self, text: str) -> None:
        """A line of the launcher's own, into every file."""
        for rank, file in [*self._files.items(), (-1, self.engine)]:
            with self._tolerating():
                file.write(
                    f"{NOTE}{text}\n" if self._ended.get(rank, True) else f"\n{NOTE}{text}\n"
                )
                file.flush()
            self._ended[rank] = True

    def engine_lines(self) -> list[str]:
        """What horovodrun and its like have said since the last start."""
        path = self.folder / "horovodrun.log"
        lines = path.read_text("utf-8", errors="replace").splitlines()
        starts = [at for at, line in enumerate(lines) if line.startswith(START)]
        return [line for line in lines[starts[-1] if starts else 0 :] if line[:4] != NOTE]

    def close(self) -> None:
        for file in [*self._files.values(), self.engine]:
            with self._tolerating():
                file.close()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        """A full disk does not keep the launcher from ending a job well; it is told once."""
        try:
            yield
        except OSError as error:
            if not self._lossy:
                self._lossy = True
                self._show(0, f"hvdtrain launch: {self.folder}: logs are lost: {error.strerror}")
