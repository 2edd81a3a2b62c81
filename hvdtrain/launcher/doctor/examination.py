"""All checks, over hosts in parallel: facts, clocks, every pair's network, shared files, a ring.

Also their output: findings as text, everything as JSON.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.launcher.doctor import machine_checks, network
from hvdtrain.launcher.doctor.facts import ALL_HOSTS, Facts, Finding, Status, failed, known
from hvdtrain.launcher.doctor.preflight import (
    ask_first,
    common_request,
    facts_here,
    facts_of,
    quick_findings,
)
from hvdtrain.launcher.doctor.ring import (
    RingTrial,
    check_ring,
    parse_measured,
    ring_command,
    ring_environment,
    run_ring,
)
from hvdtrain.launcher.doctor.sessions import NoAnswer, ProbeSession, on_all, open_sessions
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup

FACTS_S = 45.0
STEP_S = 15.0
PINGS = 5


@dataclass(frozen=True)
class Wishes:
    """Options of the examination."""

    output: str  # the folder that runs are written to
    interface: str | None = None
    controller: str = "auto"  # gloo, mpi
    ring: bool = True
    ring_limit_s: float = 60.0


@dataclass
class Examination:
    """Everything that was found."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Facts] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    latencies: dict[str, float] = field(default_factory=dict)
    reached: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    interface: str | None = None
    shared: dict[str, bool] = field(default_factory=dict)
    ring: RingTrial | None = None
    seconds: float = 0.0


def examine(hosts: Sequence[Host], ssh: SshSetup, wishes: Wishes) -> Examination:
    """Run every check. A problem of a host is a finding, never an exception."""
    began = time.monotonic()
    found = Examination()
    with (
        socket.create_server(("", 0), backlog=max(128, len(hosts))) as server,
        open_sessions(hosts, ssh) as sessions,
    ):
        request = common_request(int(server.getsockname()[1]), None)
        request |= {"do": "all", "output": wishes.output}
        answered = ask_first(sessions, ssh, request, began + FACTS_S)
        found.facts = facts_of(answered)
        found.findings += quick_findings(answered, facts_here())
        answering = {host: sessions[host] for host in found.facts}
        if answering:
            _examine_answering(found, answering, hosts, wishes)
            if wishes.ring:
                found.findings += _ring(found, answering, hosts, ssh, wishes)
    found.seconds = time.monotonic() - began
    return found


def _examine_answering(
    found: Examination, sessions: Mapping[str, ProbeSession], hosts: Sequence[Host], wishes: Wishes
) -> None:
    """Run all checks of the hosts that answer, except for the ring."""
    facts, slots = found.facts, {host.address: host.slots for host in hosts}
    first = next(host.address for host in hosts if host.address in facts)
    _ping(found, sessions)
    distant = {host: found.latencies[host] for host in found.latencies if not sessions[host].local}
    found.findings += [
        *machine_checks.check_horovod_loads(facts),
        *machine_checks.check_mpi(facts, needed=wishes.controller == "mpi"),
        *network.check_latency(distant),
        *machine_checks.check_clocks({host: found.clocks[host] for host in distant}),
        *network.check_ports(facts),
    ]
    if len(facts) > 1:
        found.reached = _reach(facts, sessions)
        routes = network.find_routes(facts, found.reached)
        found.interface = wishes.interface or next(iter(routes.usable), None)
        found.findings += network.check_pairs(routes, found.reached)
        found.findings += network.check_route(facts, routes, wishes.interface)
        found.shared = _share(facts, sessions, first)
    found.findings += [
        *machine_checks.check_gpus(facts, slots),
        *machine_checks.check_cores(facts, slots),
        *machine_checks.check_memory(facts, slots),
        *machine_checks.check_container(facts, slots),
        *machine_checks.check_shm(facts),
        *machine_checks.check_limits(facts, slots),
        *machine_checks.check_output(facts, first),
        *machine_checks.check_shared(found.shared, first, wishes.output),
    ]


def _ask(session: ProbeSession, request: Mapping[str, Any]) -> Facts:
    """Return the answer; without values if the host does not answer."""
    try:
        return session.ask(request, time.monotonic() + STEP_S).facts
    except NoAnswer as error:
        return Facts({}, {"answer": error.stderr.strip() or "none in time"})


def _ping(found: Examination, sessions: Mapping[str, ProbeSession]) -> None:
    """Measure clock offsets and latencies; the fastest of PINGS messages bounds the offset best."""

    def ping(session: ProbeSession) -> tuple[float, float, float] | None:
        best = None
        for _ in range(PINGS):
            try:
                reply = session.ask({"do": "ping"}, time.monotonic() + STEP_S)
            except NoAnswer:
                return None
            there = (reply.facts.get("began") + reply.facts.get("ended")) / 2
            here, took = (reply.asked + reply.answered) / 2, reply.answered - reply.asked
            if best is None or took < best[0]:
                best = (took, there - here, took / 2)
        return best

    for host, best in on_all(ping, sessions).items():
        if best is not None:
            found.latencies[host] = best[0]
            found.clocks[host] = best[1:]


