"""The first process of a host made of namespaces: it sets up its name and mounts, and stays.

Standard library only. `python init.py JSON`, started by `unshare` in its namespaces. The JSON
holds `name`, `visible` (folders that stay visible in the private /tmp) and `binds` (target:
source). It prints one line, "ready" or an error. It ends when its standard input ends, and thus
with the process that started it, however that ends. All other processes of the host then end too.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

MS_BIND, MS_REC = 0x1000, 0x4000
OWN = ("/dev/shm", "/run")  # private and empty on each host, besides /tmp; /sys shows its network
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    arguments = [os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} {target} {kind}: {os.strerror(number)}")


def cover(target: str, kind: str, visible: list[str], options: str = "") -> None:
    """Mount a new file system over `target`; the folders in `visible` below it stay visible."""
    handles = [os.open(folder, os.O_PATH) for folder in visible]
    mount(kind, target, kind, options=options)
    for folder, handle in zip(visible, handles, strict=True):
        Path(folder).mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", folder, flags=MS_BIND | MS_REC)
        os.close(handle)


def make_own(plan: dict[str, Any]) -> None:
    """Set up the hostname and the mounts."""
    socket.sethostname(plan["name"])
    for target in OWN:
        cover(target, "tmpfs", [], "mode=1777" if target == "/dev/shm" else "mode=755")
    cover("/tmp", "tmpfs", plan["visible"], "mode=1777")
    cover("/sys", "sysfs", ["/sys/fs/cgroup"] if Path("/sys/fs/cgroup").is_dir() else [])
    Path("/run/sshd").mkdir(mode=0o755)
    for target, source in plan["binds"].items():
        mount(source, target, flags=MS_BIND)


def main() -> None:
    # Children of this process, orphans among them, leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        make_own(json.loads(sys.argv[1]))
    except OSError as error:
        print(error, flush=True)
        return
    print("ready", flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
