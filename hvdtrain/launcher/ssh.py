"""SSH access to hosts: a generated configuration, and an `ssh` that keeps host keys checked.

horovodrun accepts plain names only and disables the check of host keys. A wrapper named `ssh`,
first on its PATH, removes that option, so that the user's configuration applies (without one, an
unknown host is refused). The generated configuration maps aliases to users and IPv6 addresses.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import every_problem, refuse
from hvdtrain.files import hold
from hvdtrain.horovod_build.runner.any_shell import for_any_shell
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.addresses import resolves_here
from hvdtrain.launcher.horovodrun import find_mpirun
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.processes import (
    own_passwd_entry,
    programs_folder,
    remove_abandoned,
    spared_by_slurm,
)
from hvdtrain.slurm import in_job

PREFIX = "hvdtrain-ssh-"  # of folders that hold the configuration of one launcher
LOCALHOST = "localhost"  # for horovodrun: the machine that it runs on
_PLAIN_NAME = re.compile("[A-Za-z0-9.-]+")  # horovodrun also accepts _, Open MPI does not
# Removes the option by which horovodrun disables the check of host keys.
_KEEP_CHECKING = """\
for part do
    shift
    [ "$part" = StrictHostKeyChecking=no ] && part=BatchMode=yes
    set -- "$@" "$part"
done
"""
_NO_SSH = 'echo "hvdtrain: there is no ssh command on PATH" >&2; exit 127'
# The user's files take precedence: ssh uses the first value of each option. The keep-alive settings
# detect a dead connection within a minute.
_CONFIGURATION_END = """\
Match all
Include ~/.ssh/config
Match all
Include /etc/ssh/ssh_config
Match all
ServerAliveInterval 15
ServerAliveCountMax 3
"""


class HubAddress(NamedTuple):
    """Where shells reach the hub of a job without SSH (hvdtrain/launcher/nodes)."""

    host: str
    port: int
    secret: str
    key: str  # of shells alone
    nodes: int
    on_one: bool  # all nodes may be on one machine, where this is tried out


@dataclass(frozen=True)
class SshOptions:
    """SSH options of the user: --ssh-port and --ssh-identity-file."""

    port: int | None = None
    identity_file: Path | None = None
    connect_timeout_s: int = 10
    hub: HubAddress | None = None  # that runs commands on nodes instead

    def __post_init__(self) -> None:
        port, key = self.port, self.identity_file
        problems = every_problem(
            (
                port is not None and not 1 <= port <= 65535,
                f"--ssh-port={port}: must be from 1 to 65535",
            ),
            (
                key and not key.expanduser().is_file(),
                f"--ssh-identity-file={key}: there is no such file",
            ),
        )
        refuse(problems)


class SshSetup:
    """A private folder with `config`, `ssh` and, in a Slurm job, an `mpirun` spared its SIGTERM."""

    def __init__(self, hosts: Sequence[Host], options: SshOptions) -> None:
        self._hosts, self.options = tuple(hosts), options
        # By address, which does not change when slots are reduced.
        self._names: dict[str, str] = {}
        for number, host in enumerate(hosts, 1):
            taken = _is_plain(host) and host.name not in self._names.values()
            alias = LOCALHOST if host.node == 0 else f"hvdtrain-host-{number}"
            self._names[host.address] = host.name if taken else alias

    def __enter__(self) -> SshSetup:
        executable = in_job() or not all(map(is_local, self._hosts))
        parent = programs_folder(executable)
        remove_abandoned(Path(parent), PREFIX, "config")
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        self.path = Path(self._folder.name)
        self._lock = (self.path / "config").open("w", encoding="utf-8")
        hold(self._lock)
        self._lock.write(self._configuration())
        self._lock.flush()
        self._write_program("ssh", self._ssh_command(), "" if self.options.hub else _KEEP_CHECKING)
        mpirun = find_mpirun()
        if mpirun and in_job():
            self._write_program("mpirun", [mpirun])
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()
        self._folder.cleanup()

    def name_of(self, host: Host) -> str:
        """Return the host's name for horovodrun: its own if that is accepted, else an alias."""
        return self._names[host.address]

    def argv(self, host: Host, remote_command: Sequence[str]) -> list[str]:
        """Return the command that runs `remote_command` on the host: no terminal, no prompts."""
        quiet = ["-T", "-o", "LogLevel=ERROR"]  # without the server's banner and warnings
        remote = for_any_shell(shlex.join(remote_command))
        return [str(self.path / "ssh"), *quiet, "--", self.name_of(host), remote]

    def by_hand(self, host: Host) -> str:
        """Return the command to log in to the host by hand."""
        if self.options.hub:
            return f"on {host.address}:"
        return shlex.join(["ssh", *self._flags(self.options.identity_file), host.address])

    def _flags(self, identity_file: Path | None) -> list[str]:
        port = ["-p", str(self.options.port)] if self.options.port else []
        return [*port, *(["-i", str(identity_file)] if identity_file else [])]

    def _write_program(self, name: str, command: Sequence[str], before: str = "") -> None:
        words = shlex.join(spared_by_slurm(command))
        path = self.path / name
        path.write_text(f'#!/bin/sh\n{before}exec {words} "$@"\n', "utf-8")
        path.chmod(0o700)

    def _ssh_command(self) -> list[str]:
        if self.options.hub:
            ranks = {self.name_of(host): host.node for host in self._hosts}
            settings = self.options.hub._asdict() | {"ranks": ranks}
            (self.path / "hub").write_text(json.dumps(settings), "utf-8")  # in a private folder
            return [*module_argv("hvdtrain.launcher.nodes.shell"), str(self.path / "hub")]
        real = shutil.which("ssh")
        if real is None:
            return ["/bin/sh", "-c", _NO_SSH]
        key = self.options.identity_file
        command = [real, "-F", str(self.path / "config"), "-o", "BatchMode=yes"]
        command += ["-o", f"ConnectTimeout={self.options.connect_timeout_s}"]
        return command + self._flags(key and key.expanduser().absolute())

    def _configuration(self) -> str:
        lines = []
        for host in self._hosts:
            user = [f'    User "{host.user}"'] if host.user else []
            if (name := self.name_of(host)) != host.name:
                lines += [f"Host {name}", f'    HostName "{host.name.replace("%", "%%")}"', *user]
            elif user:
                lines += [f"Host {name}", *user]
        return "\n".join([*lines, _CONFIGURATION_END])


def is_local(host: Host) -> bool:
    """Return whether horovodrun starts the host's workers on this machine, without ssh."""
    if host.node is not None:
        return host.node == 0
    return _is_own_user(host) and resolves_here(host.name)


def _is_own_user(host: Host) -> bool:
    entry = own_passwd_entry()
    return host.user is None or (entry is not None and host.user == entry.pw_name)


def _is_plain(host: Host) -> bool:
    """Return whether horovodrun accepts the host's name, and bypasses ssh only where it must."""
    bypasses = not _is_own_user(host) and resolves_here(host.name)
    if host.node is not None:
        bypasses = resolves_here(host.name) != (host.node == 0)
    return bool(_PLAIN_NAME.fullmatch(host.name)) and not bypasses
