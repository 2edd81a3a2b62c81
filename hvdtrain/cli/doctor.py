"""`hvdtrain doctor`: named checks of this machine, or of every host in a hostfile."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.cli.flags import (
    CONTROLLERS,
    HOST_FLAGS,
    Command,
    Flag,
    find_hosts,
    ssh_options,
    train_flag,
    wrong_flags,
)
from hvdtrain.config.fields import Check, folder_of
from hvdtrain.errors import EXIT_OK, EXIT_PREFLIGHT, UsageError, attempt
from hvdtrain.files import json_problems, write_json
from hvdtrain.launcher.doctor import failed, format_findings, format_verdict
from hvdtrain.launcher.doctor.burn_in import burn_in, burn_in_json, check_burn_in
from hvdtrain.launcher.doctor.examination import Examination, as_json, examine
from hvdtrain.launcher.hosts import SHOWN_HOSTS, Host
from hvdtrain.launcher.processes import raise_when_stopped
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import few, say
from hvdtrain.topology import Topology

INTERFACE = re.compile(r"[^\s/,:]{1,15}")  # the names that Linux allows
MINUTES = Check(lambda m: 0 < m < math.inf, "={:g}: must be a number of minutes above 0")
FLAGS = (
    HOST_FLAGS,
    train_flag("output", "check this folder as that of runs"),
    Flag("--controller", "check this one; auto: gloo", default="auto", choices=CONTROLLERS),
    Flag("--no-ring", "start no workers", bool),
    Flag(
        "--burn-in",
        "then train on every core and GPU for so long, and compare the results bit by bit: "
        "finds a processor, card or memory that computes wrong results",
        float,
        metavar="MINUTES",
        check=MINUTES,
    ),
    Flag("--json", "write all findings and facts to FILE", metavar="FILE"),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Examine and print; return the exit code: 3 if a check fails. Raises UsageError."""
    interface = arguments["network_interface"]
    if interface is not None and not INTERFACE.fullmatch(interface):
        problems.append(f"--network-interface={interface}: not a valid name of a network interface")
    problems += [*json_problems(arguments["json"]), *wrong_flags(FLAGS, arguments)]
    minutes = arguments["burn_in"]
    hosts = attempt(problems, lambda: find_hosts(arguments))
    options = attempt(problems, lambda: ssh_options(arguments))
    if problems or hosts is None or options is None:
        raise UsageError(*problems)
    hosts = hosts or (Host("localhost"),)
    raise_when_stopped()
    with SshSetup(hosts, options) as ssh:
        say(_headline(hosts))
        examination = examine(
            hosts,
            ssh,
            output=str(folder_of(arguments["output"]).expanduser().absolute()),
            interface=interface,
            controller=arguments["controller"],
            ring=not arguments["no_ring"],
        )
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
    return f"doctor: {count}{few([host.address for host in hosts], SHOWN_HOSTS)}"


COMMAND = Command(
    "check this machine, or every host in a hostfile",
    "Check the requirements of training on these hosts (default: this machine). Each check is ok, "
    "warn or fail, with the fix. Exit code 3: a check failed.",
    FLAGS,
    run,
)
