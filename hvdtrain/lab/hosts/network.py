"""Several hosts on one switch, each with its own network, names, processes and sshd.

Each host, and the switch that connects them, is a `Node`. The bridge of the switch is in its own
namespace, so that the network of the machine is not changed. Three hosts:

    alpha 10.77.0.1          beta 10.77.0.2          gamma 10.77.0.3
    eth0 ---- port0 [ switch: a bridge ] port1 ---- eth0 ...

Nothing of it has a name outside. All of it is removed with the process that made it, however that
ends, and two networks at the same time are invisible to each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.lab.hosts.node import UNSHARE, HostProcess, HostsError, Node, kill_all, run_tool
from hvdtrain.lab.hosts.ssh_files import write_ssh_files

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
INTERFACE = "eth0"  # on every host
SSHD = "/usr/sbin/sshd"
SSHD_START_S = 10.0
VANISH_S = 15.0  # processes that were killed have this long to go
BURST_BYTES = 512 << 10  # that a shaped link passes at once
QUEUE_MS = 200  # that a packet may wait for a shaped link
SHELL_START_UP = (".bashrc", ".zshenv")  # files that a shell under sshd reads
PACKAGES = Path(__file__).resolve().parents[3]  # the folder of this package
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ssh-keygen": "openssh-client",
    SSHD: "openssh-server",
}


def why_not() -> str | None:
    """Return the reason why this machine cannot make hosts, or None."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    if missing := sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)}):
        return f"to make hosts, these Debian packages are needed: {' '.join(missing)}"
    try:
        run_tool([*UNSHARE, "ip", "link", "add", "port0", "type", "bridge"])
    except HostsError as error:
        return f"hosts are made of namespaces, which this machine does not allow: {error}"
    return None


