"""All checks over hosts in parallel; and `preflight`, the quick part, with which `launch` begins.

The quick part: ssh, same software, user and path, a way back to this machine. After it come
facts of the machines, clocks, every pair's network, shared files, and a ring.
"""

import dataclasses
import itertools
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.launcher.addresses import ANYWHERE, LOOPBACK, addresses_of
from hvdtrain.launcher.doctor import (
    ALL_HOSTS,
    ByHost,
    Facts,
    Finding,
    Slots,
    checks,
    failed,
    gpu_checks,
    machine_checks,
    values_of,
)
from hvdtrain.launcher.doctor.facts import gather, quick_sources
from hvdtrain.launcher.doctor.ring import RingTrial, check_ring, try_ring
from hvdtrain.launcher.doctor.sessions import ProbeSession, on_all, open_sessions
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import working_folders
from hvdtrain.launcher.ssh import SshSetup, is_local
from hvdtrain.network import interfaces

FACTS_S = 45.0
PINGS = 5

Sessions = Mapping[str, ProbeSession]  # by host.address


@dataclass
class Examination:
    """Everything that was found; `preflight` finds the first three fields."""

    findings: list[Finding]
    facts: dict[str, Facts]  # hosts that could not be reached are missing
    # For Horovod: the user's choice, else the best one; of `preflight`, that through which hosts
    # reach this machine. None: all are local, or they use different ones.
    interface: str | None = None
    pings: dict[str, tuple[float, float]] = field(default_factory=dict)  # as _ping returns them
    reached: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    shared: dict[str, bool] = field(default_factory=dict)
    ring: RingTrial | None = None
    burn_in: dict[str, Any] | None = None
    seconds: float = 0.0


def preflight(
    sessions: Sessions,
    ssh: SshSetup,
    channel_port: int,
    ticket: Mapping[str, Any] | None,
    timeout_s: float,
    channel_address: str = ANYWHERE,
    slots: Slots | None = None,
    thorough: bool = True,
) -> Examination:
    """Run the quick part on the hosts of these sessions in parallel.

    `channel_port`: a port of this machine on which the caller listens; each host connects to it and
    hangs up (0: not tried). `ticket`: stored on each host for the agents (see protocol.py):
    the `job` (letters, digits, - and _), and the `ticket`, a text of JSON; with `keeps` the hosts
    keep a folder for the job (hvdtrain/launcher/job_folder.py).
    `channel_address`: the address listened on, if not all. `slots`: how many workers each of these
    hosts gets, for which its cores and its memory are checked (None: not checked). `thorough`: see
    also why a host does not answer.
    """
    request = {
        "do": "quick",
        "channel_port": channel_port,
        "channel_address": None if channel_address == ANYWHERE else channel_address,
        "ticket": ticket,
    }
    on_one = ssh.options.hub is not None and ssh.options.hub.on_one
    quick = _begin(sessions, request, timeout_s, on_one, thorough)
    distant = {host: facts for host, facts in quick.facts.items() if not sessions[host].local}
    quick.interface, of_interface = checks.check_interface(distant, interfaces())
    quick.findings += of_interface
    if slots:
        used = {host: facts for host, facts in quick.facts.items() if host in slots}
        quick.findings += machine_checks.check_cores(used, slots)
        quick.findings += machine_checks.check_memory(used, slots)
        limits = machine_checks.check_container(used, slots) + machine_checks.check_shm(used)
        quick.findings += [finding for finding in limits if finding.status == "fail"]
    return quick


def withdraw(sessions: Sessions, job: str) -> None:
    """Remove the ticket of a job from those of the hosts that answer."""
    on_all(lambda session: session.ask_again({"do": "withdraw", "job": job}), sessions)


def first_address(hosts: Sequence[Host], facts: ByHost) -> str:
    """Return the address of the first host as the others reach it."""
    first = hosts[0]
    if not is_local(first):  # its own address, by which it has reached this machine
        return str(facts[first.address].get("channel")["own"])
    # On this machine: the address that the others have connected to.
    others = [host.address for host in hosts if not is_local(host)]
    return str(facts[others[0]].get("channel")["address"]) if others else LOOPBACK


