"""Status reports of a worker to the agent that started it: phase, step and final error.

`hvdtrain launch` starts each worker under its own agent, with a pipe (hvdtrain/launcher/agent.py).
Each line is one write; one that finds the pipe full is dropped, so a worker never waits for its
observer. Without a pipe nothing is reported.

    +PHASE STEP SECONDS     start of a phase, by the worker's monotonic clock
    ={"loss": ...}          figures to show
    !{"peer": true, ...}    end with an error, here because another rank has failed; "final": one
                            that another start would meet again; "wrong_rank": the rank whose host
                            computes wrongly, as an audit found
    @FOLDER                 of the run that begins, on rank 0
    ?PID                    process id of the worker; on SIGUSR2 it writes all threads' stacks to
                            standard error
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import select
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_MISMATCH, EXIT_USAGE, ComputeMismatch, PeerFailure, UsageError

PULSE_FD = "HVDTRAIN_PULSE_FD"
RESTART = "HVDTRAIN_RESTART"  # how often the launcher has started this job again
JOB = "HVDTRAIN_JOB"  # names a job over all its starts
MEMORY_DIR = "HVDTRAIN_MEMORY_DIR"  # private, in memory on each host, for all starts of a job
COMMAND = "HVDTRAIN_COMMAND"  # the command line of the launcher
STOP_WITHIN = "HVDTRAIN_STOP_WITHIN_S"  # from a signal to stop until what still runs is killed
RING_TOKEN = "HVDTRAIN_RING_TOKEN"  # a secret of the workers of one start, for the ring's sockets
STACKS_SIGNAL: int = getattr(signal, "SIGUSR2", 0)  # 0: on Windows, where no worker runs
# By each of them a run is asked to save and end. (None on Windows.)
STOP_SIGNALS: tuple[int, ...] = tuple(
    number
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
)
BEGUN = "start"  # the first phase, and the only one of commands that do not train
WAITING = "exchange"  # the phase in which a rank waits for others
ENDED = "end"  # the phase after training
BEFORE_EXCHANGE = ("data", "compute")  # phases of a step for which other ranks may have to wait
OWN = (*BEFORE_EXCHANGE, "update")  # those that depend on this rank alone
FULL_PIPE_TIMEOUT_S = 5.0
FINAL = (EXIT_USAGE, EXIT_MISMATCH)  # exit codes of errors that a restart cannot change
PIPE_BYTES = 1 << 20  # room for some seconds: the agent does not read at once
STEPS_SHOWN = 10  # steps over which a rank's own time is averaged


def stop_within_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds in which a signalled job must end; None if not set. Raises UsageError."""
    text = environment.get(STOP_WITHIN)
    if text is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise UsageError(f"{STOP_WITHIN}={text[:60]!a}: must be a number of seconds above 0")


class Pulse:
    """The status reports of one process; silent without a pipe."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._phase = BEGUN
        self.step = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Pulse:
        """Connect to the agent's pipe, if any, and register the handler that writes stacks."""
        try:
            fd = int(environment.get(PULSE_FD, ""))
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):  # the number has been reused
                return cls()
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)  # child processes do not report
        except (OSError, ValueError):  # no agent, or the variable was inherited without the pipe
            return cls()
        pulse = cls(fd)
        faulthandler.unregister(STACKS_SIGNAL)  # a library may have removed its handler
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        pulse._report(f"?{os.getpid()}")
        return pulse

    @property
    def is_watched(self) -> bool:
        return self._fd is not None

    def beat(self, phase: str | None = None) -> None:
        """Report that a phase begins, or (None) that the current one continues."""
        self._phase = phase or self._phase
        if self._fd is not None:  # called several times a step: format only if read
            self._report(f"+{self._phase} {self.step} {time.monotonic():.6f}")

    def show(self, **figures: Any) -> None:
        """Report figures of the whole job."""
        self._report("=" + json.dumps(figures))

    def begin_run(self, folder: Path) -> None:
        """Report the folder of the run that begins."""
        self._report(f"@{folder.absolute()}")

    def saved(self, step: int) -> None:
        """Report that the checkpoint of a step is complete."""
        self._wait_for_room()
        self.show(saved=step)

    def finish(self) -> None:
        """Report that training has ended."""
        self._wait_for_room()
        self.beat(ENDED)

    def end(self, error: Exception) -> None:
        """Report the error that this process ends with."""
        self._wait_for_room()
        cause: dict[str, Any] = {"peer": isinstance(error, PeerFailure)}
        cause["final"] = getattr(error, "exit_code", None) in FINAL
        if isinstance(error, ComputeMismatch):
            cause["wrong_rank"] = error.wrong_rank
        self._report("!" + json.dumps(cause))

    def _wait_for_room(self) -> None:
        """Wait for a full pipe, before a report that must arrive."""
        if self._fd is not None:
            select.select([], [self._fd], [], FULL_PIPE_TIMEOUT_S)

    def _report(self, line: str) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.write(self._fd, f"{line}\n".encode())


