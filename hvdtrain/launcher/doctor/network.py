"""What the tries of every pair of hosts say: who reaches whom, and by which interface."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.launcher.doctor.facts import ALL_HOSTS, ByHost, Finding, known

Reached = Mapping[str, Sequence[Mapping[str, Any]]]  # by the host that tried, see reaching.py
# Interfaces of container engines and virtual machines: an address on them is seldom the same host.
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")
SLOW_SSH_S = 0.5


@dataclass(frozen=True)
class Routes:
    """Who reaches whom."""

    usable: tuple[str, ...]  # interfaces over which every host reaches every other, best first
    cut: tuple[tuple[str, str], ...]  # pairs (from, to) without any address that works
    seconds: float | None  # to connect, the median over the best interface


def find_routes(facts: ByHost, reached: Reached) -> Routes:
    """`facts`: with interfaces and speeds."""
    pairs = list(itertools.permutations(facts, 2))
    good: dict[str, set[tuple[str, str]]] = {}
    seconds: dict[str, list[float]] = {}
    for host, tries in reached.items():
        for attempt in tries:
            if attempt["problem"] is None:
                name = attempt["interface"]
                good.setdefault(name, set()).add((host, attempt["host"]))
                seconds.setdefault(name, []).append(attempt["seconds"])
    usable = [name for name, those in good.items() if set(pairs) <= those]
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
    """Every host can connect to every other, on ports that nobody chose."""
    findings = []
    for source, target in routes.cut:
        tries = [attempt for attempt in reached.get(source, ()) if attempt["host"] == target]
        told = "; ".join(f"{attempt['address']}: {attempt['problem']}" for attempt in tries)
        text = f"cannot connect to {target} ({told or 'no address to try'})"
        fix = (
            f"open TCP from {source} to {target}, all ports from 1024 (firewall, security group): "
            "MPI and Gloo choose theirs at random"
        )
        findings.append(Finding("network", "fail", source, text, fix))
    if not findings and reached:
        text = "hosts can connect to one another"
        if routes.seconds is not None:
            text += f" ({routes.seconds * 1000:.1f} ms)"
        findings.append(Finding("network", "ok", ALL_HOSTS, text))
    return findings


def check_ports(facts: ByHost) -> list[Finding]:
    """Every host can listen."""
    return [
        Finding(
            "ports",
            "fail",
            host,
            f"no port can be listened on: {found.errors['listener']}",
            "free ports, or widen net.ipv4.ip_local_port_range",
        )
        for host, found in facts.items()
        if "listener" in found.errors
    ] or [Finding("ports", "ok", ALL_HOSTS, "a port can be listened on")]


def check_route(facts: ByHost, routes: Routes, wanted: str | None) -> list[Finding]:
    """One interface, by one name, that joins all hosts. `wanted`: the user's choice."""
    if routes.cut:
        return []  # told by check_pairs
    if wanted is not None and wanted not in routes.usable:
        better = f"; over {', '.join(routes.usable)} they do" if routes.usable else ""
        text = f"hosts do not reach one another over {wanted}{better}"
        fix = (
            f"--network-interface {routes.usable[0]}"
            if routes.usable
            else "leave --network-interface out, to see what there is"
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
    text = f"no network interface joins all hosts under one name, as Horovod needs it ({listed})"
    fix = "give it one name on all hosts: `ip link set NAME name net0`"
    return [Finding("interface", "fail", ALL_HOSTS, text, fix)]


def check_latency(seconds: Mapping[str, float]) -> list[Finding]:
    """A message to a probe and back, by ssh."""
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
