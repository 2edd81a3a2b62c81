"""Facts gathered on a host, and the findings derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
ALL_HOSTS = ""  # the host of a finding that concerns all of them
THIS_MACHINE = "this machine"  # in messages: the machine on which the command was started


@dataclass(frozen=True)
class Facts:
    """The facts of one host. `errors` holds the reason for each fact that is missing."""

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
    """The result of one check for one host, or for all hosts."""

    check: str
    status: Status
    host: str
    text: str
    fix: str = ""


ByHost = Mapping[str, Facts]  # by host.address


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any check failed."""
    return any(finding.status == "fail" for finding in findings)


def known(facts: ByHost, name: str) -> Iterator[tuple[str, Any]]:
    """Return pairs (host, value) of the hosts where the fact `name` is known."""
    return ((host, found.values[name]) for host, found in facts.items() if found.has(name))
