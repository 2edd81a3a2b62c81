"""`hvdtrain doctor`: named checks of this machine, or of every host in a hostfile."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import add_host_flags, attempt, find_hosts, ssh_options
from hvdtrain.errors import EXIT_OK, EXIT_PREFLIGHT, UsageError
from hvdtrain.files import json_problems, write_json
from hvdtrain.launcher.doctor import failed, format_findings, format_verdict
from hvdtrain.launcher.doctor.burn_in import burn_in, burn_in_json
from hvdtrain.launcher.doctor.burn_in_checks import check_burn_in
from hvdtrain.launcher.doctor.examination import Examination, Wishes, as_json, examine
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import raise_when_stopped
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
    parser.add_argument(
        "--burn-in",
        type=float,
        metavar="MINUTES",
        help="then train on every core and GPU for so long, and compare the results bit by bit: "
        "finds a processor, card or memory that computes wrong results",
    )
    parser.add_argument("--json", metavar="FILE", help="write all findings and facts to FILE")


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Examine and print; return the exit code: 3 if a check fails. Raises UsageError."""
    interface = arguments["network_interface"]
    if interface is not None and not INTERFACE.fullmatch(interface):
        problems.append(f"--network-interface={interface}: not a valid name of a network interface")
    problems += json_problems(arguments["json"])
    minutes = arguments["burn_in"]
    if minutes is not None and not 0 < minutes < math.inf:
        problems.append(f"--burn-in={minutes:g}: must be a number of minutes above 0")
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
    raise_when_stopped()
    with SshSetup(hosts, options) as ssh:
        say(_headline(hosts))
        examination = examine(hosts, ssh, wishes)
        say(format_findings(examination.findings))
        if minutes is not None and examination.facts:
            _burn_in(examination, hosts, ssh, minutes)
    write_json(arguments["json"], as_json(examination))
    say(format_verdict(examination.findings, examination.seconds))
    return EXIT_PREFLIGHT if failed(examination.findings) else EXIT_OK


def _burn_in(
    examination: Examination, hosts: Sequence[Host], ssh: SshSetup, minutes: float
) -> None:
    """Burn in the hosts that answered; print the findings, and add them to the others."""
    began = time.monotonic()
    burned = burn_in(
        [host for host in hosts if host.address in examination.facts], ssh, minutes * 60
    )
    findings = check_burn_in(burned)
    say(format_findings(findings))
    examination.findings += findings
    examination.burn_in = burn_in_json(burned)
    examination.seconds += time.monotonic() - began


def _headline(hosts: tuple[Host, ...]) -> str:
    count = f"{len(hosts)} hosts: " if len(hosts) > 1 else ""
    named = ", ".join(host.address for host in hosts[:SHOWN_HOSTS])
    more = f" and {len(hosts) - SHOWN_HOSTS} more" if len(hosts) > SHOWN_HOSTS else ""
    return f"doctor: {count}{named}{more}"
