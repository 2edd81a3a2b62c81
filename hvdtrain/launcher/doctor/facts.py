"""What is known of a host, and what is concluded from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
ALL_HOSTS = ""  # the host of a finding that is about all of them
THIS_MACHINE = "this machine"  # what messages call the one that the command was started on


@dataclass(frozen=True)
class Facts:
    """What a probe found. A fact that could not be had is in `errors`, with the reason."""

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def has(self, name: str) -> bool:
        return name in self.values

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Facts:
        return cls(found.get("values", {}), found.get("errors", {}))


@dataclass(frozen=True)
class Finding:
    """What one check says of one host, or of all."""

    check: str
    status: Status
    host: str
    text: str
    fix: str = ""


ByHost = Mapping[str, Facts]  # by host.address


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any check failed."""
    return any(finding.status == "fail" for finding in findings)


def known(facts: ByHost, name: str) -> Iterator[tuple[str, Any]]:
    """(host, value) where the fact is known."""
    return ((host, found.values[name]) for host, found in facts.items() if found.has(name))
