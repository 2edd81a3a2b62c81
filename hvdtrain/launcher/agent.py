"""The agent of one worker: `python -m hvdtrain.launcher.agent JOB`, started by horovodrun.

    launcher <-- TCP: output, step and phase, exit code --- agent <-- pipes --- worker
             --- stop, kill, stacks, leave -------------->        --- signals -->

The agent outlives its worker until the launcher sends "leave", because horovodrun ends all workers
when one ends, including those that are still saving. When the launcher is gone or unreachable, the
agent stops its worker and exits; when the agent is killed, its guard kills the worker
(hvdtrain/launcher/guard.py). No process is left behind.
"""

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from hvdtrain import cgroups
from hvdtrain.errors import EXIT_FAILED, HvdtrainError, shell_code
from hvdtrain.launcher.guard import is_of_standby, run_guarded, run_in_standby
from hvdtrain.launcher.horovodrun import worker_environment
from hvdtrain.launcher.job_folder import memory_in
from hvdtrain.launcher.protocol import (
    ALIVE_EVERY_S,
    Connection,
    ConnectionLost,
    Message,
    Orders,
    connect,
    read_orders,
    remove_ticket,
)
from hvdtrain.launcher.worker import CANNOT_START, WorkerProcess, start_command
from hvdtrain.log import complain
from hvdtrain.pulse import MEMORY_DIR, PIPE_BYTES, WorkerPulse, stop_within_s

# Between two readings of the pulse. If each beat, of several in a step, woke the agent, that would
# take time from the worker: 8 % of a core with steps of 4 ms.
PULSE_EVERY_S = 0.05
ORPHAN_GRACE_S = 30.0  # least time for the worker to save and end, once the launcher is gone
FLUSH_AFTER_S = 0.3  # an unterminated line is sent after this time
MOST_PENDING_BYTES = 1 << 18  # or at this size; a message may hold 16 times as many

# Starts a worker with environment variables, and pipes for its output and its pulse.
StartWorker = Callable[[Orders, dict[str, str], int, int], WorkerProcess]


