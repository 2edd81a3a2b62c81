"""The hosts of a launch, their slots, and the formats of --hostfile and -H."""

from __future__ import annotations

import codecs
import os
import re
import select
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launcher.addresses import name_key, name_problem, shown, user_problem

MOST_SLOTS = 65_536
SHOWN_HOSTS = 8  # in a message


@dataclass(frozen=True)
class Host:
    """One machine that runs workers."""

    name: str  # for ssh: a name, an IPv4 address, or an IPv6 address without brackets
    slots: int = 1  # 1 to MOST_SLOTS
    user: str | None = None  # login name; None: as ssh is configured
    source: str = ""  # where it was read: "hosts:3", "-H", "SLURM_JOB_NODELIST"

    @property
    def address(self) -> str:
        """Return `user@name`, or the name alone, as used in messages."""
        return f"{self.user}@{self.name}" if self.user else self.name


def take_slots(hosts: Sequence[Host], np: int) -> tuple[Host, ...]:
    """Return the first hosts with `np` slots, the last one's cut; raise UsageError if too few."""
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
    """Return text such as 'the hosts have 4 slots (alpha 1, beta 2, gamma 1)'."""
    total = sum(host.slots for host in hosts)
    shown = ", ".join(f"{host.address} {host.slots}" for host in hosts[:SHOWN_HOSTS])
    if len(hosts) > SHOWN_HOSTS:
        shown += f", and {len(hosts) - SHOWN_HOSTS} more"
    return f"the hosts have {total} slot{'s' * (total != 1)} ({shown})"


MOST_HOSTS = 16_384
MOST_BYTES = 2**20  # 64 for each host
LONGEST_LINE = 4096
MOST_PROBLEMS = 20  # reported at once
SILENCE_S = 10.0  # longest wait for data from a pipe given as the hostfile

SLOTS = ("slots", "cpu", "count")
MAX_SLOTS = tuple(f"max_{word}" for word in SLOTS) + tuple(f"{word}_max" for word in SLOTS)
USERNAME = ("username", "user_name")
UNDERSTOOD = "slots=N, max_slots=N or username=NAME"


class HostCollector:
    """The hosts read so far, and the problems found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._hosts: dict[str, Host] = {}

    @property
    def full(self) -> bool:
        """Return whether MOST_PROBLEMS were found, so that reading can stop."""
        return len(self.problems) >= MOST_PROBLEMS

    def add(self, host: Host) -> None:
        """Add a host whose name is valid; record a problem if it is a duplicate or one too many."""
        first = self._hosts.setdefault(name_key(host.name), host)
        if first is not host:
            self.problems.append(_same_host(first, host))
        elif len(self._hosts) > MOST_HOSTS:
            self.problems.append(f"{host.source}: more than {MOST_HOSTS:,} hosts")

    def finish(self, empty: str) -> tuple[Host, ...]:
        """Return the hosts; raise UsageError with every problem, or `empty` if none is listed."""
        if self.full:
            self.problems.append(f"(these are the first {len(self.problems)}; more may follow)")
        if not self._hosts and not self.problems:
            self.problems.append(empty)
        if self.problems:
            raise UsageError(*self.problems)
        return tuple(self._hosts.values())


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file; UsageError names each bad line as FILE:LINE."""
    return parse_hostfile(_decode(_read_bytes(path), path), path)


