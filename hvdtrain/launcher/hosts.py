"""The hosts of a launch, their slots, and the formats of --hostfile and -H."""

import codecs
import os
import re
import select
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from hvdtrain.errors import UsageError, refuse
from hvdtrain.launcher.addresses import name_key, name_problem, shown, user_problem
from hvdtrain.log import counted, few

MOST_SLOTS = 65_536
MOST_HOSTS = 16_384
MOST_BYTES = 2**20  # 1 MiB: 64 for each host
LONGEST_LINE = 4096
MOST_PROBLEMS = 20  # reported at once
SHOWN_HOSTS = 8  # in a message
SILENCE_S = 10.0  # longest wait for data from a pipe given as the hostfile

MEANINGS = {  # of the words before "=" behind a host's name
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max_cpu", "max_count"), "most"),
    **dict.fromkeys(("slots_max", "cpu_max", "count_max"), "most"),
    **dict.fromkeys(("username", "user_name"), "user"),
    "port": "port",
}
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Host:
    """One machine that runs workers."""

    name: str  # for ssh: a name, an IPv4 address, or an IPv6 address without brackets
    slots: int = 1  # 1 to MOST_SLOTS
    user: str | None = None  # login name; None: as ssh is configured
    source: str = ""  # where it was read: "hosts:3", "-H", "SLURM_JOB_NODELIST"
    node: int | None = None  # its rank in a job without SSH (hvdtrain/launcher/nodes)

    @property
    def address(self) -> str:
        """Return `user@name`, or the name alone, as used in messages."""
        return f"{self.user}@{self.name}" if self.user else self.name


def take_slots(hosts: Sequence[Host], np: int) -> tuple[Host, ...]:
    """Return the first hosts with `np` slots, the last one's cut; raise UsageError if too few."""
    taken: list[Host] = []
    left = np
    for host in hosts:
        if left > 0:
            taken.append(replace(host, slots=min(host.slots, left)))
            left -= taken[-1].slots
    if left > 0:
        named = few([f"{host.address} {host.slots}" for host in hosts], SHOWN_HOSTS)
        raise UsageError(
            f"-np {np}: the hosts have {counted(np - left, 'slot')} ({named}); lower -np to "
            f"{np - left}, add hosts, or give a host more slots (`NAME slots=N` in a hostfile, "
            "`-H NAME:N`)"
        )
    return tuple(taken)


class HostCollector:
    """The hosts read so far, and the problems found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._hosts: dict[str, Host] = {}
        self._bare: set[str] = set()  # those given by their names alone

    def until_full(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Return an iterator over the entries that ends once MOST_PROBLEMS were found."""
        return takewhile(lambda _: len(self.problems) < MOST_PROBLEMS, entries)

    def read(self, name: str, options: Iterable[str], where: str, source: str) -> None:
        """Add the host `name` with its options; record their problems, each after `where`."""
        problems: list[str] = []
        user, name, slots = parse_host(name, problems)
        user, slots = _parse_options(options, user, slots, problems)
        if not problems:
            self.add(Host(name, slots or 1, user, source), is_bare=slots is None)
        self.problems += [f"{where}: {problem}" for problem in problems]

    def add(self, host: Host, is_bare: bool = False) -> None:
        """Add a host whose name is valid; record a problem if it is a duplicate or one too many.

        `is_bare`: it is given by its name alone. Repeated, as batch systems list a host once for
        each slot, it is counted.
        """
        key = name_key(host.name)
        first = self._hosts.setdefault(key, host)
        if first is host:
            if is_bare:
                self._bare.add(key)
            if len(self._hosts) > MOST_HOSTS:
                self.problems.append(f"{host.source}: more than {MOST_HOSTS:,} hosts")
        elif is_bare and key in self._bare and first.address == host.address:
            self._hosts[key] = replace(first, slots=first.slots + 1)
        else:  # usually a slip, so slots are not added up
            where = "" if first.source == host.source else f" at {first.source}"
            other = "" if first.address == host.address else f" (as {first.address})"
            self.problems.append(
                f"{host.source}: {host.address} is already listed{where}{other}; keep one of the "
                "two, with the slots of both"
            )

    def finish(self, empty: str) -> tuple[Host, ...]:
        """Return the hosts; raise UsageError with every problem, or `empty` if none is listed."""
        if len(self.problems) >= MOST_PROBLEMS:
            self.problems.append(f"(these are the first {len(self.problems)}; more may follow)")
        if not self._hosts and not self.problems:
            self.problems.append(empty)
        refuse(self.problems)
        return tuple(self._hosts.values())


