"""One set of Linux namespaces, kept by an init process, and what runs inside, seen from outside."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.parallel.launching import kill_all

HERE = Path(__file__).parent
TOOL_TIMEOUT_S = 20.0
UNSHARE = "unshare --net --uts --mount --ipc --pid --fork --kill-child --mount-proc".split()
PYTHON = (sys.executable, "-I", "-S")  # standard library only, so that it starts quickly


class HostsError(RuntimeError):
    """The test hosts themselves failed, not what is tested on them."""


class Node:
    """A machine of its own as far as the kernel can tell; the file system is shared.

    Its own are: network, host name, processes, System V shared memory, /dev/shm, /run and /tmp
    (but for the folders in `visible`), and the files in `binds` (target: source). Everything on
    it ends with `close`, and also when this process ends in any way.
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
        self._keeper = subprocess.Popen(
            [*UNSHARE, *PYTHON, str(HERE / "init.py"), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
            self.pid = psutil.Process(self._keeper.pid).children()[0].pid
            self._namespace = _pid_namespace(self.pid)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        assert self._keeper.stdout
        readable, _, _ = select.select([self._keeper.stdout], [], [], TOOL_TIMEOUT_S)
        text = self._keeper.stdout.readline().decode() if readable else "no answer"
        if text != "ready\n":
            raise HostsError(f"host {self.name} does not start: {text.strip()}")

    @property
    def is_alive(self) -> bool:
        return self._keeper.poll() is None

    def tool(self, namespaces: Sequence[str], *command: str, lines: Sequence[str] = ()) -> str:
        """Run a tool of the machine in some of this node's namespaces. Raises HostsError."""
        enter = ["nsenter", f"--target={self.pid}", *(f"--{name}" for name in namespaces)]
        return run_tool([*enter, "--", *command], lines)

    def path(self, path: Path | str) -> Path:
        """A path of this node as it is seen from outside, its private mounts included."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def processes(self) -> list[psutil.Process]:
        """What is alive on it, other than its init."""
        found = []
        for process in psutil.process_iter():
            try:
                inside = process.pid != self.pid and _pid_namespace(process.pid) == self._namespace
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, OSError):
                continue
        return found

    def close(self) -> None:
        """End everything on it; returns when all is gone."""
        for process in psutil.Process(self._keeper.pid).children() if self.is_alive else []:
            kill_all([process])
        assert self._keeper.stdin and self._keeper.stdout
        self._keeper.stdin.close()
        try:
            self._keeper.wait(TOOL_TIMEOUT_S)
        finally:
            self._keeper.kill()
            self._keeper.stdout.close()


class HostProcess(subprocess.Popen[str]):
    """A command on a host. `pid` is its keeper outside; signals go to the command itself."""

    def __init__(self, node: Node, command: Sequence[str], **options: object) -> None:
        enter = [*PYTHON, str(HERE / "enter.py"), str(node.pid), *command]
        super().__init__(enter, text=True, errors="replace", start_new_session=True, **options)  # type: ignore[call-overload]

    @property
    def inner(self) -> psutil.Process:
        """The command itself, with its pid outside. Raises HostsError once it has ended."""
        deadline = time.monotonic() + TOOL_TIMEOUT_S
        while self.poll() is None and time.monotonic() < deadline:
            try:
                return psutil.Process(self.pid).children()[0]
            except (IndexError, psutil.NoSuchProcess):
                time.sleep(0.01)
        raise HostsError(f"{self.args} has ended")

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            self.inner.send_signal(sig)

    def signal_group(self, sig: int) -> None:
        """To the command and all of its process group, as a terminal would."""
        os.killpg(self.inner.pid, sig)

    def discard(self) -> None:
        """Kill it if it runs, and close its pipes."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(TOOL_TIMEOUT_S)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe:
                pipe.close()


def run_tool(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Standard output of a tool of the machine. Raises HostsError."""
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


def _pid_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino
