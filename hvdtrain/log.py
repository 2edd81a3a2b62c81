"""Output to the user, one write per message, so that lines of several workers do not interleave.

(`print` makes two writes when output is unbuffered, and Open MPI prefixes each of them.)
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hvdtrain.errors import HvdtrainError, Stopped
from hvdtrain.pulse import Pulse


def say(text: str) -> None:
    """Write lines to standard output and flush."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write lines to standard error and flush; a failed write is ignored."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python does not fail to flush it at exit."""
    with suppress(OSError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def counted(number: int, noun: str) -> str:
    """Return number and noun as text: '1 file', '2,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(number: float) -> str:
    """Return a rate as text, with at least two significant digits: '2,033', '4.2', '0.031'."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as text: '0:00:12'."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def moment(seconds: float | None = None) -> str:
    """Return a time, by default the current one, as text: '2025-01-31T12:00:00+00:00'."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


_before = sys.excepthook


def report_uncaught() -> None:
    """Install a hook: an uncaught HvdtrainError prints one line and sets the exit code."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HvdtrainError):
        _before(kind, error, trace)
        return
    frames = traceback.extract_tb(trace)
    here = Path(__file__).parent
    own = [it for it in frames if here not in Path(it.filename).parents]
    own = [it for it in own if Path(it.filename).name != "contextlib.py"]
    own = [it for it in own if "site-packages" not in Path(it.filename).parts] or own
    place = f": error at {own[-1].filename}:{own[-1].lineno}" if own else ": error"
    if isinstance(error, Stopped):
        place = ""
    complain(f"hvdtrain{place}: {error}")
    Pulse.from_environment().end(error)
    raise SystemExit(error.exit_code)  # runs the exit handlers, then ends with this code
