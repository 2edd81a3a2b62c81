"""Facts of the quick part: software, user, paths, network interfaces. No library is imported."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import pwd
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.launcher.addresses import interfaces

PACKAGES = ("torch", "torchvision", "horovod", "mpi4py", "numpy")
HVDTRAIN = Path(__file__).resolve().parents[2]


def gather(
    sources: Mapping[str, Callable[[], Any]],
) -> dict[str, dict[str, Any]]:
    """Every fact, each by itself: what goes wrong with one is told in its place."""
    values: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    for name, source in sources.items():
        try:
            values[name] = source()
        except Exception as error:  # a fact must never take the others with it
            errors[name] = f"{type(error).__name__}: {error}"
    return {"values": values, "errors": errors}


def quick_sources(working_directory: str) -> dict[str, Callable[[], Any]]:
    """The facts of the quick part. `working_directory`: where workers will be started."""
    return {
        "hostname": socket.gethostname,
        "python": platform.python_version,
        "executable": lambda: sys.executable,
        "packages": package_versions,
        "horovod_built_for": horovod_built_for,
        "hvdtrain": lambda: {
            "version": __version__,
            "folder": str(HVDTRAIN),
            "sha256": source_hash(HVDTRAIN),
        },
        "horovodrun": lambda: shutil.which("horovodrun"),
        "mpirun": lambda: shutil.which("mpirun"),
        "user": user,
        "working_directory": lambda: folder_state(Path(working_directory)),
        "interfaces": interfaces,
        "ssh_client": lambda: os.environ.get("SSH_CONNECTION", "").split()[:1],
    }


def package_versions() -> dict[str, str | None]:
    """Name -> version as installed, None where it is not."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def horovod_built_for() -> str | None:
    """The torch that Horovod was compiled for, as its build noted it."""
    try:
        file = metadata.distribution("horovod").locate_file("horovod/metadata.json")
        found = json.loads(Path(str(file)).read_text("utf-8")).get("pytorch")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return str(found) if found else None


def source_hash(folder: Path) -> str:
    """Of a package's own Python files: the same version from two checkouts may differ."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def user() -> dict[str, Any]:
    """Who the probe runs as."""
    entry = pwd.getpwuid(os.getuid())
    return {"name": entry.pw_name, "uid": entry.pw_uid, "home": entry.pw_dir}


def folder_state(folder: Path) -> dict[str, Any]:
    """Whether it is there and can be entered."""
    return {"path": str(folder), "usable": folder.is_dir() and os.access(folder, os.X_OK)}