def _begin(
    sessions: Sessions, request: Mapping[str, Any], timeout_s: float, on_one: bool, thorough: bool
) -> Examination:
    """Send the first request to all hosts; return the facts, and the findings of the quick part.

    `on_one`: all hosts may be one machine.
    """
    folders = working_folders()
    request = {
        "working_directory": folders,
        "addresses": [address for _, address in interfaces()],
        **request,
    }
    answers = on_all(lambda session: session.ask_or_explain(request, timeout_s, thorough), sessions)
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, Facts)}
    failures = [answer for answer in answers.values() if isinstance(answer, Finding)]
    if not facts:
        return Examination(failures, facts)
    here = Facts(**gather(quick_sources(folders)))  # this machine may be none of the hosts
    noise = {host: sessions[host].noise for host in facts if not sessions[host].local}
    names = {host: addresses_of(sessions[host].host.name) for host in noise}
    named = {host for host, session in sessions.items() if session.host.user}
    slots = {host: session.host.slots for host, session in sessions.items()}
    findings = [
        *failures,
        *checks.check_gathered(facts),
        *([] if on_one else checks.check_machines(facts, slots)),
        *checks.check_names(facts, names),
        *checks.check_login_is_quiet(noise, silent=len(failures)),
        *checks.check_python(facts, here),
        *checks.check_packages(facts, here),
        *machine_checks.check_built_for(facts),
        *checks.check_hvdtrain(facts, here),
        *checks.check_user(facts, here, named),
        *machine_checks.check_working_directory(facts),
        *checks.check_channel(facts, noise),
    ]
    return Examination(findings, facts)


def examine(
    hosts: Sequence[Host],
    ssh: SshSetup,
    output: str,
    interface: str | None = None,
    controller: str = "auto",
    ring: bool = True,
) -> Examination:
    """Run every check. A problem of a host is a finding, never an exception.

    `output`: the folder that runs are written to. `interface`: the user's choice. `controller`:
    auto, gloo or mpi. `ring`: whether to start workers.
    """
    began = time.monotonic()
    with (
        socket.create_server(("", 0), backlog=max(128, len(hosts))) as server,
        open_sessions(hosts, ssh) as sessions,
    ):
        request = {"do": "all", "channel_port": server.getsockname()[1], "output": output}
        examination = _begin(sessions, request, FACTS_S, on_one=False, thorough=True)
        answering = {host: sessions[host] for host in examination.facts}
        if answering:
            _examine_answering(examination, answering, hosts, output, interface, controller)
            if ring and failed(examination.findings):
                names = dict.fromkeys(f.check for f in examination.findings if f.status == "fail")
                text = f"not tried, since these failed: {', '.join(names)}"
                fix = "correct them, and run doctor again"
                examination.findings.append(Finding("ring", "warn", ALL_HOSTS, text, fix))
            elif ring:
                controller = "gloo" if controller == "auto" else controller
                towards = None if interface else first_address(hosts, examination.facts)
                examination.ring = try_ring(
                    hosts, ssh, answering, controller, examination.interface, towards
                )
                examination.findings += check_ring(examination.ring)
    examination.seconds = time.monotonic() - began
    return examination


def _examine_answering(
    examination: Examination,
    sessions: Sessions,
    hosts: Sequence[Host],
    output: str,
    interface: str | None,
    controller: str,
) -> None:
    """Run all checks of the hosts that answer, except for the ring."""
    facts, slots = examination.facts, {host.address: host.slots for host in hosts}
    first = next(host.address for host in hosts if host.address in facts)
    examination.pings = _ping(sessions)
    distant = {host: ping for host, ping in examination.pings.items() if not sessions[host].local}
    examination.findings += [
        *machine_checks.check_horovod_loads(facts),
        *machine_checks.check_torchvision_loads(facts),
        *machine_checks.check_mpi(facts, needed=controller == "mpi"),
        *checks.check_latency({host: took for host, (took, _) in distant.items()}),
        *machine_checks.check_clocks(
            {host: (ahead, took / 2) for host, (took, ahead) in distant.items()}
        ),
        *machine_checks.check_ports(facts),
    ]
    if len(facts) > 1:
        _examine_network(examination, sessions, {host: facts[host] for host in distant}, interface)
        examination.shared = _share(facts, sessions, first)
    examination.findings += [
        *gpu_checks.check_gpus(facts, slots),
        *gpu_checks.check_gpu_builds(facts),
        *itertools.chain(*(gpu_checks.check_cards(facts, name) for name in gpu_checks.CARD_CHECKS)),
        *gpu_checks.check_gpu_kinds(facts),
        *machine_checks.check_cores(facts, slots),
        *machine_checks.check_memory(facts, slots),
        *machine_checks.check_container(facts, slots),
        *machine_checks.check_shm(facts),
        *machine_checks.check_limits(facts, slots),
        *machine_checks.check_output(facts, first),
        *machine_checks.check_shared(examination.shared, first, output),
    ]


