"""Checks of software, users, paths and the way back to the launcher: pure, facts -> findings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvdtrain.launcher.doctor.facts import (
    ALL_HOSTS,
    THIS_MACHINE,
    ByHost,
    Facts,
    Finding,
    Status,
    known,
)

SAME_EVERYWHERE = ("torch", "torchvision", "horovod")
NEEDED = {"torch", "horovod"}
CHECKED_ELSEWHERE = {"ticket", "listener", "shm"}  # their errors have a check of their own
INSTALL = "launch/setup installs everything that is needed, in .venv"


def check_gathered(facts: ByHost) -> list[Finding]:
    """Warn of missing facts, which cannot be checked."""
    return [
        Finding("facts", "warn", host, f"{name} could not be determined: {why}")
        for host, found in facts.items()
        for name, why in found.errors.items()
        if name not in CHECKED_ELSEWHERE
    ]


def check_python(facts: ByHost, here: Facts) -> list[Finding]:
    """Check that Python is the same everywhere; a different patch release is a warning."""
    wanted = str(here.get("python"))
    findings = []
    for host, version in known(facts, "python"):
        if version == wanted:
            continue
        same_minor = version.split(".")[:2] == wanted.split(".")[:2]
        findings.append(
            Finding(
                "python",
                "warn" if same_minor else "fail",
                host,
                f"Python {version}, but {wanted} on {THIS_MACHINE}",
                f"use the same environment on every host (here: {here.get('executable')})",
            )
        )
    return findings or [Finding("python", "ok", ALL_HOSTS, f"Python {wanted}")]


def check_packages(facts: ByHost, here: Facts) -> list[Finding]:
    """Check that torch, torchvision and Horovod are installed, in the same version everywhere."""
    return [
        finding for package in SAME_EVERYWHERE for finding in _check_package(package, facts, here)
    ]


def _check_package(package: str, facts: ByHost, here: Facts) -> list[Finding]:
    wanted = here.get("packages", {}).get(package)
    versions = {host: found.get(package) for host, found in known(facts, "packages")}
    if wanted is None and not any(versions.values()):
        status: Status = "fail" if package in NEEDED else "warn"
        return [Finding(package, status, ALL_HOSTS, "not installed", INSTALL)]
    findings = []
    for host, version in versions.items():
        if version == wanted:
            continue
        other = f"{wanted} on {THIS_MACHINE}" if wanted else f"not installed on {THIS_MACHINE}"
        fix = f"install {package} {wanted} there" if wanted else f"install {package} here"
        text = f"{version or 'not installed'}, but {other}"
        findings.append(
            Finding(package, "fail", host, text, f"{fix}, or share one environment over all hosts")
        )
    return findings or [Finding(package, "ok", ALL_HOSTS, f"{package} {wanted}")]


def check_hvdtrain(facts: ByHost, here: Facts) -> list[Finding]:
    """Check version and code of hvdtrain: checkouts of one version may differ."""
    own = here.get("hvdtrain", {})
    findings = []
    for host, found in known(facts, "hvdtrain"):
        if found["version"] != own.get("version"):
            text = f"hvdtrain {found['version']}, but {own.get('version')} on {THIS_MACHINE}"
        elif found["sha256"] != own.get("sha256"):
            text = f"hvdtrain {found['version']} in {found['folder']} is not the same code as here"
        else:
            continue
        fix = f"install the same code there (here: {own.get('folder')}), or share the folder"
        findings.append(Finding("hvdtrain", "fail", host, text, fix))
    return findings or [Finding("hvdtrain", "ok", ALL_HOSTS, f"hvdtrain {own.get('version')}")]


def check_user(facts: ByHost, here: Facts, named: Iterable[str] = ()) -> list[Finding]:
    """Check that the user is the same everywhere. `named`: hosts whose user the hostfile gives."""
    own = here.get("user", {}).get("name")
    findings = []
    for host, found in known(facts, "user"):
        if found["name"] != own and host not in named:
            findings.append(
                Finding(
                    "user",
                    "warn",
                    host,
                    f"ssh logs in as {found['name']}, but the user of {THIS_MACHINE} is {own}",
                    f"if that is intended, write {found['name']}@{host} into the hostfile; else "
                    "correct `User` in ~/.ssh/config",
                )
            )
    numbers = {found["uid"] for _, found in known(facts, "user")}
    if not findings and len(numbers) > 1:
        listed = ", ".join(f"{host} {found['uid']}" for host, found in known(facts, "user"))
        text = f"the user has different uids ({listed}): shared files have different owners"
        findings.append(Finding("user", "warn", ALL_HOSTS, text, "use the same uid everywhere"))
    return findings or [Finding("user", "ok", ALL_HOSTS, f"user {own}")]


def check_working_directory(facts: ByHost) -> list[Finding]:
    """Check that the folder in which workers start exists."""
    findings, path = [], ""
    for host, state in known(facts, "working_directory"):
        path = state["path"]
        if not state["usable"]:
            text = f"there is no folder {path}, in which workers start"
            fix = f"`mkdir -p {path}` there, or start from a folder that all hosts have"
            findings.append(Finding("path", "fail", host, text, fix))
    return findings or [Finding("path", "ok", ALL_HOSTS, f"working directory {path}")]


def check_built_for(facts: ByHost) -> list[Finding]:
    """Check that Horovod was compiled for the installed torch (check_horovod_loads is slower)."""
    findings = []
    for host, built in known(facts, "horovod_built_for"):
        torch = facts[host].get("packages", {}).get("torch")
        if built and torch and built != torch:
            text = f"Horovod was built for torch {built}, but torch {torch} is installed"
            findings.append(Finding("horovod", "warn", host, text, "rebuild it: launch/setup"))
    return findings


def check_ssh(noise: Mapping[str, tuple[str, ...]], silent: int = 0) -> list[Finding]:
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
        who = "every other host" if silent else "every host"
        findings.append(Finding("ssh", "ok", ALL_HOSTS, f"{who} answers"))
    return findings


def check_channel(facts: ByHost, by_ssh: Collection[str]) -> list[Finding]:
    """Check that every host can connect to the launcher's machine. `by_ssh`: the remote hosts."""
    findings = []
    ways = dict(known(facts, "channel"))
    for host, channel in ways.items():
        if channel["address"] is None:
            tried = "; ".join(f"{address}: {why}" for address, why in channel["tried"])
            text = f"this host cannot connect back to {THIS_MACHINE} ({tried or 'no address'})"
            fix = (
                f"open {THIS_MACHINE}'s TCP ports to the host (firewall, NAT, security group), or "
                "start from a machine that the hosts can reach"
            )
            findings.append(Finding("way back", "fail", host, text, fix))
    for host, found in facts.items():
        if "ticket" in found.errors:
            text = f"no private file can be written in the user's cache: {found.errors['ticket']}"
            fix = "make ~/.cache writable there (or free the disk), or set XDG_CACHE_HOME"
            findings.append(Finding("way back", "fail", host, text, fix))
    if not findings and not ways.keys().isdisjoint(by_ssh):
        text = f"hosts can connect to {THIS_MACHINE}"
        findings.append(Finding("way back", "ok", ALL_HOSTS, text))
    return findings


