"""The copy of a run in the memory of a host: its newest checkpoint, and its records.

    HVDTRAIN_MEMORY_DIR/EXPERIMENT/     as the folder of the run, and its copy in object storage
        .run  .job  config.yaml  metrics.jsonl  audit.jsonl  trace.jsonl  evaluation.json  ...
        checkpoints/step-00000140/

With each checkpoint come the records that were added since the last one. They are written first, so
they hold all up to its step; a resume drops what follows.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from hvdtrain.documents import read_text
from hvdtrain.errors import TrainingError
from hvdtrain.files import open_bytes, sync, write_new
from hvdtrain.log import complain, say
from hvdtrain.pulse import MEMORY_DIR
from hvdtrain.records.folders import CHECKPOINTS, CONFIG, JOB_FILE, problem_of, put_in_place
from hvdtrain.records.storage import RECORDS, RUN_FILE
from hvdtrain.train.checkpoint import FILES, PARTIAL, Checkpoints, Snapshot, name_of, step_of

COPIED = (*RECORDS, CONFIG)
PIECE_BYTES = 32 << 20  # of a file, on its way to another host

Addition = tuple[str, int, bytes]  # a file's name, an offset, and the bytes from there to its end


def folder_in_memory(experiment: str) -> Path | None:
    """Return the folder of a run's copy on this host; None where the job has no such memory."""
    root = os.environ.get(MEMORY_DIR)
    return Path(root, experiment) if root else None


class Additions:
    """What was added to the records of a run since they were last taken; at first, all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, int, int]] = {}  # inode, time, size

    def take(self) -> list[Addition]:
        """Return the new end of each file of lines, and each other file that has changed."""
        return list(filter(None, map(self._addition, COPIED)))

    def _addition(self, name: str) -> Addition | None:
        with suppress(OSError), open_bytes(self._folder / name, follow=False) as stream:
            status = os.fstat(stream.fileno())
            now = status.st_ino, status.st_mtime_ns, status.st_size
            before = self._seen.get(name)
            if now == before:
                return None
            grows = before and name.endswith(".jsonl") and before[0] == now[0]
            offset = before[2] if before and grows and before[2] <= now[2] else 0
            stream.seek(offset)
            content = stream.read(now[2] - offset)
            self._seen[name] = now
            return name, offset, content
        return None


class MemoryCopy:
    """The copy of a live run in the memory of this host. Without room for it, training goes on."""

    def __init__(self, folder: Path, run_id: str, takeaway: Mapping[str, Any]) -> None:
        """`takeaway`: for users of the weights, as in the checkpoints on disk."""
        self._folder, self._run_id, self._takeaway = folder, run_id, takeaway
        self._checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1, run=run_id)
        self._checkpoints.written.append(self._remove_others)
        self._is_given_up = False

    def add(self, additions: Sequence[Addition]) -> None:
        """Wait until the checkpoint before is written; add to the records."""

        def add() -> None:
            self._checkpoints.wait()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_new(self._folder / RUN_FILE, f"{self._run_id}\n")
            for name, offset, content in additions:
                _write_from(self._folder / name, offset, content)

        self._attempt(add)

    def save(self, snapshot: Snapshot, trace: Mapping[str, Any] | None) -> None:
        """Write a checkpoint in the background; those before it go once it is complete."""
        takeaway = {**self._takeaway, "trace": trace}
        self._attempt(lambda: self._checkpoints.save(snapshot, False, takeaway))

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self._attempt(self._checkpoints.wait)

    def remove(self) -> None:
        """Remove the copy, of a run that has finished."""
        self.wait()
        rmtree(self._folder, ignore_errors=True)

    def _remove_others(self, name: str) -> None:
        for path in self._checkpoints.complete():  # also one of a later step, which was damaged
            if path.name != name:
                rmtree(path.rename(path.with_name(f".{path.name}.old")))

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do nothing more once something has failed, which is printed."""
        if self._is_given_up:
            return
        try:
            action()
        except (OSError, TrainingError) as error:
            self._is_given_up = True
            complain(
                f"hvdtrain: warning: --memory-interval: on {os.uname().nodename}: {error}. The "
                "training goes on without the copy in memory there"
            )


class HeldCopy(NamedTuple):
    """What a host has in memory of a run."""

    run_id: str = ""
    job: str = ""  # of the launcher
    steps: tuple[int, ...] = ()  # of its checkpoints, good or damaged


def held_copy(folder: Path) -> HeldCopy:
    """Return what a host has in memory of the run whose copy the folder is."""
    steps = (step_of(path.name) for path in Checkpoints(folder / CHECKPOINTS, 1).complete())
    return HeldCopy(_text(folder / RUN_FILE), _text(folder / JOB_FILE), tuple(steps))


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_text(path).strip()
    return ""


def pieces_of(folder: Path, step: int) -> Iterator[tuple[str, bytes]]:
    """Yield the records of a copy and its checkpoint of a step: names of files, and pieces of them
    in order. What cannot be read is missing, which shows where they arrive.
    """
    checkpoint = folder / CHECKPOINTS / name_of(step)
    for path in (*(folder / name for name in COPIED), *(checkpoint / name for name in FILES)):
        with suppress(OSError), open_bytes(path, follow=False) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield path.name, piece


class IncomingCopy:
    """A copy that arrives on the disk of rank 0, and takes its place there once it is whole."""

    def __init__(self, run: Path, step: int) -> None:
        """`run`: the folder of the run, which is locked. Raises OSError."""
        self._run, self._step = run, step
        self._checkpoint = run / CHECKPOINTS / f".{name_of(step)}{PARTIAL}"
        self._clear()

    def add(self, name: str, piece: bytes) -> None:
        """Add the next piece of a file. Raises OSError."""
        path = self._partial(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(piece)

    def take(self, run_id: str, source: str) -> bool:
        """Put all in place, and return whether the checkpoint is a good one of the run; otherwise
        print why it is not. Raises OSError.
        """
        name = name_of(self._step)
        if problem := problem_of(self._checkpoint, run_id):
            say(f"resume: skipping {name} {source}, which is {problem}")
            self._clear()
            return False
        records = [file for file in COPIED if self._partial(file).exists()]
        for path in (*self._checkpoint.iterdir(), *map(self._partial, records)):
            sync(path)
        for file in records:
            self._partial(file).replace(self._run / file)
        sync(self._run)
        put_in_place(self._checkpoint, self._run / CHECKPOINTS / name)
        sync(self._run / CHECKPOINTS)
        say(f"resume: {name} {source} is newer than what {self._run} has: copied there")
        return True

    def _partial(self, name: str) -> Path:
        return self._run / f".{name}.partial" if name in COPIED else self._checkpoint / name

    def _clear(self) -> None:
        rmtree(self._checkpoint, ignore_errors=True)
        for name in COPIED:
            self._partial(name).unlink(missing_ok=True)


def _write_from(path: Path, offset: int, content: bytes) -> None:
    """Write the bytes of a file from an offset to its new end; a whole one replaces the old."""
    if offset:
        with path.open("r+b") as stream:
            stream.truncate(offset)
            stream.seek(offset)
            stream.write(content)
        return
    partial = path.with_name(f".{path.name}.partial")
    write_new(partial, content)
    partial.replace(path)
