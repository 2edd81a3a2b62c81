"""The output of the workers: one log file for each rank, and its lines for the view."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hvdtrain.errors import UsageError
from hvdtrain.files import candidates, hold, open_kept, why_not_written
from hvdtrain.log import counted

NOTE = "--- "  # prefix of the launcher's own lines
START = f"{NOTE}start "
HOROVODRUN = "horovodrun.log"
OUTPUT = "launch.log"  # of a job in the background: what it would print
LONGEST_SHOWN = 1 << 16  # characters of a line


class Logs:
    """The files rank.N.log, one for each rank, and horovodrun.log; restarts append to them."""

    def __init__(
        self, folder: Path, show: Callable[[int, str], None], follows: bool = False
    ) -> None:
        """`show` receives rank and line. `follows`: the logs move to the folder of the job's run as
        soon as it is known. Raises UsageError if the folder cannot be written.
        """
        self._follows = follows
        self.show = show
        self._files: dict[int, IO[str]] = {}
        self._partial: defaultdict[int, ArrivingLine] = defaultdict(ArrivingLine)
        self._gaps: dict[int, str] = {}  # a newline before the next note where one is missing
        self._lossy = False
        self.shown_ranks: frozenset[int] | None = None  # None: the lines of all ranks are shown
        try:
            self.folder, self.horovodrun = _opened(folder, numbered=follows)
        except OSError as error:
            raise UsageError(
                f"{folder}: logs cannot be written: {why_not_written(folder, error)}. Or choose "
                "another --log-dir, or another --output of `train`"
            ) from error

    def follow(self, run: str) -> None:
        """Move to the folder of a run, if the logs are to follow it and it is on this machine."""
        if not self._follows or not Path(run).is_dir():
            return
        self._follows = False
        with suppress(OSError):  # on another file system they stay
            folder = next(path for path in candidates(Path(run, "logs")) if not path.exists())
            before = self.folder
            folder.mkdir()
            for name in [HOROVODRUN, OUTPUT, *(self.path(rank).name for rank in self._files)]:
                if (before / name).exists():
                    (before / name).rename(folder / name)  # open files stay open
            self.folder = folder
            self.show(0, f"hvdtrain launch: logs: {folder}")
            before.rmdir()

    def path(self, rank: int) -> Path:
        return self.folder / f"rank.{rank}.log"

    def open(self, rank: int) -> None:
        """Open the log of a worker, so that it is there even if the worker prints nothing."""
        if rank not in self._files:
            with self._tolerating():
                path = self.path(rank)
                self._files[rank] = open_kept(path, errors="surrogateescape", newline="")

    def write(self, rank: int, text: str) -> list[str]:
        """Append a worker's output to its log; return the lines completed by it."""
        self.open(rank)
        with self._tolerating():
            if rank in self._files:
                self._files[rank].write(text)
                self._files[rank].flush()
        self._gaps[rank] = "" if text.endswith("\n") else "\n"
        *pieces, rest = text.split("\n")
        line = self._partial[rank]
        lines = [line.end(piece) for piece in pieces]
        line.add(rest)
        return self._shown(rank, lines)

    def finish(self, rank: int) -> list[str]:
        """Return the last line of a worker that has ended, if it is unterminated."""
        rest = self._partial[rank].end()
        return self._shown(rank, [rest] if rest else [])

    def _shown(self, rank: int, lines: list[str]) -> list[str]:
        if self.shown_ranks is None or rank in self.shown_ranks:
            for line in lines:
                self.show(rank, line)
        return lines

    def note(self, text: str) -> None:
        """Write a line of the launcher's own to every file."""
        for rank, file in [*self._files.items(), (-1, self.horovodrun)]:
            with self._tolerating():
                file.write(f"{self._gaps.pop(rank, '')}{NOTE}{text}\n")
                file.flush()

    def horovodrun_lines(self) -> list[str]:
        """Return the lines in horovodrun.log since the last start, without the launcher's own."""
        lines = (self.folder / HOROVODRUN).read_text("utf-8", errors="replace").splitlines()
        starts = [at for at, line in enumerate(lines) if line.startswith(START)]
        return [line for line in lines[starts[-1] if starts else 0 :] if line[:4] != NOTE]

    def close(self) -> None:
        for file in [*self._files.values(), self.horovodrun]:
            with self._tolerating():
                file.close()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Suppress errors such as a full disk, so that the job ends normally; report them once."""
        try:
            yield
        except OSError as error:
            if not self._lossy:
                self._lossy = True
                self.show(0, f"hvdtrain launch: {self.folder}: logs are lost: {error.strerror}")


class ArrivingLine:
    """A line that is arriving, as a terminal would show it: a progress bar rewrites it.

    It has up to LONGEST_SHOWN characters, whatever a worker writes without ending it.
    """

    def __init__(self) -> None:
        self._text, self._left_out, self._returned = "", 0, False

    def add(self, text: str) -> None:
        """Add text without a newline, in time proportional to it."""
        body = text.rstrip("\r")  # carriage returns at the end do not clear the line
        _, rewritten, last = body.rpartition("\r")
        if body:
            if rewritten or self._returned:
                self._text, self._left_out = "", 0
            room = LONGEST_SHOWN - len(self._text)
            self._text += last[:room]
            self._left_out += max(0, len(last) - room)
            self._returned = False
        self._returned = self._returned or len(body) < len(text)

    def end(self, text: str = "") -> str:
        """Return the line with this last piece, and begin another."""
        self.add(text)
        # Multi-byte characters may have arrived in two pieces.
        line = self._text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        more = f" ... and {counted(self._left_out, 'character')}" if self._left_out else ""
        self._text, self._left_out, self._returned = "", 0, False
        return line + more


def _opened(folder: Path, numbered: bool) -> tuple[Path, IO[str]]:
    """Return a folder and its open horovodrun.log. `numbered`: FOLDER-2 and so on, where another
    job is writing to it.
    """
    for path in candidates(folder):
        path.mkdir(parents=True, exist_ok=True)
        file = open_kept(path / HOROVODRUN)
        try:
            if numbered:
                hold(file)
            return path, file
        except BlockingIOError:
            file.close()
    raise AssertionError("an endless series")
