"""Uploads of a run's folder to object storage while training goes on.

    rank 0: Uploader -- a process of this module for each upload --> storage

A process of its own takes no random numbers of the training, as libraries do for pauses between
their attempts, and no time of its interpreter. It ends with the trainer, as its input is closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.fields import SCHEME
from hvdtrain.documents import read_text
from hvdtrain.errors import EXIT_FAILED, EXIT_OK, HvdtrainError, TrainingError
from hvdtrain.interpreter import module_argv
from hvdtrain.log import complain, say
from hvdtrain.pulse import STOP_SIGNALS
from hvdtrain.records.folders import CHECKPOINTS, SUMMARY
from hvdtrain.records.storage import Storage

if TYPE_CHECKING:  # without torch, in the processes that upload
    from hvdtrain.train.checkpoint import Checkpoints

PAUSES_S = (1.0, 4.0, 16.0)  # before each further attempt
LOOK_S = 1.0


class Uploader:
    """Uploads of a run's folder in the background, one at a time; requests during one are one."""

    def __init__(self, output: str, folder: Path, keep: int) -> None:
        """`keep`: number of newest checkpoints to keep there; `last` and `best` always are."""
        self.address = f"{output.rstrip('/')}/{folder.name}"
        self.busy: set[str] = set()  # checkpoints that are being uploaded
        self.failure: str | None = None  # of the last upload, after all attempts
        self._output, self._folder, self._keep = output, folder, str(keep)
        self._new: set[str] = set()  # checkpoints that may replace others of their names
        self._requested = self._done = 0
        self._change = threading.Condition()
        threading.Thread(target=self._work, name="upload", daemon=True).start()

    def saved(self, name: str) -> None:
        """Let a checkpoint, which this process has written, be uploaded."""
        self._new.add(name)
        self.request()

    def request(self) -> None:
        """Let the folder, as it is now or later, be uploaded."""
        with self._change:
            self._requested += 1
            self._change.notify_all()

    def wait(self, wait_s: float | None) -> bool:
        """Wait until nothing is left to upload, or to try; return whether that came in time."""
        with self._change:
            return self._change.wait_for(lambda: self._done == self._requested, wait_s)

    def finish(self, beat: Callable[[], object]) -> None:
        """Upload the folder as it is now. Raises TrainingError if that fails."""
        self.request()
        while not self.wait(LOOK_S):
            beat()
        if self.failure:
            raise TrainingError(
                f"{self.address} lacks the end of the run: {self.failure}. {self._folder} has all "
                "of it: repeat this with resume auto, to upload that"
            )
        say(f"copied to {self.address}")

    def close(self, wait_s: float | None) -> None:
        """Upload the folder of a run that has not finished, and say so if that fails."""
        self.request()
        failure = self.failure if self.wait(wait_s) else f"no time was left after {wait_s:g} s"
        if failure:
            complain(f"warning: {self.address} lacks the last records of the run: {failure}")

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._done < self._requested)
                requested = self._requested
            failure = self._upload()
            for pause_s in PAUSES_S if failure else ():
                time.sleep(pause_s)
                if not (failure := self._upload()):
                    break
            if failure and not self.failure:
                complain(f"warning: not uploaded to {self.address}: {failure}. Training goes on")
            with self._change:
                self.failure, self._done = failure, requested
                self._change.notify_all()

    def _upload(self) -> str | None:
        """Upload once; return why it failed, if so."""
        # Read before the pointers: a summary of the end is written after the last checkpoint.
        summary = self._text(SUMMARY).encode()
        last, best = (self._text(f"{CHECKPOINTS}/{name}").strip() for name in ("last", "best"))
        self.busy = {last, best}
        new = self.busy & self._new
        arguments = [self._output, str(self._folder), self._keep, str(len(summary)), last, best]
        try:
            with subprocess.Popen(
                [*module_argv(__name__), *arguments, *new],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            ) as process:
                assert process.stdin is not None and process.stderr is not None
                process.stdin.write(summary)
                process.stdin.flush()
                errors = process.stderr.read().decode("utf-8", "replace").strip()
                code = process.wait()
        except OSError as error:  # no process can be started
            return str(error)
        finally:
            self.busy = set()
        if code:
            return errors.rpartition("\n")[2] or f"exit code {code}"
        self._new -= new
        return None

    def _text(self, name: str) -> str:
        """Return the text of a file of the run; an empty one if it is missing or damaged."""
        with suppress(OSError, ValueError):
            return read_text(self._folder / name)
        return ""


def upload_of(
    folder: Path, options: Mapping[str, Any], checkpoints: Checkpoints | None = None
) -> Uploader | None:
    """Return the uploader of a run whose options name an address in object storage, or None.

    It uploads what an earlier start has not, and each of its `checkpoints` from now on.
    """
    if SCHEME not in options["output"]:
        return None
    uploader = Uploader(options["output"], folder, options["keep_checkpoints"])
    if checkpoints:
        checkpoints.written.append(uploader.saved)
        checkpoints.held = lambda: uploader.busy
        uploader.request()
    return uploader


def finish_upload(folder: Path, options: Mapping[str, Any], beat: Callable[[], object]) -> None:
    """Upload what a finished run, whose options these are, has not; see `Uploader.finish`."""
    if uploader := upload_of(folder, options):
        uploader.finish(beat)


def main() -> int:
    """Upload once, as the arguments say, and return the exit code; the problem goes to standard
    error. End with the process that has started this one, which ignores signals: its trainer
    decides.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    output, folder, keep, size, last, best, *new = sys.argv[1:]
    summary = sys.stdin.buffer.read(int(size))
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    try:
        Storage(output).upload(Path(folder), int(keep), last, best, new, summary)
    except HvdtrainError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def _end_with_trainer() -> None:
    while os.read(0, 1):
        pass
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
