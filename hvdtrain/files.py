"""Opening files where somebody else may have been before us: no link is followed.

Who can write into a folder can put a link there under a name that we are about to write, and so
have us write over any file of the user's; opening a pipe of theirs would wait for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KEPT = os.O_RDWR | os.O_APPEND | os.O_CREAT | PLAIN
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # EXCL: no link is followed either


def open_kept(path: Path, errors: str | None = None, newline: str | None = None) -> IO[str]:
    """Open a text file to append to, as it is, or a new one. Raises OSError for anything else."""
    try:
        descriptor = os.open(path, KEPT, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = f"{path.name} is a symbolic link, which is not followed; remove it"
        raise OSError(errno.ELOOP, reason, str(path)) from error
    _check_plain(descriptor, path)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors=errors, newline=newline)


def open_to_read(path: Path) -> IO[str]:
    """Open a text file to read. Raises OSError for anything else, a link to one included."""
    descriptor = os.open(path, os.O_RDONLY | PLAIN)
    _check_plain(descriptor, path)
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def _check_plain(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no plain file; remove it", str(path))


def write_new(path: Path, content: str | bytes) -> None:
    """Write a file of our own: what stands there, a leftover or a link, is removed before.

    Raises OSError.
    """
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, NEW, 0o666), "wb") as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)
