"""Safe file operations in folders that other users can write to, and JSON output.

Symbolic links are not followed, except by `open_bytes`: anyone who can write to a folder could
place a link under a name that is about to be written, and so redirect the write to any file of the
user. Pipes are refused, because opening one can block forever.
"""

import errno
import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import UsageError, first_problem

IS_LINK = "{} is a symbolic link, which is not followed; remove it"
KEPT = ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # flags of each open; no system has all of them


def open_kept(path: Path, errors: str | None = None, newline: str | None = None) -> IO[str]:
    """Open an existing or new text file to append. Raises OSError unless it is a regular file."""
    descriptor = _open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors=errors, newline=newline)


def open_to_read(path: Path) -> IO[str]:
    """Open a text file for reading. Raises OSError unless it is a regular file and not a link."""
    return os.fdopen(_open_plain(path, os.O_RDONLY), encoding="utf-8", errors="replace")


def open_bytes(path: Path, follow: bool = True) -> IO[bytes]:
    """Open a file for reading. A link is followed, as caches of models consist of them, unless
    `follow` is false. Raises OSError unless it is a regular file: a pipe may block for ever, and a
    device has no end.
    """
    return os.fdopen(_open_plain(path, os.O_RDONLY, follow), "rb")


def _open_plain(path: Path, flags: int, follow: bool = False) -> int:
    """Return the descriptor of a regular file. Raises OSError for any other, and for a link unless
    it is to follow it.
    """
    kept = sum(getattr(os, name, 0) for name in (KEPT if follow else (*KEPT, "O_NOFOLLOW")))
    try:
        descriptor = os.open(path, flags | kept, 0o666)
    except OSError as error:
        if follow or error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, IS_LINK.format(path.name), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        advice = "" if follow else "; remove it"
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file{advice}", str(path))
    return descriptor


def write_new(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a new file, removing any existing file or link of that name first. Raises OSError."""
    path.unlink(missing_ok=True)
    parts = [content] if isinstance(content, str | bytes) else content
    with path.open("xb") as stream:  # "x" does not follow links either
        for part in parts:
            stream.write(
                part.encode("utf-8", "backslashreplace") if isinstance(part, str) else part
            )


def make_folder(path: Path) -> None:
    """Make a folder unless it exists. Raises OSError, and for a link: it is not followed."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, IS_LINK.format(path.name), str(path))


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically: beside it, on disk, and then renamed. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    write_new(partial, parts)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def candidates(folder: Path) -> Iterator[Path]:
    """Yield the folder, and then NAME-2, NAME-3, ... beside it, without end."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def hold(file: IO[str]) -> None:
    """Lock a file until it is closed. Raises BlockingIOError if another process holds it."""
    import fcntl  # not on Windows, where `--help` imports this module

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def obey_umask(path: Path) -> None:
    """Give a file that a library made for its owner alone the mode of other new files beside it.

    The umask itself can only be read by changing it, for all threads. Raises OSError.
    """
    plain = path.with_name(f".{path.name}.mode")
    write_new(plain, "")
    path.chmod(stat.S_IMODE(plain.stat().st_mode))
    plain.unlink()


def time_at(folder: Path) -> float:
    """Return the time, in seconds since 1970, by the clock that dates new files in a folder: a file
    server's, if there is one. Where nothing can be written, it is this machine's.
    """
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(folder)) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def why_not_written(path: Path, error: OSError | ValueError) -> str:
    """Return why a file or folder could not be made: for a permission, who has it, and how to get
    it. Users are numbers, as a container's names are not those of the machine.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) not in (errno.EACCES, errno.EPERM):
        return reason
    existing = nearest_existing(path)
    if os.access(existing, os.W_OK | os.X_OK):
        return reason
    inode, uid = existing.stat(), os.getuid()
    mode = stat.S_IMODE(inode.st_mode)
    return (
        f"{reason}: {existing} belongs to uid {inode.st_uid}, gid {inode.st_gid} (mode {mode:o}), "
        f"and this process has uid {uid}. Run it as that user (docker run --user "
        f"{inode.st_uid}:{inode.st_gid}), or `chown {uid} {existing}`"
    )


def system_text(error: BaseException) -> str:
    """Return the system's text of an OSError that a library may have wrapped, or the error text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there, also behind a closed one."""
    return next(entry for entry in (path, *path.absolute().parents) if os.path.exists(entry))  # noqa: PTH110


def json_problems(name: str | Path | None, flag: str = "--json") -> list[str]:
    """Return the reasons, as far as known in advance, why the output file cannot be written."""
    if name is None:
        return []
    path = Path(name).absolute()
    reason = first_problem(
        (path.is_dir(), "it is a folder; give a file"),
        (not path.parent.is_dir(), "there is no such folder; make it first"),
        (not os.access(path if path.exists() else path.parent, os.W_OK), "permission denied"),
    )
    return [f"{flag}={name}: cannot be written: {reason}"] if reason else []


def write_json(name: str | Path | None, content: Any, flag: str = "--json") -> None:
    """Write `content` to `name`, if given, with null for NaN and infinity. Raises UsageError."""
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
    match value:
        case dict():
            return {key: json_ready(item) for key, item in value.items()}
        case list() | tuple():
            return [json_ready(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def sha256_of(stream: IO[bytes]) -> str:
    """Return the SHA-256 of what is left of a stream, read block by block."""
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
