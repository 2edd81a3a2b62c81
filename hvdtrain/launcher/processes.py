"""Processes of this machine, from /proc, and the signals that stop `hvdtrain launch`."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

from hvdtrain.errors import PreflightError, Stopped
from hvdtrain.files import hold
from hvdtrain.pulse import STOP_SIGNALS
from hvdtrain.slurm import in_job

# A batch system may signal every process of a job, and the batch script pass its signal on too:
# signals this close to the first one count as one.
TOGETHER_S = 1.0
ABANDONED_AFTER_S = 60.0
EXEC_LIMIT_S, EXEC_POLL_S = 1.0, 0.001
# Among the fields of `stat_of`: where in the memory of a process these begin and end
# (proc_pid_stat(5)).
ARGUMENTS, ENVIRONMENT = slice(45, 47), slice(47, 49)
TRACKER = "multiprocessing.resource_tracker"
HELPERS_GRACE_S = 1.0  # for those that end by themselves after the process that they help
_IGNORE_SIGTERM = """\
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], [os.path.basename(sys.argv[1]), *sys.argv[2:]])
"""


def own_passwd_entry() -> Any:
    """Return the user's line in passwd (`pwd.struct_passwd`); None for a user without a line, as in
    containers with another user id.
    """
    import pwd  # not on Windows, where `--help` imports this module

    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def working_folders() -> list[str]:
    """Return the path of the working folder and, if it was entered through symbolic links, the one
    with these: other hosts may have only one of the two.
    """
    real, shown = str(Path.cwd()), Path(os.environ.get("PWD", ""))
    linked = str(shown) != real and shown.is_absolute() and shown.is_dir() and shown.samefile(real)
    return [real, str(shown)] if linked else [real]


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as it may."""
    import resource  # not on Windows, where `--help` imports this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_writable(folder: str) -> bool:
    """Return whether this user can make files in a folder."""
    return Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def programs_folder(executable: bool = True) -> str:
    """Return a folder for short-lived programs: that of temporary files, unless it is mounted
    without permission to execute. Raises PreflightError if no folder allows it.

    `executable`: False: any that can be written serves, as nothing in it will be executed.
    """
    folders = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"]
    folders += [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("HOME", "")]
    tried = list(dict.fromkeys(filter(None, folders)))
    for folder in tried:
        if is_writable(folder) and not (executable and os.statvfs(folder).f_flag & os.ST_NOEXEC):
            return folder
    raise PreflightError(
        f"no folder for temporary programs: {', '.join(tried)} cannot be written, or are mounted "
        "noexec; set TMPDIR to a folder where files can be made and executed"
    )


def remove_abandoned(parent: Path, prefix: str, lock: str) -> None:
    """Remove the folders with this prefix whose makers, processes of this user, were killed: nobody
    holds the file `lock` in them.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < ABANDONED_AFTER_S:
                continue
            with (folder / lock).open("a") as file:
                hold(file)
                shutil.rmtree(folder, ignore_errors=True)


def marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """Return pid -> environment of processes started with name=value, in whatever session."""
    environments = {}
    for pid in _all_processes():
        variables = _environment_of(pid).split("\0")
        if f"{name}={value}" in variables:
            pairs = (variable.partition("=") for variable in variables)
            environments[pid] = {key: text for key, _, text in pairs}
    return environments


def _environment_of(pid: int) -> str:
    """Return the environment that a process was started with.

    The kernel shows nothing of it while the process is within exec, which takes long on a busy
    machine: wait for the end of that. Such a process has an executable, but its environment has no
    place in memory yet; threads of the kernel and zombies have neither.
    """
    deadline = time.monotonic() + EXEC_LIMIT_S
    while not (environment := _read(pid, "environ")) and time.monotonic() < deadline:
        first, last = stat_of(pid)[ENVIRONMENT] or ("0", "0")
        if first == last and (first != "0" or not os.access(f"/proc/{pid}/exe", os.F_OK)):
            break  # it is empty
        time.sleep(EXEC_POLL_S)
    return environment


def command_of(pid: int) -> str:
    """Return the arguments of a process, joined by spaces; empty once it has ended."""
    return _read(pid, "cmdline").replace("\0", " ").strip()


def run_child(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Return exit code and output of a short command. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it: its pid stays reserved."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def remove_sessions_of_dead_mpiruns() -> None:
    """Remove what this user's mpiruns have left in TMPDIR that were killed on this machine."""
    name = socket.gethostname()
    for host_name in {name, name.partition(".")[0]}:
        folder = Path(os.environ.get("TMPDIR", "/tmp"), f"ompi.{host_name}.{os.getuid()}")
        for session in folder.glob("pid.*"):
            if not Path("/proc", session.name.removeprefix("pid.")).exists():
                shutil.rmtree(session, ignore_errors=True)
        with suppress(OSError):  # absent, or in use
            folder.rmdir()


