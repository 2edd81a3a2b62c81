"""Run a command in the tree of a machine: `python inside.py PLAN COMMAND...`.

PLAN is JSON: `root`, `folder` to start in, `binds` from paths there to paths here.

Started by unshare(1) as the first process of new namespaces (mounts, processes, names, IPC); the
network is that of this machine. Mounts what a machine has beside its files: /proc, /sys, devices,
/dev/pts, /dev/shm. It stays outside the tree as its init: it reaps orphans, and with its end, which
is that of the command, all processes of the machine are killed. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

NAME = "machine"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


def prepare(root: Path, binds: dict[str, str]) -> None:
    """Mount the file systems of a machine below `root`; `binds`: paths there to those of here."""
    for name in ("proc", "sys", "dev"):
        (root / name).mkdir(exist_ok=True)
    mount("-t", "proc", "proc", root / "proc")
    mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for name in DEVICES:
        number = Path("/dev", name).stat().st_rdev
        os.mknod(root / "dev" / name, 0o020666, number)
        (root / "dev" / name).chmod(0o666)
    for name, target in LINKS.items():
        (root / "dev" / name).symlink_to(target)
    for name in ("pts", "shm"):
        (root / "dev" / name).mkdir()
    mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", root / "dev/pts")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / "dev/shm")
    for path, source in binds.items():
        place = root / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        mount("--bind", source, place)
    socket.sethostname(NAME)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["/bin/mount", *arguments], check=True)


def run(root: Path, folder: str, command: list[str]) -> int:
    """Run the command in the tree, as its init; return its exit code as a shell does."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chroot(root)
        os.chdir(folder)
        try:
            os.execvpe(command[0], command, os.environ)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    while True:
        ended, status = os.wait()
        if ended == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    prepare(Path(plan["root"]), plan["binds"])
    sys.exit(run(Path(plan["root"]), plan["folder"], sys.argv[2:]))
