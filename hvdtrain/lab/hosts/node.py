"""One set of Linux namespaces, held by an init process, and control of the processes inside."""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.errors import HvdtrainError

HERE = Path(__file__).parent
TOOL_TIMEOUT_S = 20.0
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
UNSHARE = ("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc")
PYTHON = (sys.executable, "-I", "-S")  # standard library only, so that it starts quickly


class HostsError(HvdtrainError):
    """A failure of the hosts themselves, not of what runs on them."""


class Node:
    """A machine in its own namespaces, with a shared file system.

    Private are: network, host name, processes, System V shared memory, /dev/shm, /run and /tmp
    (except the folders in `visible`), and the files in `binds` (target: source). All its processes
    end with `close`, and also when this process ends in any way.
    """

    def __init__(
        self, name: str, visible: Sequence[Path] = (), binds: Mapping[str, Path] | None = None
    ) -> None:
        plan = {
            "name": name,
            "visible": [str(path) for path in visible],
            "binds": {target: str(source) for target, source in (binds or {}).items()},
        }
        self.name = name
        self._init: psutil.Process | None = None
        self._keeper = subprocess.Popen(
            [*UNSHARE, *PYTHON, str(HERE / "init.py"), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert self._keeper.stdout
            readable, _, _ = select.select([self._keeper.stdout], [], [], TOOL_TIMEOUT_S)
            text = self._keeper.stdout.readline().decode() if readable else "no answer"
            if text != "ready\n":
                raise HostsError(f"host {name} does not start: {text.strip()}")
            self._init = psutil.Process(self._keeper.pid).children()[0]
            self.pid = self._init.pid
            self._namespace = _pid_namespace(self.pid)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._keeper.poll() is None

    def tool(self, namespaces: Sequence[str], *command: str, lines: Sequence[str] = ()) -> str:
        """Run a tool of the machine in some of this node's namespaces. Raises HostsError."""
        chosen = (f"--{name}" for name in namespaces)
        return run_tool(["nsenter", f"--target={self.pid}", *chosen, "--", *command], lines)

    def processes(self) -> list[psutil.Process]:
        """Return the processes that are alive on it, except its init."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                inside = process.pid != self.pid and _pid_namespace(process.pid) == self._namespace
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def close(self) -> None:
        """End all its processes, and wait until they have ended."""
        kill_all([self._init] if self._init else [])
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            assert pipe
            pipe.close()
        try:
            self._keeper.wait(TOOL_TIMEOUT_S)  # it outlives the last process of the namespace
        finally:
            self._keeper.kill()


class HostProcess(subprocess.Popen[str]):
    """A command on a host. `pid` is that of enter.py outside; signals go to the command itself."""

    def __init__(self, node: Node, command: Sequence[str], **options: object) -> None:
        enter = [*PYTHON, str(HERE / "enter.py"), str(node.pid), *command]
        self._inner: psutil.Process | None = None
        options |= {"text": True, "errors": "replace", "start_new_session": True}
        super().__init__(enter, **options)  # type: ignore[call-overload]

    @property
    def inner(self) -> psutil.Process:
        """Return the command itself, with its pid outside. Raises HostsError if it has ended."""
        deadline = time.monotonic() + TOOL_TIMEOUT_S
        while not self._inner:
            if self.poll() is not None or time.monotonic() > deadline:
                raise HostsError(f"{self.args!r} has ended")
            with contextlib.suppress(IndexError, psutil.NoSuchProcess):
                self._inner = psutil.Process(self.pid).children()[0]
                break
            time.sleep(0.01)
        return self._inner

    def send_signal(self, sig: int) -> None:
        """Send a signal to the command, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(HostsError, psutil.NoSuchProcess):
                self.inner.send_signal(sig)

    def discard(self) -> None:
        """Kill it if it runs, and close its pipes."""
        if self.poll() is None:
            self.kill()
            self.wait(TOOL_TIMEOUT_S)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe:
                pipe.close()


def run_tool(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Run a tool of the machine, and return its standard output. Raises HostsError."""
    answer = subprocess.run(
        command,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    if answer.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {(answer.stderr + answer.stdout).strip()}")
    return answer.stdout


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes; those that have ended are left out."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _pid_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino
