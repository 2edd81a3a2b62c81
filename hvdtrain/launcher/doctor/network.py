"""TCP between every pair of hosts: the attempts, the usable interfaces, and the findings."""

from __future__ import annotations

import itertools
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hvdtrain.launcher.addresses import interface_of, interfaces
from hvdtrain.launcher.doctor.facts import ALL_HOSTS, ByHost, Finding, known

Reached = Mapping[str, Sequence[Mapping[str, Any]]]  # results of reach_all by connecting host
# Interfaces of container engines and virtual machines: their addresses often repeat on each host.
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")
SLOW_SSH_S = 0.5
CONNECT_S = 2.0
AT_ONCE = 64  # threads that connect


@dataclass(frozen=True)
class Routes:
    """The connections that work between hosts."""

    usable: tuple[str, ...]  # interfaces over which every host reaches every other, best first
    cut: tuple[tuple[str, str], ...]  # pairs (from, to) without any address that works
    seconds: float | None  # median time to connect over the best interface


def find_routes(facts: ByHost, reached: Reached) -> Routes:
    """Derive the routes from all attempts; `facts` give the speeds of the interfaces."""
    pairs = list(itertools.permutations(facts, 2))
    good: dict[str, set[tuple[str, str]]] = {}
    seconds: dict[str, list[float]] = {}
    for host, tries in reached.items():
        for attempt in tries:
            if attempt["problem"] is None:
                name = attempt["interface"]
                good.setdefault(name, set()).add((host, attempt["host"]))
                seconds.setdefault(name, []).append(attempt["seconds"])
    usable = [name for name, joined in good.items() if set(pairs) <= joined]
    usable.sort(key=lambda name: _rank(name, facts, statistics.median(seconds[name])))
    linked = set().union(*good.values()) if good else set()
    return Routes(
        usable=tuple(usable),
        cut=tuple(pair for pair in pairs if pair not in linked),
        seconds=statistics.median(seconds[usable[0]]) if usable else None,
    )


def _rank(name: str, facts: ByHost, seconds: float) -> tuple[bool, int, float]:
    speeds = [found.get("speeds", {}).get(name, 0) for found in facts.values()]
    return name.startswith(VIRTUAL), -min(speeds), seconds


def check_pairs(routes: Routes, reached: Reached) -> list[Finding]:
    """Check that every host can connect to every other on arbitrary ports."""
    findings = []
    for source, target in routes.cut:
        tries = [attempt for attempt in reached.get(source, ()) if attempt["host"] == target]
        problems = "; ".join(f"{attempt['address']}: {attempt['problem']}" for attempt in tries)
        text = f"cannot connect to {target} ({problems or 'no address to try'})"
        fix = (
            f"open TCP from {source} to {target}, all ports from 1024 (firewall, security group): "
            "MPI and Gloo choose ports at random"
        )
        findings.append(Finding("network", "fail", source, text, fix))
    if not findings and reached:
        text = "hosts can connect to one another"
        if routes.seconds is not None:
            text += f" ({routes.seconds * 1000:.1f} ms)"
        findings.append(Finding("network", "ok", ALL_HOSTS, text))
    return findings


def check_ports(facts: ByHost) -> list[Finding]:
    """Check that every host can listen on a port."""
    return [
        Finding(
            "ports",
            "fail",
            host,
            f"cannot listen on any port: {found.errors['listener']}",
            "free ports, or widen net.ipv4.ip_local_port_range",
        )
        for host, found in facts.items()
        if "listener" in found.errors
    ] or [Finding("ports", "ok", ALL_HOSTS, "hosts can listen on a port")]


def check_route(facts: ByHost, routes: Routes, wanted: str | None) -> list[Finding]:
    """Check that one interface, by one name, joins all hosts. `wanted`: the user's choice."""
    if routes.cut:
        return []  # reported by check_pairs
    if wanted is not None and wanted not in routes.usable:
        better = f"; over {', '.join(routes.usable)} they do" if routes.usable else ""
        text = f"hosts do not reach one another over {wanted}{better}"
        fix = (
            f"--network-interface {routes.usable[0]}"
            if routes.usable
            else "omit --network-interface to see which interfaces there are"
        )
        return [Finding("interface", "fail", ALL_HOSTS, text, fix)]
    if routes.usable:
        best = wanted or routes.usable[0]
        others = [name for name in routes.usable if name != best]
        also = f" (also joined by {', '.join(others)})" if others else ""
        text = f"Horovod should use {best}{also}"
        return [Finding("interface", "ok", ALL_HOSTS, text)]
    names = {
        host: sorted({name for name, _ in interfaces if name != "lo"})
        for host, interfaces in known(facts, "interfaces")
    }
    listed = "; ".join(f"{host}: {', '.join(own) or 'none'}" for host, own in names.items())
    text = f"no network interface joins all hosts under one name, as Horovod requires ({listed})"
    fix = "give it one name on all hosts: `ip link set NAME name net0`"
    return [Finding("interface", "fail", ALL_HOSTS, text, fix)]


def check_latency(seconds: Mapping[str, float]) -> list[Finding]:
    """Check the round-trip time to each probe over ssh."""
    if not seconds:
        return []
    slowest = max(seconds, key=seconds.__getitem__)
    milliseconds = seconds[slowest] * 1000
    if seconds[slowest] > SLOW_SSH_S:
        text = f"a message by ssh and back takes {milliseconds:.0f} ms"
        fix = "start from a machine near the hosts; training itself does not go through ssh"
        return [Finding("latency", "warn", slowest, text, fix)]
    text = f"{milliseconds:.1f} ms by ssh and back (the slowest: {slowest})"
    return [Finding("latency", "ok", ALL_HOSTS, text)]


class Listener:
    """A TCP server that sends its token to every client.

    The token identifies the host: the bridge of a container engine has the same address on each
    host, so a connection to that address reaches the connecting host itself.
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
    """Try every address of every target: {host, port, token, addresses: [[interface, address]]}.

    Return for each address: host, interface, address, problem (None: connected), and if connected
    seconds and `through`, the interface of this end.
    """
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
            token = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return found | {"problem": error.strerror or str(error)}
    return found | {"problem": None if token == target["token"] else "another machine answers"}