def common_interface(facts: ByHost, here: list[tuple[str, str]]) -> tuple[str | None, set[str]]:
    """Return the interface through which hosts reach this machine, if its name is the same on all
    (else None), and all its names.

    `facts`: of the hosts reached by ssh. `here`: this machine's (interface, address) pairs.
    """
    own = {address: name for name, address in here}
    names = set()
    for _, channel in known(facts, "channel"):
        if channel["address"] is not None:
            names.add(channel["interface"] or "?")
            names.add(own.get(channel["address"], "?"))
    return (names.pop() if len(names) == 1 and names != {"?"} else None), names


def check_interface(facts: ByHost, here: list[tuple[str, str]]) -> list[Finding]:
    """Check that the network interface has one name on all hosts, as Horovod requires."""
    interface, names = common_interface(facts, here)
    if interface:
        text = f"Horovod should use {interface}"
        return [Finding("interface", "ok", ALL_HOSTS, text)]
    if not names:
        return []
    own = {address: name for name, address in here}
    listed = _list_interfaces(known(facts, "channel"), own)
    text = f"the network interface has different names ({listed}), but Horovod needs a common one"
    fix = (
        "select an interface that all hosts have by --network-interface, if there is one; else "
        "rename it (`ip link set NAME name net0`)"
    )
    return [Finding("interface", "warn", ALL_HOSTS, text, fix)]


def _list_interfaces(channels: Iterable[tuple[str, Any]], own: Mapping[str, str]) -> str:
    parts = []
    for host, channel in channels:
        address = channel["address"]
        if address is not None:
            there = own.get(address, f"{address}, which is none of its addresses")
            parts.append(f"{host}: {channel['interface']} to {THIS_MACHINE}'s {there}")
    return "; ".join(dict.fromkeys(parts))
