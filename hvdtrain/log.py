"""Lines for the user: each is one write, so that lines of several workers do not mix.

(`print` makes two writes when output is unbuffered, and Open MPI prefixes each of them.)
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hvdtrain.errors import HvdtrainError


def say(text: str) -> None:
    """Write lines to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write lines to standard error, at once; whether or not somebody reads them."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """What is still to be written goes nowhere; else Python would fail on it as it ends."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def counted(number: int, noun: str) -> str:
    """'1 file', '2,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_PACKAGE = Path(__file__).parent
_before = sys.excepthook


def report_uncaught() -> None:
    """From now on, end this process in this way where it would end with such an error."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, HvdtrainError):
        _before(kind, error, trace)
        return
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _PACKAGE not in Path(frame.filename).parents]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    complain(f"hvdtrain: error{place}: {error}")
    raise SystemExit(error.exit_code)  # the interpreter ends with it, in good order
