"""The flags that say which hosts, and how ssh reaches them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import UsageError
from hvdtrain.launcher.hostfile import parse_host_list, read_hostfile
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.sites import hosts_of_site
from hvdtrain.launcher.ssh import SshOptions

Found = TypeVar("Found")


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """horovodrun's names."""
    group = parser.add_argument_group("hosts (default: Slurm's or the MPI Operator's, else this)")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="A:2,B:4", help="hosts and their slots")
    hosts.add_argument(
        *("--hostfile", "-hostfile"), metavar="FILE", help="a line for each host: NAME slots=N"
    )
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="of sshd on all hosts")
    group.add_argument("-i", "--ssh-identity-file", type=Path, metavar="FILE", help="private key")
    group.add_argument(
        "--network-interface", metavar="NAME", help="of the network between hosts (default: found)"
    )


def find_hosts(arguments: dict[str, Any]) -> tuple[Host, ...]:
    """Those of the flags, else the site's, else none. Raises UsageError with all problems."""
    if arguments["hosts"] is not None:
        return parse_host_list(arguments["hosts"])
    if arguments["hostfile"] is not None:
        return read_hostfile(Path(arguments["hostfile"]))
    return hosts_of_site(os.environ)


def ssh_options(arguments: dict[str, Any]) -> SshOptions:
    """Raises UsageError with all problems."""
    return SshOptions(arguments["ssh_port"], arguments["ssh_identity_file"])


def attempt(problems: list[str], action: Callable[[], Found]) -> Found | None:
    """The result, or None and its problems added to the others."""
    try:
        return action()
    except UsageError as error:
        problems.extend(error.problems)
        return None
