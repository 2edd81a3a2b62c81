"""Checks of software, users, paths, and the network between hosts: pure, facts -> findings."""

from __future__ import annotations

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
    Status,
    values_of,
)

SAME_EVERYWHERE = ("torch", "torchvision", "horovod")
NEEDED = {"torch", "horovod"}
CHECKED_ELSEWHERE = {"ticket", "listener", "shm"}  # their errors have a check of their own
REBUILD = "build it for this torch: `hvdtrain install-horovod`"
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
    findings = []
    for host, version in values_of(facts, "python"):
        if version != wanted:
            same_minor = version.split(".")[:2] == wanted.split(".")[:2]
            text = f"Python {version}, but {wanted} on {THIS_MACHINE}"
            fix = f"use the same environment on every host (here: {here.get('executable')})"
            findings.append(Finding("python", "warn" if same_minor else "fail", host, text, fix))
    return findings or [Finding("python", "ok", ALL_HOSTS, f"Python {wanted}")]


def check_packages(facts: ByHost, here: Facts) -> list[Finding]:
    """Check that torch, torchvision and Horovod are installed, in the same version everywhere."""
    findings = []
    for package in SAME_EVERYWHERE:
        wanted = here.get("packages", {}).get(package)
        versions = {host: packages.get(package) for host, packages in values_of(facts, "packages")}
        if wanted is None and not any(versions.values()):
            status: Status = "fail" if package in NEEDED else "warn"
            findings.append(Finding(package, status, ALL_HOSTS, "not installed", INSTALL))
            continue
        other = f"{wanted or 'not installed'} on {THIS_MACHINE}"
        install = f"install {package} {wanted} there" if wanted else f"install {package} here"
        fix = f"{install}, or share one environment over all hosts"
        findings += [
            Finding(package, "fail", host, f"{version or 'not installed'}, but {other}", fix)
            for host, version in versions.items()
            if version != wanted
        ] or [Finding(package, "ok", ALL_HOSTS, f"{package} {wanted}")]
    return findings


def check_hvdtrain(facts: ByHost, here: Facts) -> list[Finding]:
    """Check version and code of hvdtrain: checkouts of one version may differ."""
    local = here.get("hvdtrain", {})
    fix = f"install the same code there (here: {local.get('folder')}), or share the folder"
    findings = []
    for host, remote in values_of(facts, "hvdtrain"):
        if remote["version"] != local.get("version"):
            text = f"hvdtrain {remote['version']}, but {local.get('version')} on {THIS_MACHINE}"
        elif remote["sha256"] != local.get("sha256"):
            text = (
                f"hvdtrain {remote['version']} in {remote['folder']} is not the same code as here"
            )
        else:
            continue
        findings.append(Finding("hvdtrain", "fail", host, text, fix))
    return findings or [Finding("hvdtrain", "ok", ALL_HOSTS, f"hvdtrain {local.get('version')}")]


def check_user(facts: ByHost, here: Facts, named: Iterable[str] = ()) -> list[Finding]:
    """Check that the user is the same everywhere. `named`: hosts whose user the hostfile gives."""
    local_user = here.get("user", {}).get("name")
    findings = []
    for host, user in values_of(facts, "user"):
        if user["name"] != local_user and host not in named:
            text = f"ssh logs in as {user['name']}, but the user of {THIS_MACHINE} is {local_user}"
            fix = (
                f"if that is intended, write {user['name']}@{host} into the hostfile; else "
                "correct `User` in ~/.ssh/config"
            )
            findings.append(Finding("user", "warn", host, text, fix))
    numbers = {host: user["uid"] for host, user in values_of(facts, "user")}
    if not findings and len(set(numbers.values())) > 1:
        listed = ", ".join(f"{host} {number}" for host, number in numbers.items())
        text = f"the user has different uids ({listed}): shared files have different owners"
        findings.append(Finding("user", "warn", ALL_HOSTS, text, "use the same uid everywhere"))
    return findings or [Finding("user", "ok", ALL_HOSTS, f"user {local_user}")]


