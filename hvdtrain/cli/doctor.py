"""`hvdtrain doctor`: named checks of this machine, or of every host in a hostfile."""

from __future__ import annotations

import argparse
import re
import signal
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hvdtrain.cli.flags import add_host_flags, attempt, find_hosts, ssh_options
from hvdtrain.errors import EXIT_OK, EXIT_PREFLIGHT, Stopped, UsageError
from hvdtrain.files import json_problems, write_json
from hvdtrain.launcher.doctor import failed, format_findings, format_verdict
from hvdtrain.launcher.doctor.examination import Wishes, as_json, examine
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import say
from hvdtrain.topology import Topology

INTERFACE = re.compile(r"[^\s/,:]{1,15}")  # the names that Linux allows
SHOWN_HOSTS = 8
HELP = "check this machine, or every host in a hostfile"
DESCRIPTION = (
    "Check the requirements of training on these hosts (default: this machine). Each check is ok, "
    "warn or fail, with the fix. Exit code 3: a check failed."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_host_flags(parser)
    parser.add_argument(
        "--output",
        default="runs",
        metavar="DIR",
        help="check DIR as the folder of runs (default: runs)",
    )
    parser.add_argument(
        "--controller",
        choices=("auto", "gloo", "mpi"),
        default="auto",
        help="check this one; auto: gloo",
    )
    parser.add_argument("--no-ring", action="store_true", help="start no workers")
    parser.add_argument("--json", metavar="FILE", help="write all findings and facts to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Examine and print; return the exit code: 3 if a check fails. Raises UsageError."""
    interface = arguments["network_interface"]
    if interface is not None and not INTERFACE.fullmatch(interface):
        problems.append(f"--network-interface={interface}: not a valid name of a network interface")
    problems += json_problems(arguments["json"])
    hosts = attempt(problems, lambda: find_hosts(arguments))
    options = attempt(problems, lambda: ssh_options(arguments))
    if problems or hosts is None or options is None:
        raise UsageError(*problems)
    hosts = hosts or (Host("localhost"),)
    wishes = Wishes(
        output=str(Path(arguments["output"]).expanduser().absolute()),
        interface=interface,
        controller=arguments["controller"],
        ring=not arguments["no_ring"],
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with SshSetup(hosts, options) as ssh:
        say(_headline(hosts))
        found = examine(hosts, ssh, wishes)
    say(format_findings(found.findings))
    write_json(arguments["json"], as_json(found))
    say(format_verdict(found.findings, found.seconds))
    return EXIT_PREFLIGHT if failed(found.findings) else EXIT_OK


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Raise Stopped, so that started processes are ended."""
    raise Stopped(number)


def _headline(hosts: tuple[Host, ...]) -> str:
    count = f"{len(hosts)} hosts: " if len(hosts) > 1 else ""
    named = ", ".join(host.address for host in hosts[:SHOWN_HOSTS])
    more = f" and {len(hosts) - SHOWN_HOSTS} more" if len(hosts) > SHOWN_HOSTS else ""
    return f"doctor: {count}{named}{more}"
