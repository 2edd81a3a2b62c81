"""Running the checks: the quick part, which `launch` begins with, and all of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.launcher.addresses import interfaces, is_loopback
from hvdtrain.launcher.doctor import checks
from hvdtrain.launcher.doctor.facts import ByHost, Facts, Finding
from hvdtrain.launcher.doctor.gathering import gather, quick_sources
from hvdtrain.launcher.doctor.sessions import NoAnswer, Reply, Session, on_all
from hvdtrain.launcher.doctor.ssh_failures import Attempt, explain
from hvdtrain.launcher.doctor.tickets import Ticket
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup, is_local


@dataclass(frozen=True)
class Preflight:
    """What the quick part found."""

    findings: tuple[Finding, ...]
    interface: str | None  # all hosts reach this machine through it; None: all local, or differing
    facts: ByHost  # hosts that could not be reached are missing


@dataclass(frozen=True)
class Answered:
    """One host's probe: its first reply, or why there is none."""

    session: Session
    reply: Reply | None
    failure: Finding | None


def preflight(
    hosts: Sequence[Host],
    ssh: SshSetup,
    channel_port: int,
    ticket: Ticket | None,
    timeout_s: float,
) -> Preflight:
    """The quick part, all hosts in parallel: ssh, the same software, user and path, and a way back.

    `channel_port`: of this machine, on which somebody listens; each host connects to it and hangs
    up (0: not tried). `ticket`: kept on each host for the agents (see tickets.py).
    """
    request = quick_request(channel_port, ticket)
    deadline = time.monotonic() + timeout_s

    def ask(host: Host) -> Answered:
        with Session(host, ssh) as session:
            return first_reply(session, ssh, request, deadline)

    answered = on_all(ask, hosts)
    here = facts_here()
    facts = {host: item.reply.facts for host, item in answered.items() if item.reply}
    findings = quick_findings(hosts, answered, here)
    distant = distant_facts(hosts, facts)
    interface, _ = checks.common_interface(distant, interfaces())
    return Preflight(tuple(findings), interface, facts)


def facts_here() -> Facts:
    """The same facts of this machine, which may be none of the hosts."""
    return Facts.from_json(gather(quick_sources(str(Path.cwd()))))


def quick_request(channel_port: int, ticket: Ticket | None) -> Mapping[str, Any]:
    """What each host is asked."""
    return {
        "do": "quick",
        "working_directory": str(Path.cwd()),
        "channel_port": channel_port,
        "addresses": [address for _, address in interfaces() if not is_loopback(address)],
        "ticket": {"job": ticket.job, "text": ticket.text} if ticket else None,
    }


def first_reply(
    session: Session, ssh: SshSetup, request: Mapping[str, Any], deadline: float
) -> Answered:
    """Ask; a host that does not answer is explained."""
    host = session.host
    try:
        return Answered(session, session.ask(request, deadline), None)
    except NoAnswer as silence:
        attempt = Attempt(
            host=host.address,
            name=host.name,
            by_hand=ssh.by_hand(host),
            flags=" ".join(ssh.flags()),
            exit_code=silence.exit_code,
            stderr=silence.stderr,
            noise=silence.noise,
        )
        return Answered(session, None, explain(attempt))


def quick_findings(
    hosts: Sequence[Host], answered: Mapping[str, Answered], here: Facts
) -> list[Finding]:
    """All checks of the quick part."""
    facts = {host: item.reply.facts for host, item in answered.items() if item.reply}
    distant = distant_facts(hosts, facts)
    named = {host.address for host in hosts if host.user}
    noise = {host: tuple(answered[host].session.noise) for host in distant}
    seconds = {
        host: reply.answered - reply.asked for host in distant if (reply := answered[host].reply)
    }
    failures = [item.failure for item in answered.values() if item.failure]
    if not facts:
        return failures
    return [
        *failures,
        *checks.check_gathered(facts),
        *checks.check_ssh(noise, seconds),
        *checks.check_python(facts, here),
        *checks.check_packages(facts, here),
        *checks.check_hvdtrain(facts, here),
        *checks.check_user(facts, here, named),
        *checks.check_working_directory(facts),
        *checks.check_channel(facts),
        *checks.check_interface(distant, interfaces()),
    ]


def distant_facts(hosts: Sequence[Host], facts: ByHost) -> ByHost:
    """Of the hosts that are reached by ssh."""
    return {
        host.address: facts[host.address]
        for host in hosts
        if host.address in facts and not is_local(host)
    }