def process_state(pid: int) -> str:
    """Return the state in /proc: R, S, D, T (suspended), t (traced), Z; empty once it is gone."""
    return "".join(stat_of(pid)[:1])


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's id of this boot of the machine. Raises OSError."""
    return (root / "proc/sys/kernel/random/boot_id").read_text().strip()


def start_of(pid: int) -> str:
    """Return when a process was started, in ticks since the boot: with the boot and the pid this
    names one process. Empty if it has ended, also if nobody has reaped it.
    """
    numbers = stat_of(pid)
    return "" if not numbers or numbers[0] in "ZX" else numbers[19]


def descendants(pid: int) -> list[int]:
    """Return the pids of the running descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for each in _all_processes():
        state_and_parent = stat_of(each)[:2]
        if state_and_parent and state_and_parent[0] not in "ZX":
            children.setdefault(int(state_and_parent[1]), []).append(each)
    pids = children.get(pid, [])
    for below in pids:  # the list grows in the loop
        pids += children.get(below, [])
    return pids


def id_within(pid: int) -> int:
    """Return the id of a process in its own PID namespace; 0 once it is gone."""
    lines = _read(pid, "status").splitlines()
    outer = pid if lines else 0  # in a kernel without such namespaces, which has no such line
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), outer)


def _all_processes() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _read(pid: int | Literal["self"], name: str) -> str:
    """Return a file of a process in /proc; empty once it is gone, and if it is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def stat_of(pid: int | Literal["self"]) -> list[str]:
    """Return the fields in /proc/PID/stat from the third on, the state; none once it is gone.

    "self": of this process, also where /proc is that of another PID namespace.
    """
    return _read(pid, "stat").rpartition(")")[2].split()


def send_signal(number: int, pids: Iterable[int]) -> None:
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


def kill_all(pids: Sequence[int], since_s: float) -> None:
    """Kill processes, but until HELPERS_GRACE_S after `since_s` (time.monotonic()) not the trackers
    of multiprocessing: these then end by themselves, once they have removed the semaphores and
    shared memory of those that were killed.
    """
    if time.monotonic() - since_s < HELPERS_GRACE_S:
        pids = [pid for pid in pids if TRACKER not in command_of(pid)]
    send_signal(signal.SIGKILL, pids)


def reap(codes: dict[int, int]) -> bool:
    """Add pid -> exit code (minus n for signal n) of ended children; return whether any is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not pid:
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def raise_when_stopped() -> None:
    """Raise Stopped on SIGTERM and SIGHUP from now on, so that started processes are ended."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


class StopRequests:
    """The signals received: recorded while workers run, else raised as Stopped."""

    def __init__(self, many: bool = False) -> None:
        """`many`: SIGTERM may come to several processes of the job, and is passed on by each: all
        of them are one request.
        """
        self._is_one_sigterm = many or in_job()
        self.numbers: list[int] = []
        self._workers_run = False
        self._first_s = 0.0
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._handle)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record signals within the context instead of raising Stopped."""
        self._workers_run = True
        try:
            yield
        finally:
            self._workers_run = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_one = number == signal.SIGTERM and self._is_one_sigterm
        repeated = is_one or now - self._first_s < TOGETHER_S
        if self.numbers and repeated:
            return
        self._first_s = self._first_s or now
        self.numbers.append(number)
        if not self._workers_run:
            raise Stopped(number)


def spared_by_slurm(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command`, in a Slurm job with SIGTERM ignored and blocked.

    `scontrol requeue` and `scancel` send SIGTERM to every process of the job's first host. It would
    end horovodrun, mpirun and ssh, and so the workers, before they can save; Slurm's SIGKILL comes
    later (KillWait). Ignoring alone does not suffice, since mpirun installs a handler; blocking
    alone does not either, since a shell that starts the program unblocks it.
    """
    guard = [sys.executable, "-I", "-S", "-c", _IGNORE_SIGTERM] if in_job() else []
    return [*guard, *command]
