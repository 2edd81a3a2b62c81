"""The quick part of the checks, with which `launch` begins; `examination` extends it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.launcher.addresses import ANYWHERE, interfaces, is_loopback
from hvdtrain.launcher.doctor import checks
from hvdtrain.launcher.doctor.facts import ByHost, Facts, Finding
from hvdtrain.launcher.doctor.sessions import NoAnswer, ProbeSession, Reply, on_all, open_sessions
from hvdtrain.launcher.doctor.software import gather, quick_sources
from hvdtrain.launcher.doctor.ssh_failures import Attempt, explain
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.launcher.tickets import Ticket


@dataclass(frozen=True)
class Preflight:
    """Result of the quick part."""

    findings: tuple[Finding, ...]
    interface: str | None  # through which hosts reach this machine; None: all local, or different
    facts: ByHost  # hosts that could not be reached are missing


@dataclass(frozen=True)
class Answered:
    """The first reply of a host's probe, or the finding that explains its absence."""

    session: ProbeSession
    reply: Reply | None
    failure: Finding | None


def preflight(
    hosts: Sequence[Host],
    ssh: SshSetup,
    channel_port: int,
    ticket: Ticket | None,
    timeout_s: float,
    channel_address: str = ANYWHERE,
) -> Preflight:
    """Run the quick part on all hosts in parallel: ssh, same software, user and path, a way back.

    `channel_port`: a port of this machine on which the caller listens; each host connects to it and
    hangs up (0: not tried). `ticket`: stored on each host for the agents (see tickets.py).
    `channel_address`: the address listened on, if not all.
    """
    request = {"do": "quick", **common_request(channel_port, ticket, channel_address)}
    with open_sessions(hosts, ssh) as sessions:
        answered = ask_first(sessions, ssh, request, time.monotonic() + timeout_s)
    findings = quick_findings(answered, facts_here())
    findings += checks.check_interface(distant_facts(answered), interfaces())
    interface, _ = checks.common_interface(distant_facts(answered), interfaces())
    return Preflight(tuple(findings), interface, facts_of(answered))


def facts_here() -> Facts:
    """Return the quick facts of this machine, which may be none of the hosts."""
    return Facts.from_json(gather(quick_sources(str(Path.cwd()))))


def common_request(
    channel_port: int, ticket: Ticket | None, channel_address: str = ANYWHERE
) -> dict[str, Any]:
    """Return the fields that the requests of the quick part and of the examination share."""
    return {
        "working_directory": str(Path.cwd()),
        "channel_port": channel_port,
        "channel_address": None if channel_address == ANYWHERE else channel_address,
        "addresses": [address for _, address in interfaces() if not is_loopback(address)],
        "ticket": {"job": ticket.job, "text": ticket.text} if ticket else None,
    }


def ask_first(
    sessions: Mapping[str, ProbeSession], ssh: SshSetup, request: Mapping[str, Any], deadline: float
) -> dict[str, Answered]:
    """Send the request to all hosts; explain each failure to answer by a finding."""

    def ask(session: ProbeSession) -> Answered:
        host = session.host
        try:
            return Answered(session, session.ask(request, deadline), None)
        except NoAnswer as error:
            attempt = Attempt(
                host=host.address,
                name=host.name,
                by_hand=ssh.by_hand(host),
                exit_code=error.exit_code,
                stderr=error.stderr,
                noise=error.noise,
            )
            return Answered(session, None, explain(attempt))

    return on_all(ask, sessions)


def facts_of(answered: Mapping[str, Answered]) -> dict[str, Facts]:
    """Return the facts of the hosts that answered."""
    return {host: item.reply.facts for host, item in answered.items() if item.reply}


def distant_facts(answered: Mapping[str, Answered]) -> dict[str, Facts]:
    """Return the facts of the hosts that answered over ssh."""
    return {
        host: facts
        for host, facts in facts_of(answered).items()
        if not answered[host].session.local
    }


def quick_findings(answered: Mapping[str, Answered], here: Facts) -> list[Finding]:
    """Run the checks that the quick part and the examination share."""
    facts = facts_of(answered)
    failures = [item.failure for item in answered.values() if item.failure]
    if not facts:
        return failures
    distant = [item for item in answered.values() if item.reply and not item.session.local]
    noise = {item.session.host.address: tuple(item.session.noise) for item in distant}
    named = {host for host, item in answered.items() if item.session.host.user}
    return [
        *failures,
        *checks.check_gathered(facts),
        *checks.check_ssh(noise, silent=len(failures)),
        *checks.check_python(facts, here),
        *checks.check_packages(facts, here),
        *checks.check_built_for(facts),
        *checks.check_hvdtrain(facts, here),
        *checks.check_user(facts, here, named),
        *checks.check_working_directory(facts),
        *checks.check_channel(facts, noise),
    ]
