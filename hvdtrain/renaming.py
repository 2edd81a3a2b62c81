"""Replaces a folder by another of the same file system, without a moment at which neither stands.

Linux exchanges two names in one step (renameat2 with RENAME_EXCHANGE). File systems that cannot get
two renames; what a kill between them leaves, `undo_replacing` puts right.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

AT_FDCWD = -100  # linux/fcntl.h: paths are relative to the working directory
RENAME_EXCHANGE = 2  # linux/fs.h
# What a file system, a kernel, a C library or a container's filter answers that has no exchange.
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
REPLACED = ".replaced"


def replace_folder(new: Path, final: Path) -> Path:
    """Put `new` in the place of the folder `final`; returns where the old one is now.

    Raises OSError; the old folder is then in its place, or where `set_aside` finds it.
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
    """Put back, or remove, what was set aside in `replace_folder` when it was cut short."""
    for aside in set_aside(folder):
        final = folder / aside.name.removeprefix(".").removesuffix(REPLACED)
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def set_aside(folder: Path) -> list[Path]:
    """Return the folders that `undo_replacing` would treat."""
    return sorted(folder.glob(f".*{REPLACED}"))


def exchange_names(one: Path, other: Path) -> None:
    """Let each of two paths name what the other did, in one step. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # glibc before 2.28
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(one), os.fsencode(other)
    if library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))
