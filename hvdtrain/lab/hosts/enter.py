"""Run a command on a host made of namespaces: `python enter.py PID COMMAND...`.

PID is that of the host's init. Standard library only. The command is a session leader in the host's
namespaces. This process stays outside. It waits, forwards signals, and ends with the status of the
command. If it is killed, the command is killed too.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # mnt last: it hides the /proc of this machine
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CHANGED_BY_PYTHON = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Move this process into the namespaces of another (pid namespace: only later children)."""
    folder = Path.cwd()
    handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for handle in handles:
        if _libc.setns(handle, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
    os.chdir(folder if folder.is_dir() else "/")  # /tmp of the host is its own


def become(command: list[str]) -> None:
    """Replace this process, the child, by the command."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def main() -> None:
    for number in CHANGED_BY_PYTHON:  # before the fork: a signal is not lost in the child
        signal.signal(number, signal.SIG_DFL)
    enter(int(sys.argv[1]))
    child = os.fork()
    if child == 0:
        become(sys.argv[2:])
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
