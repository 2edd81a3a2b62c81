"""The hosts of a launch, and how many workers each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError

MOST_SLOTS = 65_536
SHOWN_HOSTS = 8  # in a message


@dataclass(frozen=True)
class Host:
    """One machine that takes workers."""

    name: str  # as ssh takes it: a name, an IPv4 address, or an IPv6 address without brackets
    slots: int = 1  # 1 to MOST_SLOTS
    user: str | None = None  # to log in as; None leaves that to ssh
    source: str = ""  # where it was read: "hosts:3", "-H", "SLURM_JOB_NODELIST"

    @property
    def address(self) -> str:
        """`user@name`, or the name alone: what messages call the host."""
        return f"{self.user}@{self.name}" if self.user else self.name


def take_slots(hosts: Sequence[Host], np: int) -> tuple[Host, ...]:
    """The first hosts whose slots hold `np` workers; the last one's slots are cut."""
    if np < 1:
        raise UsageError(f"-np {np}: must be above 0")
    taken: list[Host] = []
    left = np
    for host in hosts:
        if left == 0:
            break
        taken.append(replace(host, slots=min(host.slots, left)))
        left -= taken[-1].slots
    if not hosts:
        raise UsageError(f"-np {np}: no hosts to start workers on; name some by -H or --hostfile")
    if left:
        raise UsageError(
            f"-np {np}: {_count_slots(hosts)}; lower -np to {np - left}, add hosts, or give a host "
            "more slots (`NAME slots=N` in a hostfile, `-H NAME:N`)"
        )
    return tuple(taken)


def _count_slots(hosts: Sequence[Host]) -> str:
    """'the hosts have 4 slots (alpha 1, beta 2, gamma 1)'."""
    total = sum(host.slots for host in hosts)
    shown = ", ".join(f"{host.address} {host.slots}" for host in hosts[:SHOWN_HOSTS])
    if len(hosts) > SHOWN_HOSTS:
        shown += f", and {len(hosts) - SHOWN_HOSTS} more"
    return f"the hosts have {total} slot{'s' * (total != 1)} ({shown})"
