"""SSH access to hosts: a generated configuration, and an `ssh` that keeps host keys checked.

horovodrun accepts plain names only and disables the check of host keys. A wrapper named `ssh`,
first on its PATH, removes that option, so that the user's configuration applies (without one, an
unknown host is refused). The generated configuration maps aliases to users and IPv6 addresses.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hvdtrain.errors import UsageError
from hvdtrain.launcher.addresses import resolves_here
from hvdtrain.launcher.command import find_mpirun
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.stopping import spared_by_slurm
from hvdtrain.slurm import in_job

_TAKEN_BY_ENGINES = re.compile("[A-Za-z0-9.-]+")  # horovodrun also accepts _, Open MPI does not
_SAFE_IN_CONFIGURATION = re.compile(r'[^\s"\\\x00-\x1f]+')
_WRAPPER = """\
#!/bin/sh
# Written by hvdtrain. Removes the option by which horovodrun disables the check of host keys.
for part do
    shift
    [ "$part" = StrictHostKeyChecking=no ] && part=BatchMode=yes
    set -- "$@" "$part"
done
exec {command} "$@"
"""
_PLAIN_WRAPPER = """\
#!/bin/sh
exec {command} "$@"
"""
_NO_SSH = """\
#!/bin/sh
echo "hvdtrain: there is no ssh command on PATH" >&2
exit 127
"""
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


@dataclass(frozen=True)
class SshOptions:
    """SSH options of the user: --ssh-port and --ssh-identity-file."""

    port: int | None = None
    identity_file: Path | None = None
    connect_timeout_s: int = 10

    def __post_init__(self) -> None:
        problems = []
        if self.port is not None and not 1 <= self.port <= 65535:
            problems.append(f"--ssh-port={self.port}: must be from 1 to 65535")
        if self.identity_file is not None and not self.identity_file.expanduser().is_file():
            problems.append(f"--ssh-identity-file={self.identity_file}: there is no such file")
        if problems:
            raise UsageError(*problems)


class SshSetup:
    """A context manager for a private folder with `config` and an executable `ssh`.

    In a Slurm job the folder also holds an `mpirun` that ignores Slurm's SIGTERM.
    """

    path: Path

    def __init__(self, hosts: Sequence[Host], options: SshOptions) -> None:
        """Raise UsageError for a host that cannot be written to an ssh configuration."""
        self.hosts = tuple(hosts)
        self.options = options
        self._names = _names(self.hosts)

    def __enter__(self) -> SshSetup:
        self._folder = tempfile.TemporaryDirectory(prefix="hvdtrain-ssh-")  # mode 0700
        self.path = Path(self._folder.name)
        (self.path / "config").write_text(self._configuration(), "utf-8")
        self._write_program("ssh", self._wrapper())
        mpirun = find_mpirun()
        if mpirun and in_job():
            command = shlex.join(spared_by_slurm([mpirun]))
            self._write_program("mpirun", _PLAIN_WRAPPER.format(command=command))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def name_of(self, host: Host) -> str:
        """Return the host's name for horovodrun: its own if that is accepted, else an alias."""
        return self._names[host.address]

    def argv(self, host: Host, remote_command: Sequence[str]) -> list[str]:
        """Return the command that runs `remote_command` on the host: no terminal, no prompts."""
        quiet = ["-T", "-o", "LogLevel=ERROR"]  # without the server's banner and warnings
        remote = shlex.join(remote_command)
        return [str(self.path / "ssh"), *quiet, "--", self.name_of(host), remote]

    def by_hand(self, host: Host) -> str:
        """Return the command to log in to the host by hand."""
        return " ".join(["ssh", *self.flags(), host.address])

    def flags(self) -> list[str]:
        """Return the user's options as ssh arguments, quoted for a shell."""
        port = ["-p", str(self.options.port)] if self.options.port else []
        identity = self.options.identity_file
        return [*port, *(["-i", shlex.quote(str(identity))] if identity else [])]

    def _write_program(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, "utf-8")
        (self.path / name).chmod(0o700)

    def _wrapper(self) -> str:
        real = shutil.which("ssh")
        if real is None:
            return _NO_SSH
        command = [real, "-F", str(self.path / "config"), "-o", "BatchMode=yes"]
        command += ["-o", f"ConnectTimeout={self.options.connect_timeout_s}"]
        if self.options.port is not None:
            command += ["-p", str(self.options.port)]
        if self.options.identity_file is not None:
            command += ["-i", str(self.options.identity_file.expanduser().absolute())]
        return _WRAPPER.format(command=shlex.join(spared_by_slurm(command)))

    def _configuration(self) -> str:
        lines = []
        for host in self.hosts:
            name = self.name_of(host)
            alias = name != host.name
            if alias or host.user:
                lines.append(f"Host {name}")
            if alias:
                lines.append(f'    HostName "{host.name.replace("%", "%%")}"')
            if host.user:
                lines.append(f'    User "{host.user}"')
        return "\n".join([*lines, _CONFIGURATION_END])


def is_local(host: Host) -> bool:
    """Return whether horovodrun starts the host's workers on this machine, without ssh."""
    return _names_no_other_user(host) and resolves_here(host.name)


def _names_no_other_user(host: Host) -> bool:
    return host.user is None or host.user == pwd.getpwuid(os.getuid()).pw_name


def _names(hosts: Sequence[Host]) -> dict[str, str]:
    """Return address -> name: an alias if the name is refused, repeated, or would bypass ssh."""
    names: dict[str, str] = {}  # by address, which does not change when slots are reduced
    problems = []
    for number, host in enumerate(hosts, 1):
        for text in filter(None, (host.name, host.user)):
            if text.startswith("-") or not _SAFE_IN_CONFIGURATION.fullmatch(text):
                problems.append(
                    f"{host.source or 'hosts'}: {text!r} is not a valid host or user for ssh"
                )
        plain = _TAKEN_BY_ENGINES.fullmatch(host.name) and host.name not in names.values()
        other_user_here = not _names_no_other_user(host) and resolves_here(host.name)
        taken = plain and not other_user_here
        names[host.address] = host.name if taken else f"hvdtrain-host-{number}"
    if problems:
        raise UsageError(*problems)
    return names
