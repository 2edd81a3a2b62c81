"""Lines for the user: each is one write, so that lines of several workers do not mix.

(`print` makes two writes when output is unbuffered, and Open MPI prefixes each of them.)
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write lines to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write lines to standard error, at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def counted(number: int, noun: str) -> str:
    """'1 file', '2,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
