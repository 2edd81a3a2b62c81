"""Metrics and status page of a job, served by a process of its own.

    launcher --- a line of JSON a second ---> hvdtrain/report/status.py <--- Prometheus, browsers

That process uses libraries that the launcher does without. It inherits the listening socket, and
ends when its pipe is closed, in whatever way the launcher has ended. Nothing here waits for it.
"""

import contextlib
import errno
import ipaddress
import json
import os
import socket
import subprocess
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.ranks import Rank
from hvdtrain.launcher.supervise import Watch
from hvdtrain.launcher.view import describe, headline
from hvdtrain.pulse import OWN, WAITING

SERVER = module_argv("hvdtrain.report.status")
EVERY_S = 1.0
NOTICES_SHOWN = 10
IN_STEP = (*OWN, WAITING)  # phases of a step that is not done


@dataclass(frozen=True)
class Endpoint:
    """Where to serve, and the secret that is demanded of those who ask, if any."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches it. Raises UsageError for an unknown host."""
        address = str(self._resolve()[1][0])
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback

    def listen(self) -> socket.socket:
        """Return a listening socket. Raises UsageError if the port cannot be had."""
        family, address = self._resolve()
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            reason = error.strerror if error.errno != errno.EADDRINUSE else "the port is taken"
            raise UsageError(
                f"--metrics-port={self.port}: cannot listen on {self.host}: {reason}; choose "
                "another port, or 0 for any free one"
            ) from error

    def _resolve(self) -> tuple[socket.AddressFamily, Any]:
        try:
            kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
            family, *_, address = socket.getaddrinfo(self.host, self.port, 0, kind, 0, passive)[0]
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"--metrics-host={self.host}: no such address; give one of this machine, or "
                "0.0.0.0 for all"
            ) from error
        return family, address


class MetricsServer:
    """The process that serves metrics and status page, fed with the state of the job."""

    def __init__(self, endpoint: Endpoint, title: str) -> None:
        """Listen, but start nothing yet. Raises UsageError if the port cannot be had."""
        self._greeting = {"token": endpoint.token, "title": title}
        self._watch, self._counts, self._before = Watch([]), Counter[str](), Counter[str]()
        self._notices: deque[str] = deque(maxlen=NOTICES_SHOWN)
        self._due_s, self._rest = 0.0, b""
        self._listener = endpoint.listen()
        host, port = self._listener.getsockname()[:2]
        anywhere = ipaddress.ip_address(host.partition("%")[0]).is_unspecified
        name = socket.gethostname() if anywhere else f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port}/"

    def start(self) -> None:
        """Start the process, which ends with this one."""
        with self._listener as listener:
            self._process = subprocess.Popen(
                [*SERVER, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C is for the launcher, which goes on meanwhile
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._rest = _line(self._greeting) + self._state()
        self._feed()

    def notice(self, text: str) -> None:
        """Show a line of the launcher."""
        self._notices.append(text)
        self._rest = self._rest or self._state()
        self._feed()

    def update(self, watch: Watch) -> bool:
        """Pass on the state of the job; return whether the process is still there."""
        if watch is not self._watch:  # another start
            self._watch, self._before, self._counts = watch, self._before + self._counts, Counter()
        self._counts |= _counts_of(watch)
        if not self._rest and time.monotonic() > self._due_s:
            self._rest = self._state()
        return self._feed()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()  # it may be suspended, and has nothing to save
        self._process.wait()

    def _feed(self) -> bool:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
        except BlockingIOError:
            return True
        except OSError:  # it has ended
            return False
        return True

    def _state(self) -> bytes:
        self._due_s = time.monotonic() + EVERY_S
        watch, first = self._watch, self._watch.ranks[:1]
        return _line(
            {
                "at_s": time.monotonic(),
                "headline": headline(watch) if first else "starting",
                "restarts": watch.restarts,
                "figures": watch.figures,
                "counts": self._before + self._counts,
                "ranks": [_row(rank) for rank in watch.ranks],
                "lines": [line for rank in first for line in rank.last_lines],
                "notices": list(self._notices),
            }
        )


def _counts_of(watch: Watch) -> Counter[str]:
    """Return what was done since this start, from the moment on at which rank 0 reports it."""
    before = watch.figures.get("before", {})
    done = max((rank.step - (rank.phase in IN_STEP) for rank in watch.ranks), default=0)
    now = watch.figures | {"steps": done}
    return Counter({name: max(0, now.get(name, first) - first) for name, first in before.items()})


def _row(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.number,
        "host": rank.host,
        "up": rank.state == "running",
        "step": rank.step,
        "phase": rank.phase if rank.speaks else "",
        "silent_s": rank.silent_s + time.monotonic() - rank.heard_s,
        "note": describe(rank, slow=False),
    }


def _line(content: dict[str, Any]) -> bytes:
    return f"{json.dumps(content)}\n".encode()
