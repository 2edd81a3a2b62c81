"""Lines for the user: each is one write, so that lines of several workers do not mix.

(`print` makes two writes when output is unbuffered, and Open MPI prefixes each of them.)
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


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
