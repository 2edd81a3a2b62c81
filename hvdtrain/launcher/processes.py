"""Processes of this machine, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """Return pid -> environment of the running processes started with the variable name=value.

    Such a mark finds a job's processes even in a session of their own or under another parent.
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
    """Return the arguments of a process, joined by spaces; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it: its pid stays reserved."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, options) is not None


def process_state(pid: int) -> str:
    """Return the state in /proc: R, S, D, T (stopped), t (traced), Z; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """Return the pids of the running descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # gone
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(folder.name))
    found = children.get(pid, [])
    for below in found:  # the list grows in the loop
        found += children.get(below, [])
    return found


def id_within(pid: int) -> int:
    """Return the id of a process in its own PID namespace; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    ids = [line.split()[-1] for line in lines if line.startswith("NSpid:")]
    return int(ids[0]) if ids else pid  # a kernel without such namespaces


def reap(codes: dict[int, int]) -> bool:
    """Reap ended children: store pid -> exit code (minus n for signal n) in `codes`.

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
