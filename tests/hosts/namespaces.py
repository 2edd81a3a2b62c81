"""The hosts of tests (`hvdtrain.lab.hosts`): commands that leave nothing behind, and faults."""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.lab.hosts.network import HostNetwork
from hvdtrain.lab.hosts.node import HostProcess, HostsError, Node, kill_all
from tests.parallel.launching import CHECKOUT, VANISH_S, Finished

FILLER = "filler"
TICKETS = Path("~/.cache/hvdtrain/launch").expanduser()  # hvdtrain/launcher/protocol.py


def name_of(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def path_on(node: Node, path: Path | str) -> Path:
    """Return a path of a node as seen from outside, including its private mounts."""
    return Path(f"/proc/{node.pid}/root") / str(path).lstrip("/")


class Cluster(HostNetwork):
    """Hosts on which commands are run to their end, and on which faults are made."""

    may_leave: tuple[str, ...] = ("torchinductor_",)  # what torch makes in /tmp, for any process

    def _write_files(self) -> None:
        """Also write `hostfile`, which lists the hosts with their slots."""
        super()._write_files()
        lines = [f"{host.name} slots={host.slots}\n" for host in self.hosts]
        self.hostfile.write_text("".join(lines))

    @property
    def hostfile(self) -> Path:
        return self.folder / "hostfile"

    @property
    def host_list(self) -> str:
        """Return the hosts in the format of -H: alpha:1,beta:2,..."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)

    def run(
        self,
        command: Sequence[str],
        timeout_s: float = 120,
        host: int = 0,
        variables: Mapping[str, str] | None = None,
        cwd: Path = CHECKOUT,
    ) -> Finished:
        """Run a command on a host to its end.

        Raises AssertionError when it does not end in time, or when new processes are left on any
        host VANISH_S later. These are killed.
        """
        before = self.processes()
        started = time.monotonic()
        process = self.start(command, host, variables, cwd)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            self.kill_since(before)
            output, _ = process.communicate(timeout=VANISH_S)
            raise AssertionError(f"no end after {timeout_s} s: {command}\n{output}") from None
        seconds = time.monotonic() - started
        left = self.wait_until_gone(before)
        self.kill_since(before)
        assert not left, f"processes left behind by {command}: {left}\n{output}"
        return Finished(process.returncode, output, seconds)

    def processes_since(self, before: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Return the processes of all hosts, without those in `before`."""
        return [process for process in self.processes() if process not in before]

    def wait_until_gone(
        self, before: Sequence[psutil.Process] = (), timeout_s: float | None = None
    ) -> list[psutil.Process]:
        """Return the processes that are left on any host after `timeout_s` (default: VANISH_S)."""
        deadline = time.monotonic() + (VANISH_S if timeout_s is None else timeout_s)
        while (left := self.processes_since(before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def leftovers(self) -> list[str]:
        """Return what is left on the hosts that are up: processes, shared memory, temporary files;
        and the tickets of jobs, in the home that they share.
        """
        found = [f"{process}" for process in self.wait_until_gone()]
        shown = {path for visible in self._visible for path in (visible, *visible.parents)}
        for node in self._nodes:
            for folder in ("/dev/shm", "/tmp") if node.is_alive else ():
                inside = path_on(node, folder).iterdir()
                paths = {Path(folder, path.name) for path in inside} - shown
                left = [path for path in paths if not path.name.startswith(self.may_leave)]
                found += [f"{node.name}: {path}" for path in sorted(left)]
        return found + [f"ticket {path.name}" for path in (self.folder / "tickets").iterdir()]

    def _make_node(self, host: int) -> Node:
        node, own = super()._make_node(host), self.folder / "tickets"
        for folder in (own, TICKETS):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        node.tool(["mount"], "mount", "--bind", str(own), str(TICKETS))
        return node

    def kill(self, launcher: HostProcess) -> None:
        """Kill a launcher, which leaves files in /tmp for the next one to remove."""
        launcher.kill()
        self.may_leave += ("hvdtrain-ssh-", "ompi.")

    # Faults

    def ip(self, host: int, *command: str) -> str:
        """Run `ip` in a host's network: ip(1, "link", "set", "eth0", "mtu", "900")."""
        return self._nodes[host].tool(["net"], "ip", *command)

    def add_network(self) -> str:
        """Connect all hosts by a second network; return its interface, eth1, whose addresses are
        10.88.0.1 and so on.
        """
        switch = self._switch
        lines = ["link add bridge1 type bridge", "link set bridge1 up"]
        switch.tool(["net"], "ip", "-batch", "-", lines=lines)
        for host, node in enumerate(self._nodes):
            port = f"second{host}"
            lines = [f"link add {port} type veth peer name eth1 netns {node.pid}"]
            lines += [f"link set {port} master bridge1", f"link set {port} up"]
            switch.tool(["net"], "ip", "-batch", "-", lines=lines)
            self.ip(host, "address", "add", f"10.88.0.{host + 1}/24", "dev", "eth1")
            self.ip(host, "link", "set", "eth1", "up")
        return "eth1"

    def name_hosts(self, host: int, lines: Sequence[str]) -> None:
        """Give a host names of its own (/etc/hosts), in place of those that all have."""
        path = self.folder / f"names.{host}"
        path.write_text("".join(f"{line}\n" for line in ["127.0.0.1 localhost", *lines]))
        self._nodes[host].tool(["mount"], "mount", "--bind", str(path), "/etc/hosts")

    def set_hostname(self, host: int, name: str) -> None:
        """Give a host another name, of which other hosts know nothing."""
        self._nodes[host].tool(["uts"], "hostname", name)

    def set_login_shell(self, host: int, shell: str) -> None:
        """Give the logins of a host another shell (/etc/passwd)."""
        name = getpass.getuser()
        lines = Path("/etc/passwd").read_text().splitlines()
        own = [f"{it.rpartition(':')[0]}:{shell}" for it in lines if it.startswith(f"{name}:")]
        others = [it for it in lines if not it.startswith(f"{name}:")]
        self._mount_passwd(host, [*own, *others])

    def move_home(self, host: int, home: Path) -> None:
        """Let logins on a host start in another folder, with the keys of the old one."""
        shutil.copytree(self.hosts[host].folder / "ssh", home / ".ssh", dirs_exist_ok=True)
        old, lines = str(Path.home()), Path("/etc/passwd").read_text()
        self._mount_passwd(host, lines.replace(f":{old}:", f":{home}:", 1).splitlines())

    def _mount_passwd(self, host: int, lines: Sequence[str]) -> None:
        path = self.folder / f"passwd.{host}"
        path.write_text("".join(f"{line}\n" for line in lines))
        self._nodes[host].tool(["mount"], "mount", "--bind", str(path), "/etc/passwd")

    def bytes_of(self, host: int, interface: str) -> int:
        """Return the number of bytes that an interface of a host has received and sent."""
        lines = self._nodes[host].tool(["net"], "cat", "/proc/net/dev").splitlines()
        (numbers,) = (line.split()[1:] for line in lines if line.split()[0] == f"{interface}:")
        return int(numbers[0]) + int(numbers[8])

    def lose_large_packets(self, host: int, most_bytes: int) -> None:
        """Drop larger packets on the way to and from a host, of which nobody is informed."""
        port = f"port{host}"
        self._switch.tool(["net"], "ip", "link", "set", port, "mtu", str(most_bytes))

    def cut(self, host: int) -> None:
        """Disconnect a host from the network, in both directions."""
        self._switch.tool(["net"], "ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Reconnect a host that was cut."""
        self._switch.tool(["net"], "ip", "link", "set", f"port{host}", "up")

    def break_ssh(self, host: int) -> list[psutil.Process]:
        """Kill, and return, the sshd of each connection to the host; its commands continue."""
        broken = [item for item in self.processes(host) if name_of(item).startswith("sshd")]
        kill_all(broken)
        return broken

    def stop_sshd(self, host: int) -> None:
        """Stop the listening sshd; existing connections remain."""
        self._sshds.pop(host).discard()

    def path(self, host: int, path: Path | str) -> Path:
        """Return a path of a host as seen from outside, including its private mounts."""
        return path_on(self._nodes[host], path)

    def make_private(self, host: int, folder: Path, mib: int = 64) -> None:
        """Mount an empty file system of `mib` MiB at a folder of this host only."""
        folder.mkdir(parents=True, exist_ok=True)
        options = ["-t", "tmpfs", "-o", f"size={mib}m,mode=755", "tmpfs", str(folder)]
        self._nodes[host].tool(["mount"], "mount", *options)

    def fill(self, host: int, folder: Path, free_kib: int = 0) -> None:
        """Fill the private disk at a folder of this host, except `free_kib`; mount it if needed."""
        if not os.path.ismount(self.path(host, folder)):
            self.make_private(host, folder, mib=1)
        with (self.path(host, folder) / FILLER).open("wb") as file:
            while True:
                place = os.statvfs(self.path(host, folder))
                size = os.fstat(file.fileno()).st_blocks * 512 + place.f_bavail * place.f_frsize
                try:
                    os.posix_fallocate(file.fileno(), 0, size - free_kib * 1024)
                    return
                except OSError as error:  # another process has just used some of it
                    if error.errno != errno.ENOSPC:
                        raise

    def drain(self, host: int, folder: Path) -> None:
        """Remove the file that `fill` wrote."""
        (self.path(host, folder) / FILLER).unlink()

    def kill_host(self, host: int) -> None:
        """End everything on a host at once, as a power cut does, without closing connections."""
        with contextlib.suppress(HostsError):  # first, so that no socket sends a FIN
            self._switch.tool(["net"], "ip", "link", "delete", f"port{host}")
        self._nodes[host].close()
        if host in self._sshds:
            self._sshds.pop(host).discard()

    def revive(self, host: int) -> None:
        """Restart a killed host with the same address and keys, and without other processes."""
        assert not self._nodes[host].is_alive, "it is alive"
        self._nodes[host] = self._make_node(host)
        self._plug_in(host)
        self.start_sshd(host)