@dataclass(frozen=True)
class NamespaceHost:
    """One host; `folder` holds its SSH files (`ssh/` is its ~/.ssh) and the log of its sshd."""

    name: str
    address: str
    address6: str
    slots: int
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return all its names and addresses; NAME-v6 resolves to its IPv6 address."""
        return (self.name, f"{self.name}-v6", self.address, self.address6)


class HostNetwork:
    """Hosts on one switch, each with an sshd; a context manager.

    `hostfile` lists them with their slots. `folder` is for their files, and must be empty or
    absent. Of /tmp, only `folder` and `visible` exist on the hosts. Methods take a host by its
    index.
    """

    def __init__(
        self,
        slots: Sequence[int],
        folder: Path,
        names: Sequence[str] = NAMES,
        ssh_port: int = 22,
        visible: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.ssh_port = ssh_port
        self.hosts = tuple(
            NamespaceHost(name, f"10.77.0.{i}", f"fd77::{i}", count, folder / name)
            for i, (name, count) in enumerate(zip(names, slots, strict=False), start=1)
        )
        assert len(self.hosts) == len(slots), "more hosts than names"
        self.hostfile = folder / "hostfile"
        self._visible = _outermost([folder, *visible, PACKAGES, Path(sys.prefix)])
        self._switch: Node
        self._nodes: list[Node] = []
        self._sshds: dict[int, HostProcess] = {}
        self._started: list[HostProcess] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> HostNetwork:
        with contextlib.ExitStack() as stack:
            stack.callback(self._discard)
            self._write_files()
            self._switch = Node("switch")
            stack.callback(self._switch.close)
            up = ["link add bridge0 type bridge", "link set bridge0 up"]
            self._switch.tool(["net"], "ip", "-batch", "-", lines=up)
            stack.callback(self._close_nodes)
            for host in range(len(self.hosts)):
                self._nodes.append(self._make_node(host))
                self._plug_in(host)
            for host in range(len(self.hosts)):
                self.start_sshd(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def host_list(self) -> str:
        """Return the hosts in the format of -H: alpha:1,beta:2,..."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)

    def shape(self, bits_per_s: float, hosts: Sequence[int] | None = None) -> None:
        """Limit the links of hosts (None: all) to this many bits a second, in each direction.

        By a token bucket (tc-tbf(8)) at both ends of its cable.
        """
        queue = ["root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{BURST_BYTES}b"]
        queue += ["latency", f"{QUEUE_MS}ms"]
        for host in range(len(self._nodes)) if hosts is None else hosts:
            shaped = ["tc", "qdisc", "replace", "dev"]
            self._nodes[host].tool(["net"], *shaped, INTERFACE, *queue)
            self._switch.tool(["net"], *shaped, f"port{host}", *queue)

    def start(
        self,
        command: Sequence[str],
        host: int = 0,
        variables: Mapping[str, str] | None = None,
        cwd: Path = PACKAGES,
        **options: object,
    ) -> HostProcess:
        """Start a command on a host; `options` are those of Popen (default: one output pipe)."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        search_paths = {"PATH": path, "PYTHONPATH": str(PACKAGES)}
        environment = os.environ | search_paths | dict(variables or {})
        defaults = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        options = defaults | {"cwd": cwd, "env": environment} | options
        self._started.append(HostProcess(self._nodes[host], command, **options))
        return self._started[-1]

    def processes(self, host: int | None = None) -> list[psutil.Process]:
        """Return the processes of a host (or of all), without its init and listening sshd."""
        listening = {process.inner.pid for process in self._sshds.values()}
        chosen = self._nodes if host is None else [self._nodes[host]]
        alive = [process for node in chosen if node.is_alive for process in node.processes()]
        return [process for process in alive if process.pid not in listening]

    def kill_since(self, before: Sequence[psutil.Process] = ()) -> None:
        """Kill the processes of all hosts that are not in `before`. Raises HostsError."""
        deadline = time.monotonic() + VANISH_S
        while left := [process for process in self.processes() if process not in before]:
            if time.monotonic() > deadline:
                raise HostsError(f"cannot be killed: {left}")
            kill_all(left)
            time.sleep(0.02)

    def start_sshd(self, host: int) -> None:
        """Start the listening sshd, and wait until it listens. Raises HostsError."""
        assert host not in self._sshds, "it runs"
        folder = self.hosts[host].folder
        log = folder / "sshd.log"
        with log.open("w") as file:
            command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            process = HostProcess(self._nodes[host], command, stdin=subprocess.DEVNULL, stderr=file)
        self._sshds[host] = process
        deadline = time.monotonic() + SSHD_START_S
        while log.read_text().count("Server listening on") < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                raise HostsError(f"sshd does not start: {log.read_text()}")
            time.sleep(0.01)

    def _write_files(self) -> None:
        assert not self.folder.exists() or not any(self.folder.iterdir()), "folder in use"
        for host in self.hosts:
            host.folder.mkdir(parents=True)
        lines = [f"{host.name} slots={host.slots}\n" for host in self.hosts]
        self.hostfile.write_text("".join(lines))
        names = ["127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"]
        names += [f"{host.address} {host.name}\n" for host in self.hosts]
        names += [f"{host.address6} {host.name}-v6\n" for host in self.hosts]
        (self.folder / "names").write_text("".join(names))
        folders = {host.name: host.folder for host in self.hosts}
        all_names = {host.name: host.names for host in self.hosts}
        write_ssh_files(folders, all_names, self.ssh_port, PACKAGES)

    def _make_node(self, host: int) -> Node:
        home = Path("~/.ssh").expanduser()
        home.mkdir(mode=0o700, exist_ok=True)  # a mount point; its content is not changed
        folder = self.hosts[host].folder
        binds = {str(home): folder / "ssh", "/etc/hosts": self.folder / "names"}
        # Start-up files may take a lock, and a host may be killed while it is held.
        personal = (Path("~", name).expanduser() for name in SHELL_START_UP)
        binds |= {str(file): Path(os.devnull) for file in personal if file.exists()}
        return Node(self.hosts[host].name, self._visible, binds)

    def _plug_in(self, host: int) -> None:
        """Connect the host to the switch, and assign the addresses to its interface."""
        node, port, its = self._nodes[host], f"port{host}", self.hosts[host]
        hardware = f"02:00:00:77:00:{host + 1:02x}"  # the same after a restart: others cache it
        cable = f"link add {port} type veth peer name {INTERFACE} netns {node.pid}"
        cable += f" address {hardware}"
        plug = [cable, f"link set {port} master bridge0", f"link set {port} up"]
        self._switch.tool(["net"], "ip", "-batch", "-", lines=plug)
        addresses = [
            "link set lo up",
            f"address add {its.address}/24 dev {INTERFACE}",
            f"address add {its.address6}/64 dev {INTERFACE} nodad",
            f"link set {INTERFACE} up",
        ]
        node.tool(["net"], "ip", "-batch", "-", lines=addresses)

    def _close_nodes(self) -> None:
        for node in self._nodes:
            node.close()

    def _discard(self) -> None:
        for process in [*self._sshds.values(), *self._started]:
            process.discard()


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Return the folders below /tmp, without those inside another of them."""
    roots: list[Path] = []
    for folder in sorted(path.resolve() for path in folders):
        if folder.is_relative_to("/tmp") and not any(folder.is_relative_to(root) for root in roots):
            roots.append(folder)
    return roots
