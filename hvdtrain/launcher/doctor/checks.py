"""Checks between hosts: software, users, names, network. Pure, facts -> findings."""

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hvdtrain.launcher.doctor import (
    ALL_HOSTS,
    THIS_MACHINE,
    ByHost,
    Facts,
    Finding,
    HostCheck,
    Slots,
    Status,
    list_by_host,
    values_of,
)

# Packages that are the same everywhere, and the status where there is none at all.
IF_ABSENT: Mapping[str, Status] = {"torch": "fail", "torchvision": "warn", "horovod": "fail"}
CHECKED_ELSEWHERE = {"ticket", "listener", "shm"}  # their errors have a check of their own
INSTALL = "launch/setup installs everything that is needed, in .venv"
# Interfaces of container engines and virtual machines: their addresses often repeat on each host.
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "lxc")
SLOW_SSH_S = 0.5

Reached = Mapping[str, Sequence[Mapping[str, Any]]]  # results of reach_all by connecting host


def check_gathered(facts: ByHost) -> list[Finding]:
    """Warn of missing facts, which cannot be checked."""
    return [
        Finding("facts", "warn", host, f"{name} could not be determined: {why}")
        for host, host_facts in facts.items()
        for name, why in host_facts.errors.items()
        if name not in CHECKED_ELSEWHERE
    ]


def check_python(facts: ByHost, here: Facts) -> list[Finding]:
    """Check that Python is the same everywhere; a different patch release is a warning."""
    wanted = str(here.get("python"))
    return [
        Finding(
            "python",
            "warn" if version.split(".")[:2] == wanted.split(".")[:2] else "fail",
            host,
            f"Python {version}, but {wanted} on {THIS_MACHINE}",
            f"use the same environment on every host (here: {here.get('executable')})",
        )
        for host, version in values_of(facts, "python")
        if version != wanted
    ] or [Finding("python", "ok", ALL_HOSTS, f"Python {wanted}")]


def check_packages(facts: ByHost, here: Facts) -> list[Finding]:
    """Check that torch, torchvision and Horovod are installed, in the same version everywhere."""
    findings = []
    for package, if_absent in IF_ABSENT.items():
        wanted = here.get("packages", {}).get(package)
        versions = {host: packages.get(package) for host, packages in values_of(facts, "packages")}
        if wanted is None and not any(versions.values()):
            findings.append(Finding(package, if_absent, ALL_HOSTS, "not installed", INSTALL))
            continue
        install = f"install {package} {wanted} there" if wanted else f"install {package} here"
        findings += [
            Finding(
                package,
                "fail",
                host,
                f"{version or 'not installed'}, but {wanted or 'not installed'} on {THIS_MACHINE}",
                f"{install}, or share one environment over all hosts",
            )
            for host, version in versions.items()
            if version != wanted
        ] or [Finding(package, "ok", ALL_HOSTS, f"{package} {wanted}")]
    return findings


def check_hvdtrain(facts: ByHost, here: Facts) -> list[Finding]:
    """Check version and code of hvdtrain: checkouts of one version may differ."""
    check, local = HostCheck("hvdtrain"), here.get("hvdtrain", {})
    fix = f"install the same code there (here: {local.get('folder')}), or share the folder"
    for host, remote in values_of(facts, "hvdtrain"):
        name = f"hvdtrain {remote['version']}"
        if remote["version"] != local.get("version"):
            text = f"{name}, but {local.get('version')} on {THIS_MACHINE}"
            check.add(host, "fail", text, fix)
        elif remote["sha256"] != local.get("sha256"):
            text = f"{name} in {remote['folder']} is not the same code as here"
            check.add(host, "fail", text, fix)
    return check.or_ok(f"hvdtrain {local.get('version')}")


def check_user(facts: ByHost, here: Facts, named: Iterable[str] = ()) -> list[Finding]:
    """Check that the user is the same everywhere. `named`: hosts whose user the hostfile gives."""
    local_user = here.get("user", {}).get("name")
    users = dict(values_of(facts, "user"))
    findings = [
        Finding(
            "user",
            "warn",
            host,
            f"ssh logs in as {user['name']}, but the user of {THIS_MACHINE} is {local_user}",
            f"if that is intended, write {user['name']}@{host} into the hostfile; else "
            "correct `User` in ~/.ssh/config",
        )
        for host, user in users.items()
        if user["name"] != local_user and host not in named
    ]
    numbers = {host: user["uid"] for host, user in users.items()}
    if not findings and len(set(numbers.values())) > 1:
        uids = list_by_host(numbers)
        text = f"the user has different uids ({uids}): shared files have different owners"
        return [Finding("user", "warn", ALL_HOSTS, text, "use the same uid everywhere")]
    return findings or [Finding("user", "ok", ALL_HOSTS, f"user {local_user}")]


