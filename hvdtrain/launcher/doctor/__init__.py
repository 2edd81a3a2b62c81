"""Checks of this machine and of every host: named, ok / warn / fail, each with its fix.

probe            runs on each host: gathers facts, listens, connects to the other hosts
facts            its facts: software, user, paths, cores, memory, limits, disks
gpu_facts        its facts: GPUs, as the driver reports them
sessions         the launcher's end of a probe
ssh_failures     the findings for hosts that do not answer
small_packets    what finds that large packets are lost on the way to a host
checks           facts -> findings: software, users, the network between hosts
machine_checks   facts -> findings: cores, memory, disks, paths, libraries, clocks
gpu_checks       facts -> findings: GPUs, beside torch and Horovod
ring             `hvdtrain verify` over all hosts
burn_in          `--burn-in`: trainings with a known answer on all cores and GPUs, and the findings:
                 which core or GPU is wrong
trainings        the host's end of it: one training on each core and GPU, run by the probe
examination      all checks, and `preflight`, the quick part with which `launch` begins
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hvdtrain.log import few

Status = Literal["ok", "warn", "fail"]
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "ok")
STATUS_WIDTH, CHECK_WIDTH = 6, 16
HOSTS_SHOWN = 16  # of those with one finding; --json has all
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


@dataclass
class HostCheck:
    """The findings of one check so far, and what is shown of hosts without any."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)  # by host

    def add(self, host: str, status: Status, text: str, fix: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(self.name, status, host, text, fix))

    def or_ok(self, text: str) -> list[Finding]:
        """Return the findings; without any, one for all hosts that is ok."""
        return self.findings or [Finding(self.name, "ok", ALL_HOSTS, text)]

    def or_shown(self) -> list[Finding]:
        """Return the findings; without any, what is shown: in one if all hosts are alike."""
        if len(texts := set(self.shown.values())) == 1:
            return self.or_ok(texts.pop())
        return self.findings or [
            Finding(self.name, "ok", host, text) for host, text in self.shown.items()
        ]


ByHost = Mapping[str, Facts]  # by host.address
Slots = Mapping[str, int]  # number of workers by host.address


def values_of(facts: ByHost, name: str) -> Iterator[tuple[str, Any]]:
    """Return pairs (host, value) of the hosts where the fact `name` is known."""
    return (
        (host, host_facts.values[name])
        for host, host_facts in facts.items()
        if name in host_facts.values
    )


def list_by_host(values: Mapping[str, Any]) -> str:
    """Return pairs of host and value as text."""
    return ", ".join(f"{host} {value}" for host, value in values.items())


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any check failed."""
    return any(finding.status == "fail" for finding in findings)


def format_findings(findings: Iterable[Finding]) -> str:
    """Return one line per finding, its fix below; hosts with the same finding share a line."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=ALL_HOSTS), []).append(finding.host)
    lines = []
    for finding, affected in hosts.items():
        named = few([*filter(None, affected)], most=HOSTS_SHOWN)
        text = f"{named}: {finding.text}" if named else finding.text
        lines.append(f"{finding.status:<{STATUS_WIDTH}}{finding.check:<{CHECK_WIDTH}}{text}")
        if finding.fix:
            lines.append(f"{'':<{STATUS_WIDTH + CHECK_WIDTH}}fix: {finding.fix}")
    return "\n".join(lines)


def format_verdict(findings: Sequence[Finding], seconds: float) -> str:
    """Return the last line: the verdict, and the number of findings by status."""
    counts = {status: sum(f.status == status for f in findings) for status in WORST_FIRST}
    verdict = "problems found" if failed(findings) else "ready to train"
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"doctor: {verdict} ({summary}; {seconds:.1f} s)"
