"""The probe, run on each host: `python -m hvdtrain.launcher.doctor.probe`.

It reads requests, one JSON object per line, and answers each by a marker line and a line of JSON,
so output of login scripts does not matter. It ends with its standard input, or by an alarm.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdtrain.launcher.addresses import interface_of, interfaces, is_loopback
from hvdtrain.launcher.doctor.software import gather, quick_sources
from hvdtrain.launcher.processes import marked
from hvdtrain.launcher.tickets import write_ticket

MARKER = "@@ hvdtrain probe answers @@"
MARK = "HVDTRAIN_DOCTOR"  # environment variable by which the doctor finds its own processes
CONNECT_S = 2.0
LONGEST_LIFE_S = 180
# Variables that horovodrun passes to the workers.
HANDED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "XDG_CACHE_HOME")

Request = dict[str, Any]
Answer = dict[str, Any]


class Probe:
    """The handlers of all requests; each answer holds `values` and `errors`."""

    def __init__(self) -> None:
        self._own_environment = dict(os.environ)
        self._listener: Any = None
        self._handlers: dict[str, Callable[[Request], Answer]] = {
            "quick": self._quick,
            "all": self._all,
            "reach": self._reach,
            "ping": lambda request: gather({}),
            "leave": lambda request: gather({"left": lambda: leave(request)}),
            "look": lambda request: gather({"seen": lambda: look(request)}),
            "remove": lambda request: gather({"removed": lambda: remove(request)}),
            "make_file": lambda request: gather({"file": make_file}),
            "take_file": lambda request: gather({"content": lambda: take_file(request)}),
            "sweep": lambda request: gather({"killed": lambda: sweep(request["mark"])}),
        }

    def answer(self, request: Request) -> Answer:
        os.environ.update(request.get("environment", {}))  # the environment that workers will have
        handler = self._handlers.get(request.get("do", ""))
        if handler is None:
            return {"values": {}, "errors": {"request": f"unknown: {request.get('do')!r}"}}
        return handler(request)

    def _quick(self, request: Request) -> Answer:
        """Gather the quick facts, connect back to the launcher, and store the ticket."""
        found = gather(quick_sources(request["working_directory"]))
        if request.get("channel_port"):
            found["values"]["channel"] = channel = self._call_back(request)
            if channel["address"] and request.get("ticket"):
                _merge(found, gather({"ticket": lambda: keep_ticket(request, channel)}))
        return found

    def _all(self, request: Request) -> Answer:
        """Gather all facts; those that need child processes, concurrently."""
        from hvdtrain.launcher.doctor.machine import machine_sources
        from hvdtrain.launcher.doctor.software import child_sources

        with ThreadPoolExecutor() as threads:
            parts = [
                threads.submit(gather, {name: source}) for name, source in child_sources().items()
            ]
            found = self._quick(request)
            _merge(found, gather(machine_sources(request["output"])))
            _merge(found, gather({"listener": self._listen}))
            for part in parts:
                _merge(found, part.result())
        return found

    def _listen(self) -> dict[str, Any]:
        from hvdtrain.launcher.doctor.network import Listener

        self._listener = Listener()
        return {"port": self._listener.port, "token": self._listener.token}

    def _reach(self, request: Request) -> Answer:
        from hvdtrain.launcher.doctor.network import reach_all

        return gather({"reached": lambda: reach_all(request["targets"])})

    def _call_back(self, request: Request) -> dict[str, Any]:
        """Return the first launcher address that accepts a connection, and the interface used."""
        tried = []
        for address in launcher_addresses(request, self._own_environment):
            target = (address, request["channel_port"])
            try:
                with socket.create_connection(target, timeout=CONNECT_S) as connection:
                    own = connection.getsockname()[0]
            except OSError as error:
                tried.append([address, error.strerror or str(error)])
            else:
                interface = interface_of(own, interfaces())
                return {"address": address, "interface": interface, "own": own, "tried": tried}
        return {"address": None, "interface": None, "own": None, "tried": tried}


def launcher_addresses(request: Request, environment: dict[str, str]) -> list[str]:
    """Return the addresses to try, best first: the SSH client, then the launcher's interfaces."""
    if request.get("channel_address"):  # it listens nowhere else
        return [str(request["channel_address"])]
    if request.get("local"):
        return ["127.0.0.1"]
    client = environment.get("SSH_CONNECTION", "").split()[:1]
    offered = [address for address in request.get("addresses", []) if not is_loopback(address)]
    candidates = [address.removeprefix("::ffff:") for address in client] + offered
    return [address for address in dict.fromkeys(candidates) if ":" not in address]


def keep_ticket(request: Request, channel: dict[str, Any]) -> str:
    """Write the launch's ticket; return its path."""
    content = {
        "channel": [channel["address"], request["channel_port"]],
        "job": request["ticket"]["job"],
        "ticket": request["ticket"]["text"],
    }
    return str(write_ticket(content, os.environ))


def leave(request: Request) -> str:
    """Write the file that other hosts will look for; return its path."""
    path = Path(request["folder"], request["name"])
    path.write_text("left by hvdtrain doctor\n", "utf-8")
    return str(path)


def look(request: Request) -> bool:
    """Return whether the file is visible here; listing the folder bypasses cached lookups."""
    try:
        return request["name"] in os.listdir(request["folder"])  # noqa: PTH208
    except FileNotFoundError:
        return False


def remove(request: Request) -> bool:
    Path(request["folder"], request["name"]).unlink(missing_ok=True)
    return True


def make_file() -> str:
    """Create an empty temporary file for a worker to write; return its path."""
    handle, path = tempfile.mkstemp(prefix="hvdtrain-doctor-")
    os.close(handle)
    return path


def take_file(request: Request) -> str:
    """Return the content of the temporary file, and remove the file."""
    path = Path(request["file"])
    content = path.read_text("utf-8")
    path.unlink()
    return content


def sweep(mark: str) -> int:
    """Kill the doctor's remaining processes on this host, found by their environment.

    Return their number.
    """
    found = marked(MARK, mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def _merge(found: Answer, more: Answer) -> None:
    found["values"].update(more["values"])
    found["errors"].update(more["errors"])


def main() -> int:
    """Answer requests until the input ends; return the exit code."""
    signal.alarm(LONGEST_LIFE_S)  # leaves nothing behind, even if the connection hangs
    probe = Probe()
    for line in sys.stdin:
        request = json.loads(line)
        began = time.time()
        answer = probe.answer(request)
        answer["values"] |= {"began": began, "ended": time.time()}
        sys.stdout.write(f"\n{MARKER}\n{json.dumps(answer)}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