def check_machines(facts: ByHost, slots: Slots) -> list[Finding]:
    """Check that no two hosts are one machine, whose cores and GPUs would be given out twice."""
    names: dict[str, list[str]] = {}
    for host, machine in values_of(facts, "machine"):
        names.setdefault(machine or host, []).append(host)
    check = HostCheck("machine")
    for first, *others in names.values():
        count = sum(slots[host] for host in (first, *others))
        for host in others:
            check.add(
                host,
                "fail",
                f"is the same machine as {first}: workers of both would use the same cores and "
                "GPUs",
                f"list it once: `-H {first}:{count}`, or `{first} slots={count}` in a hostfile",
            )
    return check.findings if len(names) < 2 else check.or_ok(f"{len(names)} different machines")


def check_names(facts: ByHost, addresses: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check that no name stands for several machines, as that of a service of containers does: a
    connection would reach another one each time. `addresses`: what each name stands for.
    """
    check = HostCheck("machine")
    for host, interfaces in values_of(facts, "interfaces"):
        others = sorted({*addresses.get(host, ())} - {address for _, address in interfaces})
        if others and len(others) < len(addresses[host]):
            text = f"is a name of several machines: also of {', '.join(others)}"
            check.add(host, "fail", text, "list each of them by a name or address of its own")
    return check.findings


def check_login_is_quiet(noise: Mapping[str, Sequence[str]], silent: int = 0) -> list[Finding]:
    """Check that login scripts print nothing. `noise`: unexpected lines by host that answers;
    `silent`: number of hosts that do not, which have findings of their own.
    """
    check = HostCheck("ssh")
    for host, lines in noise.items():
        if lines:
            check.add(
                host,
                "warn",
                f"a login script prints to standard output: {lines[0].strip()!r}",
                "make ~/.bashrc (or similar) print to terminals only: [ -t 1 ] && echo ...",
            )
    return check.or_ok(f"every {'other ' if silent else ''}host answers") if noise else []


def check_channel(facts: ByHost, by_ssh: Collection[str]) -> list[Finding]:
    """Check that every host can connect to the launcher's machine. `by_ssh`: the remote hosts."""
    check, ways = HostCheck("way back"), dict(values_of(facts, "channel"))
    for host, channel in ways.items():
        if channel["address"] is None:
            tried = "; ".join(f"{address}: {why}" for address, why in channel["tried"])
            check.add(
                host,
                "fail",
                f"this host cannot connect back to {THIS_MACHINE} ({tried or 'no address'})",
                f"open {THIS_MACHINE}'s TCP ports to the host (firewall, NAT, security group), or "
                "start from a machine that the hosts can reach",
            )
    for host, host_facts in facts.items():
        if problem := host_facts.errors.get("ticket"):
            check.add(
                host,
                "fail",
                f"no private file can be written in the user's cache: {problem}",
                "make ~/.cache writable there (or free the disk), or set XDG_CACHE_HOME",
            )
    if ways.keys().isdisjoint(by_ssh):
        return check.findings
    return check.or_ok(f"hosts can connect to {THIS_MACHINE}")


def check_interface(
    facts: ByHost, here: Iterable[tuple[str, str]]
) -> tuple[str | None, list[Finding]]:
    """Check through which interface hosts reach this machine; workers take it on their own hosts.

    Return this machine's, which horovodrun is given (None: it is unknown), and the findings.
    `facts`: of the hosts reached by ssh. `here`: this machine's (interface, address).
    """
    channels = {
        host: way for host, way in values_of(facts, "channel") if way["address"] is not None
    }
    if not channels:
        return None, []
    local_interfaces = {address: name for name, address in here}
    reached = {host: local_interfaces.get(way["address"]) for host, way in channels.items()}
    joined = "; ".join(
        f"{host}: {way['interface']} to {THIS_MACHINE}'s "
        f"{reached[host] or way['address'] + ', which is none of its addresses'}"
        for host, way in channels.items()
    )
    if None in reached.values():
        text = f"hosts reach this machine at an address of another machine ({joined})"
        fix = "start launch on a machine that hosts reach without translation of addresses (NAT)"
        return None, [Finding("interface", "warn", ALL_HOSTS, text, fix)]
    common = statistics.mode(reached.values())
    alike = {*reached.values(), *(way["interface"] for way in channels.values())} == {common}
    text = f"Horovod should use {common}" if alike else f"each host uses its own: {joined}"
    return common, [Finding("interface", "ok", ALL_HOSTS, text)]


def find_usable(facts: ByHost, reached: Reached) -> dict[str, float]:
    """Return the interfaces over which every host reaches every other, best first.

    Values: the median time to connect, in seconds. `facts` give the speeds of the interfaces.
    """
    joined: dict[str, set[tuple[str, str]]] = {}  # pairs of hosts by interface
    seconds: dict[str, list[float]] = {}
    for host, tries in reached.items():
        for attempt in tries:
            if attempt["problem"] is None:
                joined.setdefault(attempt["interface"], set()).add((host, attempt["host"]))
                seconds.setdefault(attempt["interface"], []).append(attempt["seconds"])
    pairs = set(itertools.permutations(facts, 2))
    usable = {name: statistics.median(seconds[name]) for name in joined if pairs <= joined[name]}

    def rank(name: str) -> tuple[bool, int, float]:
        speeds = [host_facts.get("speeds", {}).get(name, 0) for host_facts in facts.values()]
        return name.startswith(VIRTUAL), -min(speeds), usable[name]

    return {name: usable[name] for name in sorted(usable, key=rank)}


def check_pairs(facts: ByHost, reached: Reached, usable: Mapping[str, float]) -> list[Finding]:
    """Check that every host can connect to every other on arbitrary ports."""
    check = HostCheck("network")
    for source, target in itertools.permutations(facts, 2):
        tries = [attempt for attempt in reached.get(source, ()) if attempt["host"] == target]
        if all(attempt["problem"] is not None for attempt in tries):
            problems = "; ".join(f"{attempt['address']}: {attempt['problem']}" for attempt in tries)
            check.add(
                source,
                "fail",
                f"cannot connect to {target} ({problems or 'no address to try'})",
                f"open TCP from {source} to {target}, all ports from 1024 (firewall, security "
                "group): MPI and Gloo choose ports at random",
            )
    took = "".join(f" ({seconds * 1000:.1f} ms)" for seconds in list(usable.values())[:1])
    return check.or_ok(f"hosts can connect to one another{took}")


def check_route(facts: ByHost, usable: Collection[str], wanted: str | None) -> list[Finding]:
    """Check by which interfaces hosts, which all reach one another, are joined. `wanted`: the
    user's choice, which must be there on all.
    """
    names = list(usable)
    if wanted is not None and wanted not in names:
        better = f"; over {', '.join(names)} they do" if names else ""
        text = f"hosts do not reach one another over {wanted}{better}"
        see = "omit --network-interface to see which interfaces there are"
        fix = f"--network-interface {names[0]}" if names else see
        return [Finding("interface", "fail", ALL_HOSTS, text, fix)]
    if names:
        best = wanted or names[0]
        others = ", ".join(name for name in names if name != best)
        also = f" (also joined by {others})" if others else ""
        return [Finding("interface", "ok", ALL_HOSTS, f"Horovod should use {best}{also}")]
    listed = "; ".join(
        f"{host}: {', '.join(sorted({name for name, _ in interfaces} - {'lo'})) or 'none'}"
        for host, interfaces in values_of(facts, "interfaces")
    )
    return [Finding("interface", "ok", ALL_HOSTS, f"each host uses its own ({listed})")]


def check_latency(seconds: Mapping[str, float]) -> list[Finding]:
    """Check the round-trip time to each probe over ssh."""
    if not seconds:
        return []
    check, slowest = HostCheck("latency"), max(seconds, key=seconds.__getitem__)
    if seconds[slowest] > SLOW_SSH_S:
        check.add(
            slowest,
            "warn",
            f"a message by ssh and back takes {seconds[slowest] * 1000:.0f} ms",
            "start from a machine near the hosts; training itself does not go through ssh",
        )
    return check.or_ok(f"{seconds[slowest] * 1000:.1f} ms by ssh and back (the slowest: {slowest})")
