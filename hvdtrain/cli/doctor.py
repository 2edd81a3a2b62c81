"""`hvdtrain doctor`: named checks of this machine, or of every host of a hostfile."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hvdtrain.errors import EXIT_OK, EXIT_PREFLIGHT, Stopped, UsageError
from hvdtrain.launcher.doctor.examining import Examination, Wishes, examine
from hvdtrain.launcher.doctor.facts import failed
from hvdtrain.launcher.doctor.telling import as_json, tell_findings, tell_verdict
from hvdtrain.launcher.hostfile import parse_host_list, read_hostfile
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.sites import hosts_of_site
from hvdtrain.launcher.ssh import SshOptions, SshSetup
from hvdtrain.log import say

INTERFACE = re.compile(r"[^\s/,:]{1,15}")  # as Linux allows names
SHOWN_HOSTS = 8


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain doctor`."""
    hosts = parser.add_argument_group("hosts (default: Slurm's or the MPI Operator's, else this)")
    hosts.add_argument("--hostfile", "-hostfile", metavar="FILE", help="one host a line")
    hosts.add_argument("-H", "--hosts", metavar="a:2,b:4", help="hosts with their slots")
    hosts.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    hosts.add_argument("-i", "--ssh-identity-file", metavar="KEY", help="the private key for ssh")
    parser.add_argument(
        "--output", default="runs", metavar="DIR", help="where runs will be (default: runs)"
    )
    parser.add_argument("--network-interface", metavar="NAME", help="that is to join the hosts")
    parser.add_argument(
        "--controller", choices=("auto", "gloo", "mpi"), default="auto", help="auto tries gloo"
    )
    parser.add_argument("--no-ring", action="store_true", help="start no workers")
    parser.add_argument("--json", metavar="FILE", help="write all findings and facts")


def run(arguments: dict[str, Any], unknown: list[str]) -> int:
    """Examine, tell, and return the exit code: 3 when a check fails."""
    hosts, options, wishes = _read(arguments, unknown)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with SshSetup(hosts, options) as ssh:
        say(_headline(hosts))
        found = examine(hosts, ssh, wishes)
    say(tell_findings(found.findings))
    if arguments["json"]:
        _write(Path(arguments["json"]), found)
    say(tell_verdict(found.findings, found.seconds))
    return EXIT_PREFLIGHT if failed(found.findings) else EXIT_OK


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End in order, so that what was started ends too."""
    raise Stopped(number)


def _read(
    arguments: dict[str, Any], unknown: list[str]
) -> tuple[tuple[Host, ...], SshOptions, Wishes]:
    """What is to be done. Raises UsageError with all problems."""
    problems: list[str] = []
    if unknown:
        problems.append(f"not understood: {' '.join(unknown)} (see hvdtrain doctor --help)")
    if arguments["hostfile"] is not None and arguments["hosts"] is not None:
        problems.append("--hostfile and -H: give one of them")
    interface = arguments["network_interface"]
    if interface is not None and not INTERFACE.fullmatch(interface):
        problems.append(f"--network-interface={interface}: not a name of a network interface")
    problems += _file_problems(arguments["json"])
    hosts: tuple[Host, ...] = ()
    options = SshOptions()
    try:
        hosts = _hosts(arguments)
    except UsageError as error:
        problems += error.problems
    try:
        options = _ssh_options(arguments)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(*problems)
    wishes = Wishes(
        output=str(Path(arguments["output"]).expanduser().absolute()),
        interface=interface,
        controller=arguments["controller"],
        ring=not arguments["no_ring"],
    )
    return hosts, options, wishes


def _hosts(arguments: dict[str, Any]) -> tuple[Host, ...]:
    if arguments["hostfile"] is not None:
        return read_hostfile(Path(arguments["hostfile"]))
    if arguments["hosts"] is not None:
        return parse_host_list(arguments["hosts"])
    return hosts_of_site(os.environ) or (Host("localhost"),)


def _ssh_options(arguments: dict[str, Any]) -> SshOptions:
    identity = arguments["ssh_identity_file"]
    return SshOptions(arguments["ssh_port"], Path(identity) if identity is not None else None)


def _file_problems(name: str | None) -> list[str]:
    if name is None:
        return []
    path = Path(name)
    writable = os.access(path if path.exists() else path.parent, os.W_OK)
    return [] if writable and not path.is_dir() else [f"--json={name}: cannot be written"]


def _headline(hosts: tuple[Host, ...]) -> str:
    if len(hosts) == 1:
        return f"doctor: {hosts[0].address}"
    named = ", ".join(host.address for host in hosts[:SHOWN_HOSTS])
    more = f" and {len(hosts) - SHOWN_HOSTS} more" if len(hosts) > SHOWN_HOSTS else ""
    return f"doctor: {len(hosts)} hosts: {named}{more}"


def _write(path: Path, found: Examination) -> None:
    path.write_text(json.dumps(as_json(found), indent=2) + "\n", "utf-8")