def parse_hostfile(text: str, path: Path) -> tuple[Host, ...]:
    """Return the hosts listed in a hostfile's text; `path` is used in messages."""
    collector = HostCollector()
    for number, line in enumerate(_lines(text), 1):
        if not line or line.isspace():
            continue
        source = f"{path}:{number}"
        if len(line) > LONGEST_LINE:
            collector.problems.append(f"{source}: longer than {LONGEST_LINE:,} characters")
        else:
            _take_line(collector, re.split("#|//", line, maxsplit=1)[0], source)
        if collector.full:
            break
    return collector.finish(
        f"{path}: no hosts in it; write one line for each host, such as `alpha slots=2`"
    )


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Return the hosts of a -H value such as `a:2,b:4,user@c:1,[fe80::1]:2`."""
    collector = HostCollector()
    if len(text) > MOST_BYTES:
        raise UsageError(f"-H: longer than {MOST_BYTES:,} characters; write a hostfile instead")
    for number, entry in enumerate(text.split(","), 1):
        problems: list[str] = []
        if not entry.strip():
            problems.append("is empty; hosts are separated by one comma, such as alpha:2,beta:4")
        else:
            user, name, slots = parse_host(entry.strip(), problems)
        if not problems:
            collector.add(Host(name, slots or 1, user, "-H"))
        collector.problems += [f"-H: entry {number}: {problem}" for problem in problems]
        if collector.full:
            break
    return collector.finish("-H: no hosts in it")


def parse_host(text: str, problems: list[str]) -> tuple[str | None, str, int | None]:
    """Return user, name and slots of `[user@]name[:slots]`; append errors to `problems`."""
    user, at, rest = text.rpartition("@")
    name, slots = rest, None
    if rest.startswith("["):
        name, closing, tail = rest[1:].partition("]")
        if not closing or ":" not in name or (tail and not tail.startswith(":")):
            problems.append(f"{shown(rest)}: brackets hold an IPv6 address, as in [fe80::1]:2")
            return user or None, name, None
        slots = tail[1:] if tail else None
    elif rest.count(":") == 1:
        name, _, slots = rest.partition(":")
    if problem := name_problem(name):
        problems.append(problem)
    if at and (problem := user_problem(user)):
        problems.append(problem)
    count = None if slots is None else parse_slots(slots, rest, problems)
    return user or None, name, count


def parse_slots(text: str, whole: str, problems: list[str]) -> int | None:
    """Return a number of slots, or None with an error about `whole` appended to `problems`."""
    digits = text.lstrip("0")
    if re.fullmatch("[0-9]+", text) and 0 < len(digits) < 10 and int(digits) <= MOST_SLOTS:
        return int(digits)
    problems.append(
        f"{shown(whole)}: the number of slots must be a whole number from 1 to {MOST_SLOTS:,}"
    )
    return None


def _same_host(first: Host, second: Host) -> str:
    """Return the problem of a duplicate host: usually a slip, so slots are not added up."""
    where = "" if first.source == second.source else f" at {first.source}"
    other = "" if first.address == second.address else f" (as {first.address})"
    return (
        f"{second.source}: {second.address} is already listed{where}{other}; keep one of the "
        "two, with the slots of both"
    )


def _take_line(collector: HostCollector, line: str, source: str) -> None:
    words = re.sub(r"\s*=\s*", "=", line).split()
    if not words:
        return
    problems: list[str] = []
    if "=" in words[0]:
        problems.append(f"{shown(words[0])}: the name of a host must come before it")
        user, name, slots = None, "", None
    else:
        user, name, slots = parse_host(words[0], problems)
    user, slots = _parse_options(words[1:], user, slots, problems)
    if not problems:
        collector.add(Host(name, slots or 1, user, source))
    collector.problems += [f"{source}: {problem}" for problem in problems]


def _parse_options(
    words: Iterable[str], user: str | None, slots: int | None, problems: list[str]
) -> tuple[str | None, int | None]:
    """Return user and slots, updated from the options after the host's name."""
    most: int | None = None
    unknown = []
    for word in words:
        key, equals, value = word.partition("=")
        kind = key.lower().replace("-", "_") if equals else None
        if kind in SLOTS:
            if slots is not None:
                problems.append(f"{shown(word)}: the number of slots is given twice")
            slots = parse_slots(value, word, problems) or slots
        elif kind in MAX_SLOTS:
            most = parse_slots(value, word, problems)
        elif kind in USERNAME:
            if user is not None and user != value:
                problems.append(f"{shown(word)}: the user is {shown(user)} already")
            elif problem := user_problem(value):
                problems.append(problem)
            user = value
        else:
            unknown.append(shown(word))
    if unknown:
        what = ", ".join(unknown[:4])
        problems.append(f"{what}: not understood; a host's name may be followed by {UNDERSTOOD}")
    if most and slots and slots > most:
        problems.append(f"slots={slots} is above max_slots={most}; lower one or raise the other")
    return user, slots or most


def _lines(text: str) -> list[str]:
    """Split into lines as editors count them (`str.splitlines` also splits at rarer characters)."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _decode(data: bytes, path: Path) -> str:
    """Decode leniently: non-ASCII characters may occur in comments, and are refused in names."""
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        if data.startswith(mark):
            return data.decode("utf-16", "replace")
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: holds a zero byte, so this is not a text file")
    return data.decode("utf-8-sig", "replace")


def _read_bytes(path: Path) -> bytes:
    """Read a file or pipe; raise UsageError above MOST_BYTES or after SILENCE_S without data."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read_within_limits(descriptor, path)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such hostfile; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; a hostfile is a text file") from None
    except OSError as error:
        raise UsageError(f"{path}: the hostfile cannot be read ({error.strerror})") from None
    except ValueError:
        raise UsageError(f"{shown(str(path))}: not a valid path of a hostfile") from None


def _read_within_limits(descriptor: int, path: Path) -> bytes:
    data = b""
    while len(data) <= MOST_BYTES:
        if not select.select([descriptor], [], [], SILENCE_S)[0]:
            raise UsageError(f"{path}: no data from this pipe for {SILENCE_S:.0f} s")
        part = os.read(descriptor, MOST_BYTES + 1 - len(data))
        if not part:
            return data
        data += part
    raise UsageError(
        f"{path}: larger than {MOST_BYTES / 2**20:.0f} MiB; is this really a hostfile?"
    )