def _examine_network(
    examination: Examination, sessions: Sessions, distant: ByHost, wanted: str | None
) -> None:
    """Check whether and how hosts reach one another. `distant`: facts of those behind ssh.
    `wanted`: the interface that the user chose.
    """
    facts = examination.facts
    examination.reached = _reach(facts, sessions)
    usable = checks.find_usable(facts, examination.reached)
    examination.interface = wanted or next(iter(usable), None)
    pairs = checks.check_pairs(facts, examination.reached, usable)
    examination.findings += pairs
    if not failed(pairs):
        examination.findings += checks.check_route(facts, usable, wanted)
        local_interface, _ = checks.check_interface(distant, interfaces())
        examination.interface = examination.interface or local_interface


def _ping(sessions: Sessions) -> dict[str, tuple[float, float]]:
    """Return, by host, the seconds that a message takes, and those by which the clock is ahead, by
    the fastest of PINGS messages: half of its time bounds the error.
    """

    def ping(session: ProbeSession) -> list[tuple[float, float]]:
        measured = []
        for _ in range(PINGS):
            asked = time.time()
            there = session.ask_again({"do": "ping"})
            answered = time.time()
            if not there.values:
                return []
            middle = (there.get("began") + there.get("ended")) / 2
            measured.append((answered - asked, middle - (asked + answered) / 2))
        return measured

    return {host: min(pings) for host, pings in on_all(ping, sessions).items() if pings}


def _reach(facts: ByHost, sessions: Sessions) -> dict[str, list[dict[str, Any]]]:
    """Let every host try every address of the others except loopback; return the attempts."""
    targets = [
        {
            "host": host,
            **listener,
            "addresses": [pair for pair in facts[host].get("interfaces", []) if pair[0] != "lo"],
        }
        for host, listener in values_of(facts, "listener")
    ]

    def reach(session: ProbeSession) -> list[dict[str, Any]]:
        others = [target for target in targets if target["host"] != session.host.address]
        return list(session.ask_again({"do": "reach", "targets": others}).get("reach", []))

    return on_all(reach, sessions)


def _share(facts: ByHost, sessions: Sessions, first: str) -> dict[str, bool]:
    """Return whether each other host sees a file of the first host in the folder for runs."""
    output = facts[first].get("output")
    if output is None or output["problem"]:
        return {}
    file = str(Path(output["path"], f".hvdtrain-doctor-{secrets.token_hex(8)}"))
    look = {"do": "look", "file": file}
    try:
        if not sessions[first].ask_again({"do": "leave", "file": file}).get("leave"):
            return {}
        others = {host: session for host, session in sessions.items() if host != first}
        return on_all(lambda session: bool(session.ask_again(look).get("look")), others)
    finally:
        sessions[first].ask_again({"do": "take_file", "file": file})


def as_json(examination: Examination) -> dict[str, Any]:
    """Return all findings and facts, as written by --json."""
    ring = dataclasses.asdict(examination.ring) if examination.ring else {}
    pings = examination.pings
    return {
        "ok": not failed(examination.findings),
        "seconds": examination.seconds,
        "findings": [dataclasses.asdict(finding) for finding in examination.findings],
        "interface": examination.interface,
        "hosts": {
            host: {
                "facts": {name: fact for name, fact in facts.values.items() if name != "listener"},
                "errors": dict(facts.errors),
                "ssh_round_trip_s": pings[host][0] if host in pings else None,
                "clock_ahead_s": pings[host][1] if host in pings else None,
                "reached": examination.reached.get(host, []),
                "sees_output_of_first": examination.shared.get(host),
            }
            for host, facts in examination.facts.items()
        },
        "ring": {name: value for name, value in ring.items() if name != "output"} or None,
        "burn_in": examination.burn_in,
    }
