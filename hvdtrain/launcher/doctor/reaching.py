"""TCP between hosts: each listens, and tries every address of the others."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdtrain.launcher.addresses import interface_of, interfaces

CONNECT_S = 2.0
AT_ONCE = 64


class Listener:
    """Says its token to whoever connects.

    The token tells hosts apart: a bridge of a container engine has the same address on each host,
    and whoever connects to it has reached himself.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self._socket = socket.create_server(("", 0), backlog=256)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(CONNECT_S)
                try:
                    connection.sendall(self.token.encode())
                except OSError:
                    continue


def reach_all(targets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Try every address of every target: {host, port, token, addresses: [[interface, address]]}."""
    own = interfaces()
    attempts = [
        (target, str(interface), str(address))
        for target in targets
        for interface, address in target["addresses"]
    ]
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, max(1, len(attempts)))) as threads:
        return list(threads.map(lambda attempt: _reach(attempt, own), attempts))


def _reach(attempt: tuple[dict[str, Any], str, str], own: list[tuple[str, str]]) -> dict[str, Any]:
    target, interface, address = attempt
    found: dict[str, Any] = {"host": target["host"], "interface": interface, "address": address}
    began = time.perf_counter()
    try:
        with socket.create_connection((address, target["port"]), timeout=CONNECT_S) as connection:
            found["seconds"] = time.perf_counter() - began
            found["through"] = interface_of(connection.getsockname()[0], own)
            said = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return found | {"problem": error.strerror or str(error)}
    return found | {"problem": None if said == target["token"] else "another machine answers"}
