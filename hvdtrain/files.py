"""Safe file operations in folders that other users can write to, and JSON output.

Symbolic links are not followed: anyone who can write to a folder could place a link under a name
that is about to be written, and so redirect the write to any file of the user. Pipes are refused,
because opening one can block forever.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import UsageError

PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KEPT = os.O_RDWR | os.O_APPEND | os.O_CREAT | PLAIN
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # EXCL does not follow links either


def open_kept(path: Path, errors: str | None = None, newline: str | None = None) -> IO[str]:
    """Open an existing or new text file for appending.

    Raises OSError if the path is not a regular file.
    """
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
    """Open a text file for reading. Raises OSError unless it is a regular file and not a link."""
    descriptor = os.open(path, os.O_RDONLY | PLAIN)
    _check_plain(descriptor, path)
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def _check_plain(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file; remove it", str(path))


def write_new(path: Path, content: str | bytes) -> None:
    """Write a new file, removing any existing file or link of that name first. Raises OSError."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, NEW, 0o666), "wb") as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


AT_FDCWD = -100  # linux/fcntl.h: paths are relative to the working directory
RENAME_EXCHANGE = 2  # linux/fs.h
# Errors of a file system, kernel, C library or container filter that does not support the exchange.
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
REPLACED = ".replaced"


def replace_folder(new: Path, final: Path) -> Path:
    """Replace the folder `final` by `new`; return the path at which the old folder is now.

    Raises OSError; the old folder is then unchanged, or at a path that `set_aside` returns.
    """
    try:
        exchange_names(new, final)
        return new
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    aside = final.with_name(f".{final.name}{REPLACED}")
    final.rename(aside)
    try:
        new.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def undo_replacing(folder: Path) -> None:
    """Restore or remove the folders that an interrupted `replace_folder` has set aside."""
    for aside in set_aside(folder):
        final = folder / aside.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def set_aside(folder: Path) -> list[Path]:
    """Return the folders that `undo_replacing` would restore or remove."""
    return sorted(folder.glob(f".*{REPLACED}"))


def exchange_names(one: Path, other: Path) -> None:
    """Exchange two paths atomically. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # glibc before 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(one), os.fsencode(other)
    if library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def json_problems(name: str | Path | None, flag: str = "--json") -> list[str]:
    """Return the reasons, as far as known in advance, why the output file cannot be written."""
    if name is None:
        return []
    path = Path(name).absolute()
    if path.is_dir():
        reason = "it is a folder; give a file"
    elif not path.parent.is_dir():
        reason = "there is no such folder; make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "permission denied"
    else:
        return []
    return [f"{flag}={name}: cannot be written: {reason}"]


def check_json(name: str | None) -> None:
    """Raise UsageError if the output file of `--json` cannot be written."""
    if problems := json_problems(name):
        raise UsageError(*problems)


def write_json(name: str | Path | None, content: Any, flag: str = "--json") -> None:
    """Write `content` to the file `name`, if given; numbers that are not finite become null.

    Raises UsageError if the file cannot be written.
    """
    if name is None:
        return
    text = json.dumps(json_ready(content), indent=2, allow_nan=False) + "\n"
    try:
        Path(name).write_text(text, "utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{flag}={name}: cannot be written: {reason}") from error


def json_ready(value: Any) -> Any:
    """Return a copy of `value` in which infinity and NaN, which JSON lacks, are None."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