class WorkerPulse:
    """The agent's end of the pipe: the state of one worker."""

    def __init__(self, fd: int, furthest: int = 0) -> None:
        """`furthest`: step after which a first one is news."""
        os.set_blocking(fd, False)
        self._fd, self._furthest = fd, furthest
        self._seen: set[str] = set()  # what is news only once
        self._has_news = False
        self._rest = b""
        self._figures: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._folder = ""
        self._beat_s = time.monotonic()
        self._phase, self._step, self._began_s = BEGUN, 0, 0.0
        self._busy_s = 0.0  # time of this step so far in the phases OWN
        self._busy_of_steps: list[float] = []
        self.speaker = 0  # id of the process that writes to the pipe, in its PID namespace

    def read(self) -> bool:
        """Read the available data; return False once the worker has closed its end."""
        try:
            data = os.read(self._fd, PIPE_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError):
                self._take(line.decode("utf-8", "replace"))
        return True

    def take_news(self) -> bool:
        """Return whether something happened for the first time since the last call: a phase, the
        connection of the worker, or a step that no start before has reached.
        """
        has_news, self._has_news = self._has_news, False
        return has_news

    def take_figures(self) -> dict[str, Any]:
        """Return the figures since the last call."""
        figures, self._figures = self._figures, {}
        return figures

    def report(self) -> dict[str, Any]:
        """Return step, phase, seconds since the last beat, own time in a step, and how it ended."""
        steps = self._busy_of_steps
        return {
            "step": self._step,
            "phase": self._phase,
            "silent_s": round(time.monotonic() - self._beat_s, 3),
            "busy_s": round(sum(steps) / len(steps), 6) if steps else None,
            "speaks": self.speaker != 0,
            "folder": self._folder,
        } | self._last

    def _take(self, line: str) -> None:
        text = line[1:]
        match line[:1]:
            case "+":
                self._beat_s = time.monotonic()
                phase, step, began = text.split(" ")
                self._change(phase, int(step), float(began))
            case "=":
                self._figures |= json.loads(text)
            case "!":
                self._last = dict(json.loads(text))
            case "@":
                self._folder = self._folder or text  # of the first, if there are several
            case "?":
                self.speaker = int(text)
                self._beat_s = time.monotonic()
                self._note("speaker")

    def _note(self, event: str) -> None:
        self._has_news = self._has_news or event not in self._seen
        self._seen.add(event)

    def _change(self, phase: str, step: int, began_s: float) -> None:
        self._note(phase)
        if step > self._furthest:
            self._note("new step")
        if self._phase in OWN and self._began_s:
            self._busy_s += began_s - self._began_s
        if step != self._step:
            if self._step:
                self._busy_of_steps = [*self._busy_of_steps, self._busy_s][-STEPS_SHOWN:]
            self._busy_s = 0.0
        self._phase, self._step, self._began_s = phase, step, began_s
