"""`hvdtrain stage`: bring environment and job folder to hosts that have nothing."""

import time
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import (
    HOSTS_TITLE,
    SSH_FLAGS,
    Command,
    Flag,
    Section,
    find_hosts,
    ssh_options,
)
from hvdtrain.errors import EXIT_FAILED, EXIT_OK, UsageError, attempt
from hvdtrain.launcher.doctor import failed, format_findings
from hvdtrain.launcher.processes import raise_when_stopped
from hvdtrain.launcher.ssh import SshSetup, is_local
from hvdtrain.log import counted, say
from hvdtrain.topology import Topology

LEFT_OUT = ("runs", "logs", ".git")
FLAGS = (
    Section(HOSTS_TITLE, SSH_FLAGS),
    Flag("folders", "also copy these folders, such as data", metavar="FOLDER", more={"nargs": "*"}),
    Flag(
        "--leave-out",
        f"do not copy NAME in the current folder (default: {', '.join(LEFT_OUT)}); repeatable",
        metavar="NAME",
        more={"action": "append"},
    ),
    Flag("--remove", "remove from the hosts what was copied there", bool),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Stage, or remove; return the exit code. Raises UsageError and PreflightError."""
    from hvdtrain.launcher.staging import stage, trees_of, unstage

    hosts = attempt(problems, lambda: find_hosts(arguments))
    options = attempt(problems, lambda: ssh_options(arguments))
    folders = [Path(folder).expanduser().absolute() for folder in arguments["folders"]]
    problems += [f"{folder}: there is no such folder" for folder in folders if not folder.is_dir()]
    if hosts == ():
        problems.append("no hosts are given: name them by --hostfile FILE or -H alpha,beta")
    if problems or hosts is None or options is None:
        raise UsageError(*problems)
    left_out = arguments["leave_out"] or LEFT_OUT
    trees = trees_of(dict.fromkeys(folders, ()) | {Path.cwd(): left_out})
    distant = [host for host in hosts if not is_local(host)]
    raise_when_stopped()
    began_s = time.monotonic()
    say(f"stage: {', '.join(trees)}; {counted(len(distant), 'other host')}")
    with SshSetup(hosts, options) as ssh:
        findings = (unstage if arguments["remove"] else stage)(distant, ssh, trees)
    if findings:
        say(format_findings(findings))
    verdict = "problems found" if failed(findings) else "done"
    say(f"stage: {verdict} ({time.monotonic() - began_s:.1f} s)")
    return EXIT_FAILED if failed(findings) else EXIT_OK


COMMAND = Command(
    "copy environment and job folder to hosts that have nothing",
    "Copy this virtual environment, hvdtrain and the current folder to the same paths on all "
    "hosts, so that `launch` can start there. Only what has changed is copied, and a copy replaces "
    "the old one once it is complete. Hosts need SSH, and the Python that the environment was made "
    "with. Exit code 3: a host cannot take the copies, and none was changed.",
    FLAGS,
    run,
)
