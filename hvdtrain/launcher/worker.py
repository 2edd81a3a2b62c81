"""A worker: the command that an agent starts, often a shell, and all processes that it starts.

The agent is a subreaper, so all these processes remain its descendants, even those that outlive
their parent or have a session of their own. One of them may be the speaker: the process that writes
to the pulse pipe (hvdtrain/pulse.py), and that can save.
"""

import ctypes
import math
import os
import signal
import subprocess
import time
from functools import partial

from hvdtrain.launcher.processes import (
    HELPERS_GRACE_S,
    descendants,
    id_within,
    kill_all,
    process_state,
    reap,
    send_signal,
)
from hvdtrain.launcher.protocol import Orders
from hvdtrain.pulse import PULSE_FD, STACKS_SIGNAL

NEXT_S = 5.0  # for a shell to end after its last command
REST_GRACE_S = 3.0  # for processes that the command leaves behind
KILLED_S = 2.0  # longest wait for killed processes, less than the launcher waits for their end
CANNOT_START = 127  # exit code, as in shells
KILL_S = 5.0  # longest wait of the guard; a process held in a system call is abandoned
ROUND_S = 0.02
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class WorkerProcess:
    """One worker: its command and all descendants."""

    def __init__(self, command: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """`command`: id of its first process, a child of this one, which `process` started."""
        self._command, self._process = command, process
        self._speaker = 0
        self._codes: dict[int, int] = {}
        self._stop = 0  # the signal that requested its end
        self._silent_s = math.inf  # time since which there is no speaker
        self._rest_stopped = False  # whether SIGTERM was sent to the remaining processes
        self._kill_at_s = math.inf
        self._killed_s = math.inf

    @property
    def state(self) -> str:
        """Return the /proc state letter of the speaker, or of the command if there is none."""
        return process_state(self._speaker if self._speaks() else self._command)

    def find_speaker(self, pid_within: int) -> None:
        """Find the speaker by its id in its own PID namespace."""
        below = descendants(os.getpid())
        self._speaker = next((pid for pid in below if id_within(pid) == pid_within), 0)
        if self._stop:  # a shell has gone on to its next command
            self._signal(self._stop)

    def stop(self, number: int) -> None:
        """Request by a signal that the worker save and end."""
        self._stop = number
        self._signal(number)

    def dump_stacks(self) -> None:
        """Request Python stacks on standard error; this aborts a script without a speaker."""
        self._signal(STACKS_SIGNAL if self._speaks() else signal.SIGABRT)

    def kill_after(self, seconds: float) -> None:
        """Continue suspended processes now; kill what is left after `seconds`."""
        send_signal(signal.SIGCONT, descendants(os.getpid()))
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + seconds)

    def kill(self) -> None:
        self._killed_s = min(self._killed_s, time.monotonic())
        kill_all(descendants(os.getpid()), self._killed_s)

    def poll(self) -> int | None:
        """Reap, and end leftovers; return the exit code once no process is left, else None.

        It is the speaker's if its shell ended before it, else the command's; minus n for signal n.
        """
        now = time.monotonic()
        some_left = reap(self._codes)
        ended = self._command in self._codes
        self._silent_s = math.inf if self._speaks() else min(self._silent_s, now)
        if some_left and self._silent_s <= now:
            self._end_rest(ended)
        if min(self._killed_s, self._kill_at_s) < now:
            self.kill()  # again, for processes started since
        given_up = now - self._killed_s > KILLED_S
        if not ended or (some_left and not given_up):
            return None
        if self._process:
            self._process.returncode = self._codes[self._command]
        return self._codes.get(self._speaker, self._codes[self._command])

    def _end_rest(self, ended: bool) -> None:
        """End the processes left after the speaker or the command has ended."""
        if self._speaker and ended:  # helpers, which remove what they share, such as semaphores
            self.kill_after(HELPERS_GRACE_S)
            return
        if self._speaker:  # after a stop, a shell must not continue with its next command
            due = self._stop != 0 and time.monotonic() - self._silent_s > NEXT_S
        else:  # if the signal ended the shell, its children may still be saving
            due = ended and (not self._stop or self._codes[self._command] != -self._stop)
        if due and not self._rest_stopped:
            self._rest_stopped = True
            send_signal(signal.SIGTERM, descendants(os.getpid()))
            self.kill_after(REST_GRACE_S)

    def _speaks(self) -> bool:
        return self._speaker != 0 and process_state(self._speaker) not in ("", "Z", "X")

    def _signal(self, number: int) -> None:
        # A speaker passes on what its children need. Its shell, if signalled as well, might send it
        # a second signal, which means to stop without saving.
        send_signal(number, [self._speaker] if self._speaks() else descendants(os.getpid()))


def start_command(
    orders: Orders, variables: dict[str, str], output: int, pulse: int
) -> WorkerProcess:
    """Start the command with these environment variables and pipes. Raises OSError."""
    agent = os.getpid()
    process = subprocess.Popen(
        orders.command,
        cwd=orders.folder,
        env=variables | {PULSE_FD: str(pulse)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(pulse,),
        start_new_session=True,
        preexec_fn=partial(die_with, agent),
    )
    return WorkerProcess(process.pid, process)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(CANNOT_START)


def become_subreaper() -> None:
    """Make this process adopt descendants whose parents end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill all descendants of this process, and wait up to KILL_S for their end."""
    began_s = time.monotonic()
    while reap({}) and time.monotonic() < began_s + KILL_S:
        kill_all(descendants(os.getpid()), began_s)
        time.sleep(ROUND_S)