def parse_hostfile(text: str, path: Path) -> tuple[Host, ...]:
    """Return the hosts listed in a hostfile's text; `path` is used in messages."""
    collector = HostCollector()
    # As editors count lines; `str.splitlines` also splits at rarer characters.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in collector.until_full(enumerate(lines, 1)):
        source = f"{path}:{number}"
        if len(line) > LONGEST_LINE:
            collector.problems.append(f"{source}: longer than {LONGEST_LINE:,} characters")
        elif words := re.sub(r"\s*=\s*", "=", re.split("#|//", line, maxsplit=1)[0]).split():
            if "=" in words[0]:
                problem = "the name of a host must come before it"
                collector.problems.append(f"{source}: {shown(words[0])}: {problem}")
            else:
                collector.read(words[0], words[1:], where=source, source=source)
    return collector.finish(
        f"{path}: no hosts in it; write one line for each host, such as `alpha slots=2`"
    )


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Return the hosts of a -H value such as `a:2,b:4,user@c:1,[fe80::1]:2`."""
    collector = HostCollector()
    if len(text) > MOST_BYTES:
        raise UsageError(f"-H: longer than {MOST_BYTES:,} characters; write a hostfile instead")
    for number, entry in collector.until_full(enumerate(map(str.strip, text.split(",")), 1)):
        where = f"-H: entry {number}"
        if entry:
            collector.read(entry, (), where, source="-H")
        else:
            problem = "is empty; hosts are separated by one comma, such as alpha:2,beta:4"
            collector.problems.append(f"{where}: {problem}")
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
    digits = re.fullmatch("0*([1-9][0-9]{0,8})", text)
    if digits and int(digits[1]) <= MOST_SLOTS:
        return int(digits[1])
    problem = f"the number of slots must be a whole number from 1 to {MOST_SLOTS:,}"
    problems.append(f"{shown(whole)}: {problem}")
    return None


def _parse_options(
    words: Iterable[str], user: str | None, slots: int | None, problems: list[str]
) -> tuple[str | None, int | None]:
    """Return user and slots, updated from the options after the host's name."""
    most: int | None = None
    unknown = []
    for word in words:
        key, equals, value = word.partition("=")
        match MEANINGS.get(key.lower().replace("-", "_")) if equals else None:
            case "slots":
                if slots is not None:
                    problems.append(f"{shown(word)}: the number of slots is given twice")
                slots = parse_slots(value, word, problems) or slots
            case "most":
                most = parse_slots(value, word, problems)
            case "user":
                if user is not None and user != value:
                    problems.append(f"{shown(word)}: the user is {shown(user)} already")
                elif problem := user_problem(value):
                    problems.append(problem)
                user = value
            case "port":
                problems.append(
                    f"{shown(word)}: the port of one host is set in the SSH configuration (`Port` "
                    "below `Host NAME` in ~/.ssh/config); that of all, by --ssh-port"
                )
            case _:
                unknown.append(shown(word))
    if unknown:
        problems.append(
            f"{few(unknown)}: not understood; a host's name may be followed by slots=N, "
            "max_slots=N or username=NAME"
        )
    if most and slots and slots > most:
        problems.append(f"slots={slots} is above max_slots={most}; lower one or raise the other")
    return user, slots or most


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file; UsageError names each bad line as FILE:LINE."""
    data = _read_bytes(path)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return parse_hostfile(data.decode("utf-16", "replace"), path)
    before, zero, _ = data.partition(b"\0")
    if zero:
        number = before.count(b"\n") + 1
        raise UsageError(f"{path}:{number}: holds a zero byte, so this is not a text file")
    # Comments may hold characters in any encoding; names refuse them.
    return parse_hostfile(data.decode("utf-8-sig", "replace"), path)


def _read_bytes(path: Path) -> bytes:
    """Read a file or pipe; raise UsageError above MOST_BYTES or after SILENCE_S without data."""
    data = b""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            while len(data) <= MOST_BYTES:
                if not select.select([file], [], [], SILENCE_S)[0]:
                    raise UsageError(f"{path}: no data from this pipe for {SILENCE_S:.0f} s")
                part = file.read(MOST_BYTES + 1 - len(data))
                if not part:
                    return data
                data += part
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such hostfile; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; a hostfile is a text file") from None
    except OSError as error:
        raise UsageError(f"{path}: the hostfile cannot be read ({error.strerror})") from None
    except ValueError:
        raise UsageError(f"{shown(str(path))}: not a valid path of a hostfile") from None
    raise UsageError(f"{path}: larger than 1 MiB; is this really a hostfile?")
