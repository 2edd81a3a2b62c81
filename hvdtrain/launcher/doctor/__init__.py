"""Checks of this machine and of every host: named, ok / warn / fail, each with its fix.

probe            runs on each host: gathers facts, listens, connects to the other hosts
facts            its facts: software, user, paths, cores, memory, limits, disks
gpu_facts        its facts: GPUs, as the driver reports them
sessions         the launcher's end of a probe; the findings for hosts that do not answer
small_packets    what finds that large packets are lost on the way to a host
checks           facts -> findings: software, users, paths, the network between hosts
machine_checks   facts -> findings: cores, memory, disks, libraries, clocks
gpu_checks       facts -> findings: GPUs, beside torch and Horovod
ring             `hvdtrain verify` over all hosts
burn_in          `--burn-in`: trainings with a known answer on all cores and GPUs
burn_in_checks   their results -> findings: which core or GPU is wrong
trainings        the host's end of it: one training on each core and GPU, run by the probe
examination      all checks, and `preflight`, the quick part with which `launch` begins
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "ok")
STATUS_WIDTH, CHECK_WIDTH = 6, 16
ALL_HOSTS = ""  # the host of a finding that concerns all of them
THIS_MACHINE = "this machine"  # in messages: the machine on which the command was started


@dataclass(frozen=True)
class Facts:
    """The facts of one host. `errors` holds the reason for each fact that is missing."""

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


@dataclass(frozen=True)
class Finding:
    """The result of one check for one host, or for all hosts."""

    check: str
    status: Status
    host: str
    text: str
    fix: str = ""


ByHost = Mapping[str, Facts]  # by host.address


def values_of(facts: ByHost, name: str) -> Iterator[tuple[str, Any]]:
    """Return pairs (host, value) of the hosts where the fact `name` is known."""
    return (
        (host, host_facts.values[name])
        for host, host_facts in facts.items()
        if name in host_facts.values
    )


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any check failed."""
    return any(finding.status == "fail" for finding in findings)


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
