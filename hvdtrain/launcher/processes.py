"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
from pathlib import Path


def marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """The environments of the living processes that were started with this variable, by their
    ids. A job's processes are found again by such a mark wherever they have moved to: into a
    session of their own, or under another parent.
    """
    wanted, found = f"{name}={value}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if wanted in variables:
            found[int(folder.name)] = dict(map(_pair, variables))
    return found


def command_of(pid: int) -> str:
    """Its arguments, joined by spaces; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its number stays its own until it is waited for."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, options) is not None


def process_state(pid: int) -> str:
    """The letter that /proc has for it: R, S, D, T (stopped), t (traced), Z; empty when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """The living processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # gone
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(pid, [])
    for below in found:  # which grows
        found += children.get(below, [])
    return found


def id_within(pid: int) -> int:
    """The id that a process has in its own PID namespace; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    ids = [line.split()[-1] for line in lines if line.startswith("NSpid:")]
    return int(ids[0]) if ids else pid  # a kernel without such namespaces


def reap(codes: dict[int, int]) -> bool:
    """Note the exit codes of children that have ended (minus n after signal n), by their ids.
    Returns whether any child is left.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def _pair(variable: bytes) -> tuple[str, str]:
    name, _, value = variable.decode(errors="replace").partition("=")
    return name, value
