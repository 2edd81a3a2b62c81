"""What was found, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.launcher.doctor.examining import Examination
from hvdtrain.launcher.doctor.facts import Finding, Status, failed

STATUS_WIDTH, CHECK_WIDTH = 6, 16
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "ok")


def tell_findings(findings: Iterable[Finding]) -> str:
    """A line for each finding, its fix below; what several hosts share is told once."""
    hosts: dict[tuple[str, str, str, str], list[str]] = {}
    for finding in findings:
        key = (finding.status, finding.check, finding.text, finding.fix)
        hosts.setdefault(key, []).append(finding.host)
    lines = []
    for (status, check, text, fix), those in hosts.items():
        named = ", ".join(filter(None, those))
        prefix = f"{named}: " if named else ""
        lines.append(f"{status:<{STATUS_WIDTH}}{check:<{CHECK_WIDTH}}{prefix}{text}")
        if fix:
            lines.append(f"{'':<{STATUS_WIDTH + CHECK_WIDTH}}fix: {fix}")
    return "\n".join(lines)


def tell_verdict(findings: Sequence[Finding], seconds: float) -> str:
    """The last line: how many of each."""
    counts = {status: sum(f.status == status for f in findings) for status in WORST_FIRST}
    verdict = "something must be mended" if failed(findings) else "ready to train"
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"doctor: {verdict} ({told}; {seconds:.1f} s)"


def as_json(found: Examination) -> dict[str, Any]:
    """All findings and facts."""
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
