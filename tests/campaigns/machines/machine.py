"""One fresh machine: a tree of Debian, entered with processes, names and devices of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A machine ends with the campaign, however that ends.
UNSHARE = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--mount",
    "--pid",
    "--ipc",
    "--uts",
    "--fork",
    "--kill-child",
]
UNSHARE += ["--propagation", "private"]
INSIDE = Path(__file__).with_name("inside.py")
HOME = "/root"
PIP_CACHE = "/var/cache/pip"
FIRST_ERROR = re.compile(r"(?:^|[\s:])(?:fatal )?error\b|^E: |^Traceback|not found$", re.IGNORECASE)
NOT_AN_ERROR = re.compile(r"-Werror|error[-_]|errors?=0|0 errors", re.IGNORECASE)


class StepFailed(Exception):
    """A command on a machine ended with an error, or exceeded its time."""

    def __init__(self, step: str, reason: str, first_error: str, log: Path) -> None:
        super().__init__(f"{step}: {reason}: {first_error} ({log})")
        self.step = step
        self.first_error = first_error


@dataclass
class Machine:
    """A machine whose files are below `root`; each command writes a log into `logs`.

    Caches of compilers and of Horovod's wheels are in the tree, and thus empty at first. Only what
    pip downloads is kept outside, in `downloads`.
    """

    root: Path
    logs: Path
    downloads: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each step

    def run(
        self,
        step: str,
        command: Sequence[str],
        *,
        folder: str = HOME,
        variables: Mapping[str, str] | None = None,
        limit_s: float = 3600.0,
    ) -> str:
        """Run a command; return its output, standard error included. Raises StepFailed."""
        self.logs.mkdir(parents=True, exist_ok=True)
        number = len(list(self.logs.glob("*.log")))
        log = self.logs / f"{number:02}-{step.replace(' ', '-')}.log"
        began_s = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.argv(command, folder),
                env=self.environment() | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        self.seconds[step] = time.monotonic() - began_s
        output = log.read_text("utf-8", errors="replace")
        print(f"  {step}: {self.seconds[step]:.0f} s", flush=True)
        if code != 0:
            reason = f"no end after {limit_s:g} s" if code is None else f"exit code {code}"
            raise StepFailed(step, reason, first_error(output), log)
        return output

    def argv(self, command: Sequence[str], folder: str) -> list[str]:
        """Return the command line, on this machine, that runs a command on that one."""
        plan = {
            "root": str(self.root),
            "folder": folder,
            "binds": {PIP_CACHE: str(self.downloads)},
        }
        return [*UNSHARE, sys.executable, "-I", "-S", str(INSIDE), json.dumps(plan), *command]

    def environment(self) -> dict[str, str]:
        """Return the variables of a login there, with the settings of package registries."""
        own = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        own |= {"XDG_CACHE_HOME": f"{HOME}/.cache", "PIP_CACHE_DIR": PIP_CACHE}
        return own | dict(self.variables)

    def path(self, path: str) -> Path:
        """Return where a path of the machine is here."""
        return self.root / path.lstrip("/")


def first_error(output: str) -> str:
    """Return the first line that reports an error, or else the last line.

    A line that ends with a colon is continued by the next one.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if FIRST_ERROR.search(line) and not NOT_AN_ERROR.search(line):
            return " ".join(lines[number : number + 1 + line.endswith(":")])
    return lines[-1] if lines else "no output"
