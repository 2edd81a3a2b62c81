"""Downloads of Fashion-MNIST and CIFAR-10, by one process per host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from hvdtrain.data.builtin import CIFAR10_FOLDER, FASHION_FOLDER, import_torchvision
from hvdtrain.data.builtin import FILES as FASHION_FILES
from hvdtrain.errors import UsageError

TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 1800.0
# torchvision's class, and the files whose presence makes a download unnecessary.
KNOWN = {
    "fashion-mnist": ("FashionMNIST", [FASHION_FOLDER / name for name in FASHION_FILES]),
    "cifar10": ("CIFAR10", [CIFAR10_FOLDER / "batches.meta"]),
}


def fetch(name: str, data_dir: Path) -> None:
    """Download a data set that is not in `data_dir` yet.

    One process per host calls this; a lock keeps other jobs out. Raises UsageError, with the files
    to install by hand, if the download fails.
    """
    if name not in KNOWN:
        return
    reader, files = KNOWN[name]
    if all((data_dir / file).is_file() for file in files):
        return
    before = socket.getdefaulttimeout()
    lock = data_dir / f".{name}.lock"
    made = [path for path in (data_dir, *data_dir.parents) if not path.exists()]
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=LOCK_TIMEOUT_S):
            socket.setdefaulttimeout(TIMEOUT_S)  # urllib has no default timeout
            getattr(import_torchvision().datasets, reader)(str(data_dir), download=True)
    except Exception as error:  # no network, no permission, a wrong checksum, a full disk
        missing = [str(file) for file in files if not (data_dir / file).is_file()]
        _remove_empty([*(data_dir / file for file in list(files[0].parents)[:-1]), *made], lock)
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--data={name}: its files are not in {data_dir}, and cannot be downloaded "
            f"({type(error).__name__}: {reason}). Put there by hand: {', '.join(missing)} "
            "(unpacked), or name the folder that holds them with --data-dir"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _remove_empty(folders: Sequence[Path], lock: Path) -> None:
    """Remove what a failed attempt has left."""
    with suppress(OSError):
        lock.unlink(missing_ok=True)
    for folder in folders:
        with suppress(OSError):  # not empty, or never created
            folder.rmdir()
