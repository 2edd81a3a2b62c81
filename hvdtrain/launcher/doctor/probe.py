"""The doctor's end on a host: `python -m hvdtrain.launcher.doctor.probe`.

It reads requests, one JSON object a line, and answers each by a marker line and a line of JSON, so
that what login scripts print does no harm. It ends with its standard input, or by an alarm.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.launcher.addresses import interface_of, interfaces, is_loopback
from hvdtrain.launcher.doctor.gathering import gather, quick_sources
from hvdtrain.launcher.doctor.tickets import write_ticket

MARKER = "@@ hvdtrain probe answers @@"
CONNECT_S = 2.0
LONGEST_LIFE_S = 180
HANDED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH", "XDG_CACHE_HOME")  # by horovodrun, to workers

Request = dict[str, Any]
Answer = dict[str, Any]


class Probe:
    """Answers requests. Each answer holds `values` and `errors`."""

    def __init__(self) -> None:
        self._own_environment = dict(os.environ)
        self._handlers: dict[str, Callable[[Request], Answer]] = {
            "quick": self._quick,
        }

    def answer(self, request: Request) -> Answer:
        os.environ.update(request.get("environment", {}))  # as workers will have it
        handler = self._handlers.get(request.get("do", ""))
        if handler is None:
            return {"values": {}, "errors": {"request": f"unknown: {request.get('do')!r}"}}
        return handler(request)

    def _quick(self, request: Request) -> Answer:
        """Facts, the way back to the launcher, and the ticket."""
        found = gather(quick_sources(request["working_directory"]))
        if request.get("channel_port"):
            found["values"]["channel"] = channel = self._call_back(request)
            if channel["address"] and request.get("ticket"):
                _merge(found, gather({"ticket": lambda: self._keep_ticket(request, channel)}))
        return found

    def _call_back(self, request: Request) -> dict[str, Any]:
        """Which of the launcher's addresses answers, and by which interface it is reached."""
        tried = []
        for address in launcher_addresses(request, self._own_environment):
            try:
                with socket.create_connection(
                    (address, request["channel_port"]), timeout=CONNECT_S
                ) as connection:
                    own = connection.getsockname()[0]
            except OSError as error:
                tried.append([address, str(error)])
            else:
                interface = interface_of(own, interfaces())
                return {"address": address, "interface": interface, "own": own, "tried": tried}
        return {"address": None, "interface": None, "own": None, "tried": tried}

    def _keep_ticket(self, request: Request, channel: dict[str, Any]) -> str:
        content = {
            "channel": [channel["address"], request["channel_port"]],
            "job": request["ticket"]["job"],
            "ticket": request["ticket"]["text"],
        }
        return str(write_ticket(content, os.environ))


def launcher_addresses(request: Request, environment: dict[str, str]) -> list[str]:
    """Candidates, best first: where this SSH connection came from, then what the launcher has."""
    if request.get("local"):
        return ["127.0.0.1"]
    client = environment.get("SSH_CONNECTION", "").split()[:1]
    offered = [address for address in request.get("addresses", []) if not is_loopback(address)]
    candidates = [address.removeprefix("::ffff:") for address in client] + offered
    return [address for address in dict.fromkeys(candidates) if ":" not in address]


def _merge(found: Answer, more: Answer) -> None:
    found["values"].update(more["values"])
    found["errors"].update(more["errors"])


def main() -> int:
    """Answer requests until there are no more."""
    signal.alarm(LONGEST_LIFE_S)  # whatever happens to the connection, nothing is left behind
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
