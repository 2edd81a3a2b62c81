"""The starter of a host's workers: one process at the end of the one connection to its host.

It reads lines of JSON, `{"start": rank, "command": text}` and `{"stop": rank}`, and writes frames:
a header (rank, kind, length in bytes) and as many bytes. Kinds: a rank's stdout and stderr, and its
exit code in decimal digits. At the end of its input, which a lost connection is too, it stops all
workers, and ends. `host_connection.py` sends the text of this file, so the host needs Python alone.
A part of Horovod (`horovod/runner/util`).
"""

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import time

READY = b"\n--- workers of this host ---\n"  # after whatever the login prints
HEADER = struct.Struct("!iBI")
STDOUT, STDERR, ENDED = 1, 2, 3
GRACE_S = 30.0  # for a worker to save and end after SIGTERM
TICK_S = 0.1
CHUNK_BYTES = 1 << 16


class Worker:
    """A worker: its process, and the pipes of its output that are still open."""

    def __init__(self, rank: int, command: str) -> None:
        self.rank = rank
        self.kill_at_s = float("inf")
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.pipes = {self.process.stdout.fileno(): STDOUT, self.process.stderr.fileno(): STDERR}
        for pipe in self.pipes:
            os.set_blocking(pipe, False)

    def stop(self) -> None:
        """Send SIGTERM, once, to the command itself; what is left after GRACE_S is killed."""
        if self.kill_at_s == float("inf"):
            self.kill_at_s = time.monotonic() + GRACE_S
            self.process.terminate()

    def kill(self) -> None:
        """Kill the worker, which was not waited for yet, and its group."""
        os.killpg(self.process.pid, signal.SIGKILL)


class Starter:
    """All workers of this host."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._pending = b""
        self._is_over = False  # no further input

    def run(self) -> None:
        """Start and watch workers until the end of the input and of the last worker."""
        send(READY)
        while self._workers or not self._is_over:
            for key, _ in self._selector.select(TICK_S):
                if key.data is None:
                    self._read_orders()
                else:
                    self._forward(key.data, key.fd)
            for worker in list(self._workers.values()):
                if worker.process.poll() is not None:
                    self._end(worker)
                elif worker.kill_at_s < time.monotonic():
                    worker.kill()

    def stop_all(self, *_: object) -> None:
        """Stop all workers, and take no further orders."""
        self._is_over = True
        for worker in self._workers.values():
            worker.stop()

    def _read_orders(self) -> None:
        read = os.read(0, CHUNK_BYTES)
        if not read:
            self._selector.unregister(0)
            self.stop_all()
        *lines, self._pending = (self._pending + read).split(b"\n")
        for order in map(json.loads, lines):
            rank = order.get("start", order.get("stop"))
            if "start" in order and not self._is_over:
                worker = self._workers[rank] = Worker(rank, order["command"])
                for pipe in worker.pipes:
                    self._selector.register(pipe, selectors.EVENT_READ, worker)
            elif rank in self._workers:
                self._workers[rank].stop()

    def _forward(self, worker: Worker, pipe: int) -> bool:
        """Send what can be read; return whether more may follow."""
        try:
            read = os.read(pipe, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if read:
            send(HEADER.pack(worker.rank, worker.pipes[pipe], len(read)) + read)
        elif pipe in worker.pipes:
            self._selector.unregister(pipe)
            del worker.pipes[pipe]
        return bool(read)

    def _end(self, worker: Worker) -> None:
        """Send the rest of the output, and the exit code; processes it left may hold the pipes."""
        for pipe in list(worker.pipes):
            while self._forward(worker, pipe):
                pass
            if pipe in worker.pipes:
                self._selector.unregister(pipe)
        for stream in (worker.process.stdout, worker.process.stderr):
            if stream is not None:
                stream.close()
        del self._workers[worker.rank]
        code = worker.process.returncode
        digits = str(code if code >= 0 else 128 - code).encode()
        send(HEADER.pack(worker.rank, ENDED, len(digits)) + digits)


def send(data: bytes) -> None:
    """Write to the connection; once it is lost, nowhere."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    starter = Starter()
    signal.signal(signal.SIGTERM, starter.stop_all)
    signal.signal(signal.SIGHUP, starter.stop_all)
    starter.run()