class Agent:
    """The supervisor of one worker, on the worker's host."""

    def __init__(
        self,
        job: str,
        orders: Orders,
        environment: dict[str, str],
        channel: Connection,
        start: StartWorker,
    ) -> None:
        self._job, self._channel = job, channel
        self._orphan_grace_s = max(ORPHAN_GRACE_S, stop_within_s(orders.environment) or 0.0)
        self._connected = True
        self._left = False
        self.horovodrun_signal = 0
        self._alive_sent_s = 0.0
        self._pending = b""
        self._pending_since_s = 0.0
        self._exit_code: int | None = None
        self._memory_kills = cgroups.memory_kills()
        self._selector = selectors.DefaultSelector()
        output, writing = os.pipe()
        beats, pulse = os.pipe()
        with contextlib.suppress(OSError):  # the pipes of one user may take so much in all
            fcntl.fcntl(beats, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(output, False)
        self._pulse, self._pulse_read_s = WorkerPulse(beats, orders.furthest), 0.0
        self._output = output
        self._worker: WorkerProcess | None = None
        try:
            self._worker = start(orders, environment, writing, pulse)
        except OSError as error:
            self._exit_code = CANNOT_START
            reason = _explain_start(error, orders)
            self._send({"output": f"hvdtrain: error on {socket.gethostname()}: {reason}\n"})
            self._send({"ended": CANNOT_START})
        for fd in (writing, pulse):
            os.close(fd)
        self._selector.register(output, selectors.EVENT_READ, self._read_output)
        self._selector.register(channel, selectors.EVENT_READ, self._read_channel)

    def run(self) -> int:
        """Run until the launcher sends "leave"; return the exit code (128 + n for signal n)."""
        for message in self._channel.take_unread():  # such as "all_here": the ticket is obsolete
            self._handle(message)
        while not self._left:
            for key, _ in self._selector.select(PULSE_EVERY_S):
                key.data()
            self._poll()
        return EXIT_FAILED if self._exit_code is None else shell_code(self._exit_code)

    def _poll(self) -> None:
        now = time.monotonic()
        if self.horovodrun_signal:  # horovodrun is ending its workers: the launcher decides
            self._send({"horovodrun_signal": self.horovodrun_signal})
            self.horovodrun_signal = 0
        if now - self._pulse_read_s >= PULSE_EVERY_S:
            self._pulse_read_s = now
            self._read_pulse()
        waited_s = now - self._pending_since_s
        if waited_s > FLUSH_AFTER_S or len(self._pending) > MOST_PENDING_BYTES:
            self._forward(b"")
        if self._worker and self._exit_code is None and (code := self._worker.poll()) is not None:
            self._ended(code)
        if now - self._alive_sent_s >= ALIVE_EVERY_S:
            self._alive_sent_s = now
            state = self._worker.state if self._worker else ""
            self._send({"alive": self._pulse.report() | {"state": state}})
        if self._connected and self._channel.is_silent(now):
            self._lose()

    def _ended(self, code: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._forward(data)
        self._forward(b"")
        self._read_pulse()
        self._exit_code = code
        killed = cgroups.memory_kills() - self._memory_kills
        memory = {"killed": killed, "limit": cgroups.limits()["memory"]}
        self._send({"ended": code, "pulse": self._pulse.report(), "memory": memory})
        if not self._connected:
            self._left = True

    def _read_output(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 16)
            if not data:
                self._selector.unregister(self._output)
        whole, newline, rest = (self._pending + data).rpartition(b"\n")
        if not self._pending or whole:
            self._pending_since_s = time.monotonic()
        self._pending = rest
        self._send_output(whole + newline)

    def _forward(self, data: bytes) -> None:
        """Send all pending output and `data`, including an unterminated line."""
        output, self._pending = self._pending + data, b""
        self._send_output(output)

    def _send_output(self, output: bytes) -> None:
        if output:
            self._send({"output": output.decode("utf-8", "surrogateescape")})

    def _read_pulse(self) -> None:
        before = self._pulse.speaker
        self._pulse.read()
        if self._worker and self._pulse.speaker != before:
            self._worker.find_speaker(self._pulse.speaker)
        if self._pulse.take_news():
            self._alive_sent_s = 0.0  # report at once
        if figures := self._pulse.take_figures():
            self._send({"figures": figures})

    def _read_channel(self) -> None:
        try:
            for message in self._channel.receive():
                self._handle(message)
        except ConnectionLost:
            self._lose()

    def _handle(self, message: Message) -> None:
        worker = self._worker if self._exit_code is None else None
        match message:
            case {"signal": number} if worker:
                worker.stop(int(number))
            case {"stacks": _} if worker:
                worker.dump_stacks()
            case {"kill": _} if worker:
                worker.kill()
            case {"all_here": _}:  # every agent has read its orders
                remove_ticket(self._job)
            case {"leave": _}:
                self._left = True

    def _lose(self) -> None:
        """Disconnect from the launcher: let the worker save, if it can, then exit."""
        if not self._connected:
            return
        self._connected = False
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._channel)
        self._channel.close()
        if self._exit_code is not None:
            self._left = True
        elif self._worker:
            self._worker.stop(signal.SIGTERM)
            self._worker.kill_after(self._orphan_grace_s)

    def _send(self, message: Message) -> None:
        if self._connected:
            try:
                self._channel.send(message)
            except ConnectionLost:
                self._lose()


def _explain_start(error: OSError, orders: Orders) -> str:
    command = orders.command[0]
    if error.filename == orders.folder:
        return f"{orders.folder}, the working directory of launch: {error.strerror}"
    hint = " on PATH" if isinstance(error, FileNotFoundError) and "/" not in command else ""
    return f"{command}: {error.strerror}{hint}"


def orders_of_worker(job: str) -> tuple[Orders, tuple[str, int], dict[str, str]]:
    """Return a job's orders on this host, the launcher's address and the worker's environment.

    Raises PreflightError without orders, and UsageError unless horovodrun has started this process.
    """
    orders, address, login, folder = read_orders(job)
    environment = worker_environment(orders, os.environ, login)
    environment.pop(MEMORY_DIR, None)  # of a job that this one is started in
    if folder:
        environment[MEMORY_DIR] = memory_in(folder)
    return orders, address, environment


def run(job: str, start: StartWorker = start_command) -> int:
    """Run the agent of a job, started by horovodrun; return the worker's exit code."""
    try:
        orders, address, environment = orders_of_worker(job)
        introduction = {
            "rank": int(environment["RANK"]),
            "host": os.environ.get("HOROVOD_HOSTNAME", ""),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
        }
        channel = connect(address, orders.token, introduction)
    except (HvdtrainError, ConnectionLost) as error:
        complain(f"hvdtrain agent on {socket.gethostname()}: cannot join job {job}: {error}")
        if isinstance(error, ConnectionLost):  # the job is over: its orders are obsolete
            remove_ticket(job)
        return EXIT_FAILED
    agent = Agent(job, orders, environment, channel, start)

    def note_signal(number: int, frame: FrameType | None) -> None:
        agent.horovodrun_signal = number

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see processes.spared_by_slurm
    code = agent.run()
    remove_ticket(job)
    sys.stdout.flush()
    return code


def main() -> int:
    """Run the agent in the host's standby, or in a child; guard it, and return its exit code."""
    job = sys.argv[1]
    with contextlib.suppress(HvdtrainError):  # which the child reports
        if read_orders(job).job_folder:
            orders, _, environment = orders_of_worker(job)
            if is_of_standby(orders, environment):
                code = run_in_standby(job, environment)
                if code is not None:
                    return code
    return run_guarded(lambda: run(job))


if __name__ == "__main__":
    sys.exit(main())