def _reach(
    facts: Mapping[str, Facts], sessions: Mapping[str, ProbeSession]
) -> dict[str, list[dict[str, Any]]]:
    """Let every host try every address of the others except loopback; return the attempts."""
    targets = [
        {
            "host": host,
            **listener,
            "addresses": [pair for pair in facts[host].get("interfaces", []) if pair[0] != "lo"],
        }
        for host, listener in known(facts, "listener")
    ]

    def reach(session: ProbeSession) -> Facts:
        others = [target for target in targets if target["host"] != session.host.address]
        return _ask(session, {"do": "reach", "targets": others})

    return {host: found.get("reached", []) for host, found in on_all(reach, sessions).items()}


def _share(
    facts: Mapping[str, Facts], sessions: Mapping[str, ProbeSession], first: str
) -> dict[str, bool]:
    """Return whether each other host sees a file of the first host in the folder for runs."""
    output = facts[first].get("output")
    if output is None or output["problem"]:
        return {}
    file = {"folder": output["path"], "name": f".hvdtrain-doctor-{secrets.token_hex(8)}"}
    try:
        if not _ask(sessions[first], {"do": "leave", **file}).has("left"):
            return {}
        others = {host: session for host, session in sessions.items() if host != first}
        seen = on_all(lambda session: _ask(session, {"do": "look", **file}), others)
    finally:
        _ask(sessions[first], {"do": "remove", **file})
    return {host: bool(found.get("seen", False)) for host, found in seen.items()}


def _ring(
    found: Examination,
    sessions: Mapping[str, ProbeSession],
    hosts: Sequence[Host],
    ssh: SshSetup,
    wishes: Wishes,
) -> list[Finding]:
    """Run the ring and check it, unless a check has failed."""
    if failed(found.findings):
        names = ", ".join(dict.fromkeys(f.check for f in found.findings if f.status == "fail"))
        text, fix = f"not tried, since these failed: {names}", "correct them, and run doctor again"
        return [Finding("ring", "warn", ALL_HOSTS, text, fix)]
    controller = "gloo" if wishes.controller == "auto" else wishes.controller
    writer = sessions[hosts[0].address]  # the host of rank 0
    file = _ask(writer, {"do": "make_file"}).get("file", os.devnull)
    mark = secrets.token_hex(16)
    command = ring_command(hosts, ssh, controller, found.interface, file)
    try:
        code, output = run_ring(
            command, ring_environment(os.environ, ssh, mark), wishes.ring_limit_s
        )
    finally:
        content = _ask(writer, {"do": "take_file", "file": file}).get("content")
        on_all(lambda session: _ask(session, {"do": "sweep", "mark": mark}), sessions)
    workers = max(2, len(hosts))
    found.ring = RingTrial(workers, controller, code, output, parse_measured(content))
    return check_ring(found.ring)


STATUS_WIDTH, CHECK_WIDTH = 6, 16
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "ok")


def format_findings(findings: Iterable[Finding]) -> str:
    """Return one line per finding, its fix below; hosts with the same finding share a line."""
    hosts: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.status, finding.check, finding.text, finding.fix)
        hosts.setdefault(key, []).append(finding.host)
    lines = []
    for (status, check, text, fix), affected in hosts.items():
        named = ", ".join(filter(None, affected))
        prefix = f"{named}: " if named else ""
        lines.append(f"{status:<{STATUS_WIDTH}}{check:<{CHECK_WIDTH}}{prefix}{text}")
        if fix:
            lines.append(f"{'':<{STATUS_WIDTH + CHECK_WIDTH}}fix: {fix}")
    return "\n".join(lines)


def format_verdict(findings: Sequence[Finding], seconds: float) -> str:
    """Return the last line: the verdict, and the number of findings by status."""
    counts = {status: sum(f.status == status for f in findings) for status in WORST_FIRST}
    verdict = "problems found" if failed(findings) else "ready to train"
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"doctor: {verdict} ({summary}; {seconds:.1f} s)"


def as_json(found: Examination) -> dict[str, Any]:
    """Return all findings and facts, as written by --json."""
    ring = found.ring
    return {
        "ok": not failed(found.findings),
        "seconds": found.seconds,
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
        "interface": found.interface,
        "hosts": {
            host: {
                "facts": {name: fact for name, fact in facts.values.items() if name != "listener"},
                "errors": dict(facts.errors),
                "ssh_round_trip_s": found.latencies.get(host),
                "clock_ahead_s": found.clocks.get(host, (None,))[0],
                "reached": found.reached.get(host, []),
                "sees_output_of_first": found.shared.get(host),
            }
            for host, facts in found.facts.items()
        },
        "ring": None
        if ring is None
        else {
            "workers": ring.workers,
            "controller": ring.controller,
            "exit_code": ring.exit_code,
            "measured": ring.measured,
        },
    }
