"""Tickets: files on each host with the launcher's address and a job's orders, for its agents.

Only the user can read them; what horovodrun passes on would show in `ps`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pwd
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import PreflightError

STALE_S = 86400.0  # agents read their ticket at the start


@dataclass(frozen=True)
class Ticket:
    """A job's orders for the agents of one host, written by the doctor's probe."""

    job: str  # id; letters, digits, - and _
    text: str  # JSON, opaque to the doctor


def ticket_paths(job: str, environment: Mapping[str, str]) -> list[Path]:
    """Return the possible paths of a job's ticket, best first.

    There are several, since workers get the launcher's HOME and XDG_CACHE_HOME, which may not be
    valid on this host. The host's name separates hosts that share a home directory.
    """
    home = pwd.getpwuid(os.getuid()).pw_dir
    cache = environment.get("XDG_CACHE_HOME", "")
    caches = [cache] if Path(cache).is_absolute() else []
    caches += [str(Path(environment.get("HOME", home), ".cache")), str(Path(home, ".cache"))]
    name = f"{job}.{socket.gethostname()}"
    return [Path(folder, "hvdtrain", "launch", name) for folder in dict.fromkeys(caches)]


def write_ticket(content: Mapping[str, Any], environment: Mapping[str, str]) -> Path:
    """Write `content` (with its "job") to the first writable path; raise OSError if none is."""
    problems = []
    for path in ticket_paths(content["job"], environment):
        _remove_stale(path.parent)
        try:
            _write_private(path, json.dumps(content))
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            return path
    raise OSError("; ".join(problems))


def read_ticket(job: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return what the probe wrote on this host; None without a private file of this user."""
    for path in ticket_paths(job, environment):
        try:
            status = path.stat()
            if status.st_uid == os.getuid() and not status.st_mode & 0o077:
                found = json.loads(path.read_text("utf-8"))
                return found if isinstance(found, dict) else None
        except (OSError, ValueError):
            continue
    return None


def remove_ticket(job: str, environment: Mapping[str, str] = os.environ) -> None:
    """Remove a job's ticket from all its possible paths."""
    for path in ticket_paths(job, environment):
        try:
            path.unlink()
        except OSError:
            continue


def _remove_stale(folder: Path) -> None:
    """Remove old tickets, left by agents that were killed: they hold users' environments."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".ticket-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Orders:
    """The orders of one job's agents: the worker command and where to run it."""

    token: str  # shared by the launcher and the agents
    command: list[str]  # of each worker
    folder: str  # working directory of the workers
    environment: dict[str, str]  # the user's, where launch was called

    @property
    def ring_token(self) -> str:
        """Return the workers' own secret, from which the token cannot be derived."""
        return hmac.new(self.token.encode(), b"ring", hashlib.sha256).hexdigest()

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def read_orders(job: str) -> tuple[Orders, tuple[str, int]]:
    """Return orders and launcher address from this host's ticket; PreflightError without it."""
    found = read_ticket(job)
    if found is None:
        raise PreflightError(
            f"job {job} has left no orders on {socket.gethostname()}. Agents are started by "
            "`hvdtrain launch` alone"
        )
    fields = json.loads(found["ticket"])
    address, port = found["channel"]
    return Orders(**fields), (address, port)