def check_machines(facts: ByHost, slots: Mapping[str, int]) -> list[Finding]:
    """Check that no two hosts are one machine, whose cores and GPUs would be given out twice."""
    names: dict[str, list[str]] = {}
    for host, machine in values_of(facts, "machine"):
        names.setdefault(machine or host, []).append(host)
    findings = []
    for first, *others in names.values():
        count = sum(slots[host] for host in (first, *others))
        text = f"is the same machine as {first}: workers of both would use the same cores and GPUs"
        fix = f"list it once: `-H {first}:{count}`, or `{first} slots={count}` in a hostfile"
        findings += [Finding("machine", "fail", host, text, fix) for host in others]
    if findings or len(names) < 2:
        return findings
    return [Finding("machine", "ok", ALL_HOSTS, f"{len(names)} different machines")]


def check_names(facts: ByHost, addresses: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check that no name stands for several machines, as that of a service of containers does: a
    connection would reach another one each time. `addresses`: what each name stands for.
    """
    findings = []
    for host, interfaces in values_of(facts, "interfaces"):
        others = sorted({*addresses.get(host, ())} - {address for _, address in interfaces})
        if others and len(others) < len(addresses[host]):
            text = f"is a name of several machines: also of {', '.join(others)}"
            fix = "list each of them by a name or address of its own"
            findings.append(Finding("machine", "fail", host, text, fix))
    return findings


def check_working_directory(facts: ByHost) -> list[Finding]:
    """Check that the folder in which workers start exists."""
    findings, path = [], ""
    for host, state in values_of(facts, "working_directory"):
        path = state["path"]
        if not state["usable"]:
            text = f"there is no folder {path}, in which workers start"
            fix = f"`mkdir -p {path}` there, or start from a folder that all hosts have"
            findings.append(Finding("path", "fail", host, text, fix))
    return findings or [Finding("path", "ok", ALL_HOSTS, f"working directory {path}")]


def check_built_for(facts: ByHost) -> list[Finding]:
    """Check that Horovod was compiled for the installed torch (check_horovod_loads is slower)."""
    findings = []
    for host, built in values_of(facts, "horovod_built_for"):
        # Not the version of the package, which may lack the local part that names the build.
        torch = (facts[host].get("torch_build") or {}).get("version")
        if built and torch and built != torch:
            text = f"Horovod was built for torch {built}, but torch {torch} is installed"
            findings.append(Finding("horovod", "warn", host, text, REBUILD))
    return findings


def check_login_is_quiet(noise: Mapping[str, Sequence[str]], silent: int = 0) -> list[Finding]:
    """Check that login scripts print nothing. `noise`: unexpected lines by host that answers;
    `silent`: number of hosts that do not, which have findings of their own.
    """
    findings = []
    for host, lines in noise.items():
        if lines:
            text = f"a login script prints to standard output: {lines[0].strip()!r}"
            fix = "make ~/.bashrc (or similar) print to terminals only: [ -t 1 ] && echo ..."
            findings.append(Finding("ssh", "warn", host, text, fix))
    if noise and not findings:
        other = "other " if silent else ""
        return [Finding("ssh", "ok", ALL_HOSTS, f"every {other}host answers")]
    return findings


def check_channel(facts: ByHost, by_ssh: Collection[str]) -> list[Finding]:
    """Check that every host can connect to the launcher's machine. `by_ssh`: the remote hosts."""
    findings = []
    ways = dict(values_of(facts, "channel"))
    for host, channel in ways.items():
        if channel["address"] is None:
            tried = "; ".join(f"{address}: {why}" for address, why in channel["tried"])
            text = f"this host cannot connect back to {THIS_MACHINE} ({tried or 'no address'})"
            fix = (
                f"open {THIS_MACHINE}'s TCP ports to the host (firewall, NAT, security group), or "
                "start from a machine that the hosts can reach"
            )
            findings.append(Finding("way back", "fail", host, text, fix))
    for host, host_facts in facts.items():
        if "ticket" in host_facts.errors:
            text = (
                f"no private file can be written in the user's cache: {host_facts.errors['ticket']}"
            )
            fix = "make ~/.cache writable there (or free the disk), or set XDG_CACHE_HOME"
            findings.append(Finding("way back", "fail", host, text, fix))
    if not findings and not ways.keys().isdisjoint(by_ssh):
        return [Finding("way back", "ok", ALL_HOSTS, f"hosts can connect to {THIS_MACHINE}")]
    return findings


def check_interface(
    facts: ByHost, here: Iterable[tuple[str, str]]
) -> tuple[str | None, list[Finding]]:
    """Check through which interface hosts reach this machine; workers take it on their own hosts.

    Return this machine's, which horovodrun is given (None: it is unknown), and the findings.
    `facts`: of the hosts reached by ssh. `here`: this machine's (interface, address).
    """
    local_interfaces = {address: name for name, address in here}
    names, listed = [], []
    for host, channel in values_of(facts, "channel"):
        address = channel["address"]
        if address is not None:
            there = local_interfaces.get(address)
            names.append((channel["interface"], there))
            shown = there or f"{address}, which is none of its addresses"
            listed.append(f"{host}: {channel['interface']} to {THIS_MACHINE}'s {shown}")
    if not names:
        return None, []
    joined = "; ".join(listed)
    local_names = [name for _, name in names if name is not None]
    if len(local_names) < len(names):
        text = f"hosts reach this machine at an address of another machine ({joined})"
        fix = "start launch on a machine that hosts reach without translation of addresses (NAT)"
        return None, [Finding("interface", "warn", ALL_HOSTS, text, fix)]
    common = statistics.mode(local_names)
    alike = {*local_names, *(there for there, _ in names)} == {common}
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
    findings = []
    for source, target in itertools.permutations(facts, 2):
        tries = [attempt for attempt in reached.get(source, ()) if attempt["host"] == target]
        if any(attempt["problem"] is None for attempt in tries):
            continue
        problems = "; ".join(f"{attempt['address']}: {attempt['problem']}" for attempt in tries)
        text = f"cannot connect to {target} ({problems or 'no address to try'})"
        fix = (
            f"open TCP from {source} to {target}, all ports from 1024 (firewall, security group): "
            "MPI and Gloo choose ports at random"
        )
        findings.append(Finding("network", "fail", source, text, fix))
    took = "".join(f" ({seconds * 1000:.1f} ms)" for seconds in list(usable.values())[:1])
    text = f"hosts can connect to one another{took}"
    return findings or [Finding("network", "ok", ALL_HOSTS, text)]


def check_route(facts: ByHost, usable: Collection[str], wanted: str | None) -> list[Finding]:
    """Check by which interfaces hosts, which all reach one another, are joined. `wanted`: the
    user's choice, which must be there on all.
    """
    names = list(usable)
    if wanted is not None and wanted not in names:
        better = f"; over {', '.join(names)} they do" if names else ""
        text = f"hosts do not reach one another over {wanted}{better}"
        fix = "omit --network-interface to see which interfaces there are"
        if names:
            fix = f"--network-interface {names[0]}"
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


def check_ports(facts: ByHost) -> list[Finding]:
    """Check that every host can listen on a port."""
    problems = {host: host_facts.errors.get("listener") for host, host_facts in facts.items()}
    fix = "free ports, or widen net.ipv4.ip_local_port_range"
    return [
        Finding("ports", "fail", host, f"cannot listen on any port: {problem}", fix)
        for host, problem in problems.items()
        if problem
    ] or [Finding("ports", "ok", ALL_HOSTS, "hosts can listen on a port")]


def check_latency(seconds: Mapping[str, float]) -> list[Finding]:
    """Check the round-trip time to each probe over ssh."""
    if not seconds:
        return []
    slowest = max(seconds, key=seconds.__getitem__)
    if seconds[slowest] > SLOW_SSH_S:
        text = f"a message by ssh and back takes {seconds[slowest] * 1000:.0f} ms"
        fix = "start from a machine near the hosts; training itself does not go through ssh"
        return [Finding("latency", "warn", slowest, text, fix)]
    text = f"{seconds[slowest] * 1000:.1f} ms by ssh and back (the slowest: {slowest})"
    return [Finding("latency", "ok", ALL_HOSTS, text)]
