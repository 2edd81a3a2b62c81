"""A throw-away sshd on this machine: keys of its own, a high port, nothing of the user changed.

Its logins have a UTS namespace of their own, as a container has: two names of one machine are
refused.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hvdtrain.launcher.ssh import SshOptions

ADDRESS = "127.0.1.1"  # of this machine, but of none of its interfaces: reached by ssh
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
AS_ANOTHER_MACHINE = ["unshare", "--uts"]
if os.geteuid():
    AS_ANOTHER_MACHINE += ["--user", "--map-current-user"]
START_S = 10.0


class Sshd:
    """Runs until `stop`. Its folder holds the keys, known hosts, and an `ssh` that uses them."""

    def __init__(self, folder: Path, *settings: str) -> None:
        if SSHD is None:
            pytest.skip("there is no SSH server: launch/setup --system-packages --test-packages")
        self.folder = folder
        for name in ("host_key", "key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        lines = [
            f"ListenAddress {ADDRESS}",
            f"HostKey {folder / 'host_key'}",
            f"AuthorizedKeysFile {folder / 'authorized_keys'}",
            "StrictModes no",
            "PidFile none",
            "UsePAM no",
            *settings,
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        known = folder / "known_hosts"
        ssh.write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile={known} "$@"\n'
        )
        ssh.chmod(0o700)
        self._start()

    def _start(self) -> None:
        """On a new port: a child of an sshd that was just stopped may still hold the old one."""
        Path("/run/sshd").mkdir(exist_ok=True)
        assert SSHD is not None  # see __init__
        self.port = free_port()
        self.know_host_key()
        command = [*AS_ANOTHER_MACHINE, SSHD, "-D", "-e", "-p", str(self.port)]
        command += ["-f", str(self.folder / "sshd_config")]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self._greets():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)

    def _greets(self) -> bool:
        """Whether it serves: the system takes connections before sshd does."""
        with suppress(OSError), socket.create_connection((ADDRESS, self.port), START_S) as probe:
            return probe.recv(4) == b"SSH-"
        return False

    def options(self, key: str = "key") -> SshOptions:
        return SshOptions(self.port, self.folder / key, connect_timeout_s=5)

    def know_host_key(self, known: bool = True, key: str = "host_key") -> None:
        """Fill known_hosts with a key, or with none."""
        line = f"[{ADDRESS}]:{self.port} {(self.folder / (key + '.pub')).read_text()}"
        (self.folder / "known_hosts").write_text(line if known else "")

    @contextmanager
    def again(self, setting: str) -> Iterator[SshOptions]:
        """Run it with one more setting instead; gives the options to reach it."""
        self.stop()
        with (self.folder / "sshd_config").open("a") as file:
            file.write(setting + "\n")
        self._start()
        yield self.options()

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(10)


def free_port() -> int:
    """One that the system gives to nobody by itself: else a connection to it, while nobody listens
    there, may find its own other end.
    """
    for port in random.sample(range(20000, 32000), 100):
        with suppress(OSError), socket.create_server((ADDRESS, port)):
            return port
    raise AssertionError("no free port")


@contextmanager
def running_sshd(folder: Path, *settings: str) -> Iterator[Sshd]:
    """An sshd, with its `ssh` first on PATH, while the context lasts."""
    path = os.environ["PATH"]
    sshd = Sshd(folder, *settings)
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{path}"
    try:
        yield sshd
    finally:
        os.environ["PATH"] = path
        sshd.stop()
